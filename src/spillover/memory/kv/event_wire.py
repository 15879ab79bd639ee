"""KV events on the wire, as vLLM's `kv_events.py` defines them: msgpack arrays, in this order of fields."""

from __future__ import annotations

import msgspec

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"  # where a block lies: on the device, in host memory, on disk
MEDIA = (GPU, CPU, STORAGE)
SEQUENCE_BYTES = 8  # big-endian
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # in place of a sequence number, after the last reply
SNAPSHOT = b"kv_snapshot"  # a request for all that is held now, where a replay's would be a sequence number


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks that follow each other, and can be found on `medium` from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first; None: there is none, or it is not known
    token_ids: list[int]  # of all these blocks; [] where they are not known
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    # One a block. Of the first block of a salted prompt the digest of model and salt; the salt itself is not told.
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None  # layer group; None where the model has one
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks that can no longer be found on `medium`."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Nothing is held any more, on any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Return a block's name on the wire: the last eight bytes of its digest, as vLLM shortens its own."""
    return int.from_bytes(digest[-8:], "big")
