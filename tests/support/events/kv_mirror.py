"""A subscriber to KV events: structs that follow vLLM's definition, and a mirror of what an engine's tiers hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8
PATIENCE = 10.0


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class LesserBlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """The message as decoded by a subscriber that knows fewer fields."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


Holdings = set[tuple[str, int, int]]  # medium, layer group, hash


class Mirror:
    """A subscriber's view of the tiers. It rejects batches out of order; the caller then needs a replay or snapshot."""

    def __init__(self) -> None:
        self.held: Holdings = set()
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # hash -> (parent's hash, tokens)
        self.sequence: int | None = None  # sequence number of the last applied batch
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def take(self, sequence: int, payload: bytes) -> bool:
        """Apply a batch; return False if one before it is missing."""
        if self.sequence is None or sequence != self.sequence + 1:
            return self.sequence is not None and sequence <= self.sequence
        self.apply(payload)
        self.sequence = sequence
        return True

    def apply(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            places = {(str(event.medium), event.group_idx or 0, each) for each in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not places & self.held, "a block is stored twice"
                self.held |= places
                self._learn(event)
            else:
                assert places <= self.held, "a block is removed that was not there"
                self.held -= places

    def restore(self, sequence: int, payloads: list[bytes]) -> None:
        """Replace the whole content by a snapshot."""
        self.held.clear()
        for payload in payloads:
            self.apply(payload)
        self.sequence = sequence

    def _learn(self, event: BlockStored) -> None:
        size = event.block_size
        assert event.medium != "GPU" or len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        for place, each in enumerate(event.block_hashes if event.token_ids else ()):
            said = parent, tuple(event.token_ids[place * size : (place + 1) * size])
            assert self.tokens.setdefault(each, said) == said, "one hash names two blocks"
            parent = each


class Subscriber:
    """A mirror that receives its batches over sockets."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "", hwm: int = 1000) -> None:
        """Subscribe. `hwm`: maximum number of unread batches queued here."""
        self.mirror = Mirror()
        self.replays = self.snapshots = 0
        self._context = zmq.Context()
        self._batches = self._context.socket(zmq.SUB)
        self._batches.setsockopt(zmq.LINGER, 0)
        self._batches.set_hwm(hwm)
        self._batches.subscribe(topic)
        self._batches.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def ask(self, request: bytes) -> list[tuple[int, bytes]]:
        """Send a request; return the replies without the end mark."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._replay_endpoint)
        try:
            socket.send_multipart((b"", request))
            replies: list[tuple[int, bytes]] = []
            while True:
                assert socket.poll(int(PATIENCE * 1000)), "no answer"
                delimiter, sequence, payload = socket.recv_multipart()
                assert delimiter == b""
                if sequence == END:
                    assert payload == b""
                    return replies
                replies.append((int.from_bytes(sequence, "big"), payload))
        finally:
            socket.close()

    def snapshot(self) -> int:
        """Restore the mirror from a snapshot; return its sequence number."""
        replies = self.ask(b"kv_snapshot")
        assert len({sequence for sequence, _ in replies}) == 1
        self.mirror.restore(replies[0][0], [payload for _, payload in replies])
        self.snapshots += 1
        return replies[0][0]

    def heal(self) -> None:
        """Close a gap: by a replay if the publisher still has the missing batches, otherwise by a snapshot."""
        last = self.mirror.sequence
        replies = [] if last is None else self.ask((last + 1).to_bytes(8, "big"))
        if last is None or not replies or replies[0][0] != last + 1:
            self.snapshot()
            return
        self.replays += 1
        for sequence, payload in replies:
            assert self.mirror.take(sequence, payload)

    def receive(self, loses: Callable[[], bool] = lambda: False) -> int:
        """Apply the batches that have arrived; return their number. `loses` decides for each whether to drop it."""
        count = 0
        while self._batches.poll(0):
            _, sequence, payload = self._batches.recv_multipart()
            count += 1
            if not loses() and not self.mirror.take(int.from_bytes(sequence, "big"), payload):
                self.heal()
        return count

    def wait(self, count: int = 1) -> None:
        """Wait until `count` batches have arrived."""
        deadline = time.monotonic() + PATIENCE
        while count > 0:
            assert self._batches.poll(int(max(0, deadline - time.monotonic()) * 1000)), "nothing was published"
            count -= self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)
