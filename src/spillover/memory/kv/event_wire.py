"""KV events on the wire, as vLLM's `kv_events.py` defines them: a batch is a msgpack array, its events are maps with
their name under `type`. Until June 2026 vLLM's events were arrays, as SGLang's still are: `read_events` reads both."""

from __future__ import annotations

from typing import Any

import msgspec

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"  # the medium of a block: device, host memory, disk
MEDIA = (GPU, CPU, STORAGE)
SEQUENCE_BYTES = 8  # big-endian
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # in place of a sequence number, after the last reply
SNAPSHOT = b"kv_snapshot"  # sent in place of a replay's sequence number: requests all blocks held now


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive blocks that can be found on `medium` from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the block before the first; None if there is none or it is unknown
    token_ids: list[int]  # tokens of all these blocks; [] if unknown
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # One entry per block: for the first block of a salted prompt the digest of model and salt; never the salt itself.
    extra_keys: list[Any] | None = None
    group_idx: int | None = None  # index of the layer group; None if the model has only one
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that can no longer be found on `medium`."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """All blocks have been removed from every medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float  # seconds since 1970
    events: list[Any]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Return a block's hash on the wire: the last eight bytes of its digest, shortened as vLLM shortens its hashes."""
    return int.from_bytes(digest[-8:], "big")


_BATCH = msgspec.msgpack.Decoder(EventBatch)
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
# Defaults of fields that some versions leave out.
_UNSAID = {"parent_block_hash": None, "token_ids": (), "lora_id": None, "medium": None, "lora_name": None}


def read_events(payload: bytes) -> list[Event]:
    """Return the events of a batch of any version; unknown fields and events of other kinds are ignored. Raise
    DecodeError or ValidationError if the payload is not a batch of events."""
    return [event for value in _BATCH.decode(payload).events if (event := _read(value)) is not None]


def _read(value: Any) -> Event | None:
    if isinstance(value, dict):
        name, fields = value.get("type"), value
    elif isinstance(value, list) and value:
        name, kind = value[0], _KINDS.get(value[0])
        fields = {} if kind is None else dict(zip(kind.__struct_fields__, value[1:], strict=False))
    else:
        raise msgspec.ValidationError(f"an event is a map or an array, not {value!r:.40}")
    if not isinstance(name, str):
        raise msgspec.ValidationError("an event has no name")
    if (kind := _KINDS.get(name)) is None:
        return None
    hashes, parent = fields.get("block_hashes", ()), fields.get("parent_block_hash")
    if any(isinstance(each, bytes) for each in (*hashes, parent)):  # full digests, which vLLM sends if configured to
        fields = {**fields, "block_hashes": [_number(each) for each in hashes], "parent_block_hash": _number(parent)}
    return msgspec.convert({**_UNSAID, **fields, "type": name}, kind)


def _number(name: Any) -> Any:
    return block_hash(name) if isinstance(name, bytes) else name
