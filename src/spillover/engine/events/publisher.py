"""The thread that publishes KV events over ZMQ, and answers who missed some or starts late. It never holds a step up:
a step leaves its records behind and goes on, and a subscriber that is slow misses batches, sees the gap, and asks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Protocol

import zmq

from spillover.engine.events.config import FLAG, KVEventsConfig, binds
from spillover.engine.events.journal import Journal
from spillover.engine.events.log import KVEventLog, Record
from spillover.errors import SpilloverError
from spillover.memory.connector import KVConnector
from spillover.memory.kv.event_wire import END, SEQUENCE_BYTES, SNAPSHOT
from spillover.memory.kv.kv_cache import KVCache

logger = logging.getLogger(__name__)

POLL_MS = 250  # after which records are taken though no step has ended since
LINGER_MS = 200  # for the last batch to leave
CLOSE_SECONDS = 5.0
LEAST_REPLIES = 100_000  # that may wait for one who asked


class StepEvents(Protocol):
    """What the engine's loop tells: that a step has ended, and that there will be no more."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class NoStepEvents:
    """The listener where nothing is published."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class EventPublisher:
    def __init__(self, config: KVEventsConfig, log: KVEventLog, journal: Journal) -> None:
        """Bind the sockets and start. SpilloverError where an address is taken."""
        self._records = log.records
        self._journal = journal
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        try:
            self._publisher = _open(self._context, zmq.PUB, config.endpoint, config.hwm)
            self._requests = None
            if config.replay_endpoint is not None:
                replies = max(LEAST_REPLIES, 2 * config.buffer_steps)
                self._requests = _open(self._context, zmq.ROUTER, config.replay_endpoint, replies)
                self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that cannot go is an error, not dropped
        except SpilloverError:
            self._context.destroy(linger=0)
            raise
        self._stopping = self._failed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="spillover-kv-events", daemon=True)
        self._thread.start()

    # Called by the engine's thread

    def flush(self) -> None:
        if self._failed:
            self._records.clear()  # nobody takes them any more
        elif self._records:
            self._wake()

    def close(self) -> None:
        """Publish what is left, say that nothing is held any more, and end."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake_write, b"\0")

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._requests is not None:
            poller.register(self._requests, zmq.POLLIN)
        try:
            self._publish(self._take(), cleared=True)  # whatever was known of a process before this one
            while not self._stopping:
                ready = dict(poller.poll(POLL_MS))
                if self._wake_read in ready:
                    os.read(self._wake_read, 65536)
                self._publish_pending()
                if self._requests is not None and self._requests in ready:
                    self._answer(self._requests)
            self._publish_pending()
            self._publish([], cleared=True)
        except Exception:
            self._failed = True
            logger.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _take(self) -> list[Record]:
        return [self._records.popleft() for _ in range(len(self._records))]

    def _publish_pending(self) -> None:
        if self._records:
            self._publish(self._take())

    def _publish(self, records: list[Record], cleared: bool = False) -> None:
        sequence, batch = self._journal.append(records, cleared)
        try:
            self._publisher.send_multipart((self._topic, sequence, batch), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # a gap that subscribers see; the batch is kept for replay
            logger.warning("a batch of KV events could not be sent: %s", error)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Answer every request that is waiting, each by messages of (sequence number, batch) and an end mark."""
        while True:
            try:
                client, *rest = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                for sequence, batch in self._replies(rest):
                    socket.send_multipart((client, b"", sequence, batch), zmq.NOBLOCK)
                socket.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
            except zmq.ZMQError as error:  # no end mark follows: who still waits asks again
                logger.warning("a request for KV events could not be answered: %s", error)

    def _replies(self, request: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        if len(request) == 2 and not request[0] and request[1] == SNAPSHOT:
            return self._journal.snapshot()
        if len(request) == 2 and not request[0] and len(request[1]) == SEQUENCE_BYTES:
            return self._journal.replay(int.from_bytes(request[1], "big"))
        logger.warning("a request for KV events was neither a sequence number nor %s", SNAPSHOT.decode())
        return iter(())


def start_events(config: KVEventsConfig | None, kv: KVCache, connector: KVConnector) -> StepEvents:
    """Start to publish what an engine's tiers hold, those below the device with all that they have kept."""
    if config is None:
        return NoStepEvents()
    log = KVEventLog(kv.tree)
    connector.tell(log)
    publisher = EventPublisher(config, log, Journal(kv.block_size, kv.windows, config.buffer_steps))
    kv.tree.listeners.append(log)
    return publisher


def check_addresses(config: KVEventsConfig | None) -> None:
    """Refuse addresses that cannot be bound to; before anything is loaded."""
    if config is not None:
        with zmq.Context() as context:
            for address in (config.endpoint, config.replay_endpoint):
                if address is not None and binds(address):
                    _open(context, zmq.PUB, address, config.hwm).close(linger=0)


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, most: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(most)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    try:
        if binds(address):
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise SpilloverError(f"{FLAG}: {address} cannot be used ({error}); choose another address") from None
    return socket
