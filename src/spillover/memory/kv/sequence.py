"""The blocks that a live sequence holds in the KV cache, and the cache's statistics."""

from dataclasses import dataclass, field

from spillover.memory.kv.prefix_tree import Node


@dataclass(frozen=True, slots=True)
class CacheStats:
    total: int  # number of blocks: free + evictable + protected + in_flight
    free: int
    evictable: int
    protected: int
    in_flight: int
    tree_nodes: int
    query_tokens: int  # number of tokens of all admitted sequences
    hit_tokens: int  # number of prompt tokens found in the tree
    evictions: int  # number of evicted blocks


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one live sequence."""

    tables: list[list[int]]  # block tables, one per layer group
    first: list[int]  # per group: table entries before this index are 0, the others are blocks
    num_computed: int = 0  # number of tokens with KV
    num_ready: int = 0  # number of leading blocks that are complete; only these are ever shared
    node: Node | None = None  # node of the last ready block; None if this sequence adds nothing to the tree
    # Block index -> blocks of the tree for tokens that this sequence computed too: referenced, but in no table.
    held: dict[int, list[int]] = field(default_factory=dict)
    load_end: int = 0  # number of blocks that the last extend_to_load made the tables cover
    num_offloaded: int = 0  # number of leading blocks that are in host memory only
    num_queried: int = 0  # number of tokens that admit() looked up in the tree
