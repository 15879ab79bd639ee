"""What a live sequence holds of the KV cache, and the cache's numbers."""

from dataclasses import dataclass, field

from spillover.memory.host import Entry
from spillover.memory.prefix_tree import Node
from spillover.memory.restore import Restore


@dataclass(frozen=True, slots=True)
class CacheStats:
    total: int  # blocks; free + evictable + protected + in_flight
    free: int
    evictable: int
    protected: int
    in_flight: int
    tree_nodes: int
    query_tokens: int  # tokens of all sequences that came to run
    hit_tokens: int  # of these, found in the tree
    evictions: int  # blocks


@dataclass(slots=True)
class SequenceBlocks:
    """What one live sequence holds."""

    tables: list[list[int]]  # one a layer group
    first: list[int]  # per group: table entries before this one are 0
    num_computed: int = 0  # tokens
    num_ready: int = 0  # leading blocks that are complete; only these are ever shared
    node: Node | None = None  # of the last ready block; None: this sequence adds nothing to the tree
    # Block index -> the tree's blocks for tokens that this sequence computed as well: held, though in no table.
    held: dict[int, list[int]] = field(default_factory=dict)
    restore: Restore | None = None  # blocks that come from other tiers
    cold: list[Entry] = field(default_factory=list)  # leading blocks that the device has no room for: in host memory
    cold_addresses: tuple[int, ...] = ()  # of these
    parking: list[Entry] = field(default_factory=list)  # those that follow, on their way there
    failed_parks: int = 0
    asked: int = 0  # tokens that were looked for in the tree
