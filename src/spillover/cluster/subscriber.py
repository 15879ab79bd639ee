"""Follows a replica's KV events over ZMQ: a snapshot first, then every batch; missed batches are requested again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from spillover.cluster.mirror import IndexState, Mirror
from spillover.memory.kv.event_wire import END, SEQUENCE_BYTES, SNAPSHOT

log = logging.getLogger("spillover.router")

ANSWER_SECONDS = 5.0  # timeout for each message of a replay or a snapshot
RETRY_SECONDS = 0.2  # wait between attempts to become exact
RESYNC_SECONDS = 5.0  # time without a batch after which a mirror that is not exact requests a snapshot or replay again
HWM = 100_000


def reachable(endpoint: str, url: str) -> str:
    """Return the address at which to reach an endpoint that a server at `url` has bound."""
    scheme, _, place = endpoint.partition("://")
    host, colon, port = place.rpartition(":")
    if scheme == "ipc" or host not in ("*", "0.0.0.0", "[::]", "::"):
        return endpoint
    name = urlsplit(url).hostname or "127.0.0.1"
    return f"{scheme}://{f'[{name}]' if ':' in name else name}{colon}{port}"


class Subscriber:
    """A task that keeps a mirror up to date until it is cancelled."""

    def __init__(self, mirror: Mirror, endpoint: str, replay_endpoint: str | None, topic: str = "") -> None:
        self.mirror = mirror
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._context = zmq.asyncio.Context()

    async def run(self) -> None:
        batches = self._socket(zmq.SUB, self._endpoint)
        batches.subscribe(self._topic)
        try:
            await self._resync(None)
            while True:
                try:
                    async with asyncio.timeout(RESYNC_SECONDS):
                        _, number, payload = await batches.recv_multipart()
                except TimeoutError:
                    if self.mirror.state is not IndexState.EXACT:
                        await self._resync(None)
                    continue
                except ValueError:  # not three frames: another program publishes there
                    continue
                sequence = int.from_bytes(number, "big")
                if not self._apply_batch(sequence, payload):
                    await self._resync(sequence)
                    last = self.mirror.sequence
                    if last is None or last < sequence:
                        self._begin_partial(sequence, payload)
        finally:
            self._context.destroy(linger=0)

    def _apply_batch(self, sequence: int, payload: bytes) -> bool:
        try:
            return self.mirror.apply_batch(sequence, payload)
        except Exception as error:  # a malformed batch
            log.warning("KV events of %s cannot be read: %s", self._endpoint, error)
            self.mirror.reset()
            return False

    def _begin_partial(self, sequence: int, payload: bytes) -> None:
        """Continue although batches are lost: the view is correct from now on, but incomplete."""
        self.mirror.begin_partial(sequence - 1)
        self._apply_batch(sequence, payload)
        self.mirror.begin_partial(sequence)

    async def _resync(self, received: int | None) -> None:
        """Make the mirror exact again: by a snapshot, or by a replay if the server supports no snapshots."""
        if self._replay_endpoint is None:
            return
        for _ in range(2):
            replies = await self._request(SNAPSHOT)
            if replies:
                self.mirror.restore(replies[-1][0], [payload for _, payload in replies])
                return
            replies = await self._request((0).to_bytes(SEQUENCE_BYTES, "big"))
            if replies is not None and (replies[0][0] == 0 if replies else received in (None, 0)):
                if self.mirror.replay(replies, whole=True):
                    return
            elif replies:
                return  # the first batches are lost
            await asyncio.sleep(RETRY_SECONDS)

    async def _request(self, request: bytes) -> list[tuple[int, bytes]] | None:
        """Return the replies to a request; None on timeout."""
        assert self._replay_endpoint is not None
        socket = self._socket(zmq.DEALER, self._replay_endpoint)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await socket.send_multipart((b"", request))
            replies: list[tuple[int, bytes]] = []
            while True:
                async with asyncio.timeout(ANSWER_SECONDS):
                    frames = await socket.recv_multipart()
                number, payload = frames[-2], frames[-1]
                if number == END:
                    return replies
                replies.append((int.from_bytes(number, "big"), payload))
        except (TimeoutError, zmq.ZMQError, IndexError):
            return None
        finally:
            socket.close(linger=0)

    def _socket(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(HWM)
        socket.setsockopt(zmq.IPV6, "[" in address)
        with contextlib.suppress(AttributeError):
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(address)
        return socket
