"""What a live sequence holds of the KV cache, and the cache's numbers."""

from dataclasses import dataclass, field

from spillover.memory.kv.prefix_tree import Node


@dataclass(frozen=True, slots=True)
class CacheStats:
    total: int  # blocks; free + evictable + protected + in_flight
    free: int
    evictable: int
    protected: int
    in_flight: int
    tree_nodes: int
    query_tokens: int  # tokens of all sequences that came to run
    hit_tokens: int  # prompt tokens found in the tree
    evictions: int  # blocks


@dataclass(slots=True)
class SequenceBlocks:
    """What one live sequence holds."""

    tables: list[list[int]]  # one a layer group
    first: list[int]  # per group: table entries before this one are 0
    num_computed: int = 0  # tokens
    num_ready: int = 0  # leading blocks that are complete; only these are ever shared
    node: Node | None = None  # node of the last ready block; None: this sequence adds nothing to the tree
    # Block index -> the tree's blocks for tokens that this sequence computed as well: held, though in no table.
    held: dict[int, list[int]] = field(default_factory=dict)
    load_end: int = 0  # blocks that the tables cover since the last extend_to_load
    num_offloaded: int = 0  # leading blocks that the device has no room for
    asked: int = 0  # tokens that were looked for in the tree
