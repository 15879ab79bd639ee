"""The thread that publishes KV events over ZMQ and replays them to subscribers that missed some or start late. It never
delays a step: steps only queue their records. A slow subscriber misses batches, sees the gap, and requests a replay."""

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

POLL_MS = 250  # milliseconds after which records are published even if no step has completed
LINGER_MS = 200  # milliseconds to wait at close for the last batch to be sent
CLOSE_SECONDS = 5.0  # timeout in seconds for the thread to stop
LEAST_REPLIES = 100_000  # minimum limit of the replies queued for one client


class StepEvents(Protocol):
    """The interface by which the engine's loop reports that a step has completed, and that there will be no more."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class NoStepEvents:
    """The listener if events are not published."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class EventPublisher:
    def __init__(self, config: KVEventsConfig, log: KVEventLog, journal: Journal) -> None:
        """Bind the sockets and start the thread; SpilloverError if an address is in use."""
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
                self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that cannot be sent raises an error
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
            self._records.clear()  # they are no longer published
        elif self._records:
            self._wake()

    def close(self) -> None:
        """Publish the remaining records and then that all blocks are cleared, and stop the thread."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of unread wake-ups
            os.write(self._wake_write, b"\0")

    # Called in the publisher's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._requests is not None:
            poller.register(self._requests, zmq.POLLIN)
        try:
            self._publish(self._take(), cleared=True)  # clears blocks of an earlier process
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
        except zmq.ZMQError as error:  # subscribers see a gap; the batch is kept for replay
            logger.warning("a batch of KV events could not be sent: %s", error)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Answer all waiting requests, each with messages of (sequence number, batch) and an end mark."""
        while True:
            try:
                client, *rest = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                for sequence, batch in self._replies(rest):
                    socket.send_multipart((client, b"", sequence, batch), zmq.NOBLOCK)
                socket.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
            except zmq.ZMQError as error:  # no end mark is sent: a client still waiting retries
                logger.warning("a request for KV events could not be answered: %s", error)

    def _replies(self, request: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        if len(request) == 2 and not request[0] and request[1] == SNAPSHOT:
            return self._journal.snapshot()
        if len(request) == 2 and not request[0] and len(request[1]) == SEQUENCE_BYTES:
            return self._journal.replay(int.from_bytes(request[1], "big"))
        logger.warning("a request for KV events was neither a sequence number nor %s", SNAPSHOT.decode())
        return iter(())


def start_events(config: KVEventsConfig | None, kv: KVCache, connector: KVConnector) -> StepEvents:
    """Start publishing the blocks that an engine's tiers hold, including those that lower tiers have already."""
    if config is None:
        return NoStepEvents()
    log = KVEventLog(kv.tree)
    connector.publish_to(log)
    publisher = EventPublisher(config, log, Journal(kv.block_size, kv.windows, config.buffer_steps))
    kv.tree.listeners.append(log)
    return publisher


def check_addresses(config: KVEventsConfig | None) -> None:
    """Raise SpilloverError for addresses that cannot be bound to; called before the model is loaded."""
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
