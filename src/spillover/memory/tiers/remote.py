"""Blocks in a remote store that speaks the Redis protocol (Valkey, Redis), shared by all servers of one identity.

A value is a record header and the payload. A server that is dead, slow, full, or no such server at all is a tier
without blocks: after the first failure nothing waits for it, and it is asked now and then whether it is back.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import CorruptRecordError, Lane, Ticket, TierStats
from spillover.memory.tiers.health import Health
from spillover.memory.tiers.record import HEADER_BYTES, RecordHeader
from spillover.memory.tiers.remote_address import RemoteAddress
from spillover.memory.tiers.seal import PLAIN, Seal
from spillover.units import format_bytes

TIMEOUT_SECONDS = 1.0
LOOKUP_SHARE = 0.25  # share of the timeout for a lookup
RETRY_SECONDS = 1.0
PROBE_SECONDS = 5.0  # without a look-up, after which the server is asked whether it is there
BATCH_BYTES = 4 << 20  # in one round trip
READ_BYTES = 256 << 10  # at once from the socket; much faster than redis-py's 32 KiB
FORGET_BATCH = 1000

# The order of use of all blocks of an identity is a sorted set: name -> microseconds, by the server's clock. The first
# block of a batch counts as the last used, since a prefix without its beginning is worth nothing.
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl = tonumber(ARGV[1])
"""
# ARGV: ttl in ms or 0, the most blocks, names about to be set. Makes room for them.
_ACCOUNT = (
    _NOW
    + """
if ttl > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ttl * 1000) end
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now - i, ARGV[i]) end
local extra = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
local evicted = 0
if extra > 0 then
    local oldest = redis.call('ZPOPMIN', KEYS[1], extra)
    for i = 1, #oldest, 2 do
        redis.call('UNLINK', oldest[i])
        evicted = evicted + 1
    end
end
if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
return {redis.call('ZCARD', KEYS[1]), evicted}
"""
)
# ARGV: ttl in ms or 0, names that were used.
_TOUCH = (
    _NOW
    + """
for i = 2, #ARGV do
    if redis.call('EXISTS', ARGV[i]) == 1 then
        redis.call('ZADD', KEYS[1], now - i, ARGV[i])
        if ttl > 0 then redis.call('PEXPIRE', ARGV[i], ttl) end
    else
        redis.call('ZREM', KEYS[1], ARGV[i])
    end
end
if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
"""
)
# ARGV: how many.
_EVICT = """
local oldest = redis.call('ZPOPMIN', KEYS[1], ARGV[1])
for i = 1, #oldest, 2 do redis.call('UNLINK', oldest[i]) end
return #oldest / 2
"""


class RemoteUnavailableError(Exception):
    """The server cannot be used at all."""


class RemoteRefusedError(Exception):
    """The server answers, but takes no blocks: it is full, read-only, or does not let us."""


class RemoteTier:
    """A tier in a Redis server; `ttl=` and `size=` bound it, the latter over all servers that share the identity.

    Where servers give different sizes, the smallest holds. Without `size=` the server's own memory policy decides, and
    evict() has no order to go by: it drops nothing.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        payload_bytes: int,
        identity: bytes,
        wake: Callable[[], None],
        *,
        timeout: float = TIMEOUT_SECONDS,
        lookup_timeout: float | None = None,
        retry_seconds: float = RETRY_SECONDS,
        probe_seconds: float = PROBE_SECONDS,
        threads: int = 2,
        seal: Seal = PLAIN,
    ) -> None:
        """Connect lazily. `timeout=` in the address goes before the argument; `threads` work in each direction."""
        address = RemoteAddress.parse(url)
        self.payload_bytes = payload_bytes
        self._address = address
        self._seal = seal
        self._identity = identity = seal.identity(identity)
        self._prefix = b"spillover:" + identity.hex().encode() + b":"
        self._order = self._prefix + b"use"
        self._ttl_ms = math.ceil(address.ttl * 1000) if address.ttl is not None else 0
        value_bytes = HEADER_BYTES + payload_bytes
        self._max_blocks = address.size // value_bytes if address.size is not None else None
        if self._max_blocks is not None and self._max_blocks < 1:
            raise SpilloverError(
                f"a remote cache of {format_bytes(address.size or 0)} at {address.shown} cannot hold one block; "
                f"give it at least size={value_bytes}"
            )
        self._batch = max(1, BATCH_BYTES // value_bytes)
        if self._max_blocks is not None:
            self._batch = min(self._batch, self._max_blocks)  # a batch must not evict its own blocks
        self._seconds = address.timeout if address.timeout is not None else timeout
        self._lookup_seconds = lookup_timeout if lookup_timeout is not None else self._seconds * LOOKUP_SHARE
        self._retry_seconds = retry_seconds
        self._client = self._connect(self._seconds)
        self._asking = self._connect(self._lookup_seconds)
        self._lookups = Lane("remote-lookup", 1, wake, (probe_seconds, self._probe_idle))
        self._probes: deque[Exception | None] = deque(maxlen=1)  # from an idle worker: how the last one ended
        self._reading = Lane("remote-read", threads, wake)
        self._writing = Lane("remote-write", threads, wake)
        self._work: dict[Ticket[Any], str] = {}
        self._health = Health(f"remote cache at {address.shown}")
        self._write_health = Health(f"remote cache at {address.shown} takes no blocks")
        self._down_until = 0.0  # the server is not asked before; meaningful while _down
        self._down = False
        self._writes_from = 0.0  # after a refusal
        self._clear_wanted = False
        self._open = True
        self._accounts: deque[tuple[int, int]] = deque()  # from workers: blocks there are, blocks evicted for others
        self._blocks = self._evictions = 0
        self._stores = self._loads = self._store_failures = self._load_failures = 0
        self._seconds_writing = self._seconds_reading = 0.0
        self._submit_probe()  # so that the log hears of a wrong address at the start

    # The tier

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        self.poll()
        if not keys or not self._usable():
            return Ticket.ended([False] * len(keys))
        names = [self._name(key) for key in keys]

        def ask() -> list[bool]:
            # One command for all is several times cheaper, and mostly all are there or none is.
            pipe = self._asking.pipeline(transaction=False)
            pipe.exists(*names)
            count = self._execute(pipe)[0]
            if count in (0, len(names)):
                return [count > 0] * len(names)
            for name in names:
                pipe.exists(name)
            return [reply == 1 for reply in self._execute(pipe)]

        return self._submit(self._lookups, "lookup", ask, time.monotonic() + self._lookup_seconds)

    def has(self, key: bytes) -> None:
        """Return None: only the server knows."""

    def store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        now = time.monotonic()
        if not self._usable() or now < self._writes_from:
            self._store_failures += len(items)
            return [Ticket.ended(False) for _ in items]
        return self._submit_batches(self._writing, "store", items, self._store, now + self._seconds)

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Ticket[bool]]:
        self.poll()
        if not self._usable():
            return [Ticket.ended(False) for _ in items]
        return self._submit_batches(self._reading, "load", items, self._load, time.monotonic() + self._seconds)

    def evict(self, count: int) -> Ticket[int]:
        self.poll()
        if self._max_blocks is None or count < 1 or not self._usable():
            return Ticket.ended(0)

        def drop() -> int:
            try:
                return int(self._client.eval(_EVICT, 1, self._order, count))
            except RedisError as error:
                raise self._unavailable(error) from None

        return self._submit(self._writing, "evict", drop, time.monotonic() + self._seconds)

    def poll(self) -> None:
        for lane in (self._lookups, self._reading, self._writing):
            for ticket in lane.drain():
                self._end(self._work.pop(ticket), ticket)
            if self._open and lane.stuck(time.monotonic()):
                # Cutting the connections frees the workers; a server that trickles would hold them for ever.
                self._fail("no answer within the deadline")
                self._disconnect()
        if self._probes and "probe" not in self._work.values():
            self._take_probe(self._probes.popleft())
        while self._accounts:
            self._blocks, evicted = self._accounts.popleft()
            self._evictions += evicted
        waiting = self._work.values()
        if self._open and self._down and time.monotonic() >= self._down_until and "probe" not in waiting:
            self._submit_probe()
        if self._open and self._clear_wanted and not self._down and not {"store", "clear"} & set(waiting):
            self._submit(self._writing, "clear", self._forget, math.inf)

    def clear(self) -> None:
        """Forget all blocks: this tier has none until the server, asked again and again, has forgotten them."""
        self._clear_wanted = True
        for ticket, kind in list(self._work.items()):
            if kind == "store":
                ticket.cancel()
        self.poll()

    def stats(self) -> TierStats:
        """Return statistics; `blocks` counts those of all engines, as far as known, which takes `size=`."""
        self.poll()
        return TierStats(
            blocks=self._blocks,
            bytes=self._blocks * self.payload_bytes,
            capacity_bytes=self._address.size,
            stores=self._stores,
            loads=self._loads,
            load_failures=self._load_failures,
            store_failures=self._store_failures,
            evictions=self._evictions,
            bytes_written=self._stores * self.payload_bytes,
            bytes_read=self._loads * self.payload_bytes,
            seconds_writing=self._seconds_writing,
            seconds_reading=self._seconds_reading,
            available=self._usable() and self._write_health.ok,
        )

    def close(self, deadline: float) -> None:
        if not self._open:
            return
        for ticket, kind in list(self._work.items()):
            if kind not in ("store", "clear"):
                ticket.cancel()
        while self._clear_wanted and not self._down and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.001)
        self._open = False
        ended = self._writing.close(deadline)
        if not ended:
            self._disconnect()
        for lane in (self._writing, self._reading, self._lookups):
            lane.close(min(deadline, time.monotonic() + 0.1))
        self.poll()
        self._disconnect()

    def damage(self, key: bytes, bit: int) -> bool:
        """Flip one bit of a stored payload where it lies, for tests of what notices; False if there is no such block.

        Waits for the server.
        """
        name, at = self._name(key), HEADER_BYTES + bit // 8 % self.payload_bytes
        try:
            byte: Any = self._client.getrange(name, at, at)
            if len(byte) == 1:
                self._client.setrange(name, at, bytes([byte[0] ^ 1 << bit % 8]))
            return len(byte) == 1
        except RedisError:
            return False

    # The workers' side

    def _store(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool | Exception]:
        names = [self._name(key) for key, _ in items]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(name)
        there = [reply == 1 for reply in self._execute(pipe)]
        if any(there):
            self._touch([name for name, found in zip(names, there, strict=True) if found])
        new = [i for i, found in enumerate(there) if not found]
        if new:
            self._set([names[i] for i in new], [items[i] for i in new])
        return [True] * len(items)

    def _set(self, names: Sequence[bytes], items: Sequence[tuple[bytes, memoryview]]) -> None:
        # In one transaction with the account of them, so that no value is ever stored that is in no account.
        pipe = self._client.pipeline(transaction=self._max_blocks is not None)
        if self._max_blocks is not None:
            pipe.eval(_ACCOUNT, 1, self._order, self._ttl_ms, self._max_blocks, *names)
        for name, (key, payload) in zip(names, items, strict=True):
            header = RecordHeader(key, self.payload_bytes, self._seal.of_payload(payload), 0, time.time())
            pipe.set(name, b"".join((header.pack(self._identity, self._seal), payload)), px=self._ttl_ms or None)
        try:
            replies = pipe.execute()
        except RedisConnectionError as error:
            raise self._unavailable(error) from None
        except ResponseError as error:
            raise RemoteRefusedError(self._address.hide(str(error))) from None
        except RedisError as error:
            raise self._unavailable(error) from None
        if self._max_blocks is not None:
            self._accounts.append((int(replies[0][0]), int(replies[0][1])))

    def _load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool | Exception]:
        names = [self._name(key) for key, _ in items]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        values = self._execute(pipe)
        results = [self._take(value, *item) for value, item in zip(values, items, strict=True)]
        bad = [name for name, result in zip(names, results, strict=True) if isinstance(result, CorruptRecordError)]
        if bad:
            self._try(lambda: self._client.unlink(*bad))  # so that it can be stored again
        self._touch(names)
        return results

    def _take(self, value: object, key: bytes, buffer: memoryview) -> bool | Exception:
        if value is None:
            return False
        if not isinstance(value, bytes):
            return CorruptRecordError("no block lies under this name")
        view = memoryview(value)
        header = RecordHeader.unpack(view[:HEADER_BYTES], self._identity, self._seal)
        payload = view[HEADER_BYTES:]
        if header is None or header.key != key or not header.payload_bytes == len(payload) == self.payload_bytes:
            return CorruptRecordError("the record has a wrong header or length")
        if header.payload_seal != self._seal.of_payload(payload):
            return CorruptRecordError("wrong checksum")
        buffer[:] = payload
        return True

    def _touch(self, names: Sequence[bytes]) -> None:
        """Mark keys as used just now."""
        if self._max_blocks is not None:
            self._try(lambda: self._client.eval(_TOUCH, 1, self._order, self._ttl_ms, *names))
        elif self._ttl_ms:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.pexpire(name, self._ttl_ms)
            self._try(pipe.execute)

    def _forget(self) -> bool:
        try:
            names: list[bytes] = []
            for name in self._client.scan_iter(match=self._prefix + b"*", count=FORGET_BATCH):
                names.append(name)
                if len(names) == FORGET_BATCH:
                    self._client.unlink(*names)
                    names.clear()
            if names:
                self._client.unlink(*names)
        except RedisError as error:
            raise self._unavailable(error) from None
        return True

    def _execute(self, pipe: Any) -> list[Any]:
        """Execute commands and return replies, some of which may be errors; if all are, the server is unusable."""
        try:
            replies: list[Any] = pipe.execute(raise_on_error=False)
        except RedisError as error:
            raise self._unavailable(error) from None
        if all(isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE") for reply in replies):
            raise self._unavailable(replies[0])
        return replies

    def _try(self, call: Callable[[], object]) -> None:
        """Try a command: whether it succeeds or not (on a read-only replica, say), what was done before it stands."""
        with suppress(RedisError):
            call()

    def _unavailable(self, error: Exception) -> RemoteUnavailableError:
        return RemoteUnavailableError(self._address.hide(str(error)) or type(error).__name__)

    # The owner's side

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _usable(self) -> bool:
        return self._open and not self._down and not self._clear_wanted

    def _connect(self, seconds: float) -> "redis.Redis":
        try:
            client = redis.Redis.from_url(
                self._address.url,
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                socket_read_size=READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            client.connection_pool.make_connection()  # connects nowhere, but takes or refuses every parameter
        except (TypeError, ValueError, RedisError) as error:
            problem = self._address.hide(str(error)).replace("AbstractConnection.__init__() got an ", "")
            raise SpilloverError(f"the remote store {self._address.shown} cannot be used: {problem}") from None
        return client

    def _submit(self, lane: Lane, kind: str, work: Callable[[], Any], deadline: float) -> Ticket[Any]:
        ticket = lane.submit(work, deadline)
        self._work[ticket] = kind
        return ticket

    def _submit_probe(self) -> None:
        self._submit(self._lookups, "probe", self._ping, time.monotonic() + self._seconds)

    def _ping(self) -> bool:
        try:
            return bool(self._asking.ping())
        except RedisError as error:
            raise self._unavailable(error) from None

    def _probe_idle(self) -> None:
        """Probe the server, by a worker that nobody has asked for a while; poll() takes it in."""
        try:
            self._ping()
        except Exception as error:
            self._probes.append(error)
        else:
            self._probes.append(None)

    def _take_probe(self, error: Exception | None) -> None:
        if error is not None:
            self._fail(self._address.hide(str(error)))
        else:
            self._down = False
            self._health.succeeded()

    def _submit_batches(
        self,
        lane: Lane,
        kind: str,
        items: Sequence[tuple[bytes, memoryview]],
        do: Callable[[Sequence[tuple[bytes, memoryview]]], list[bool | Exception]],
        deadline: float,
    ) -> list[Ticket[bool]]:
        tickets: list[Ticket[bool]] = []
        for start in range(0, len(items), self._batch):
            part = items[start : start + self._batch]
            assert all(payload.nbytes == self.payload_bytes for _, payload in part), "a payload of another size"

            def work(wanted: Sequence[int], part: Sequence[tuple[bytes, memoryview]] = part) -> list[bool | Exception]:
                return do([part[i] for i in wanted])

            batch = lane.submit_batch(work, len(part), deadline)
            self._work.update(dict.fromkeys(batch, kind))
            tickets.extend(batch)
        return tickets

    def _end(self, kind: str, ticket: Ticket[Any]) -> None:
        result, error = ticket.result(), ticket.error
        if kind == "store":
            self._seconds_writing += ticket.seconds
            self._stores += result is True
            self._store_failures += error is not None
        elif kind == "load":
            self._seconds_reading += ticket.seconds
            self._loads += result is True
            self._load_failures += error is not None
        elif kind == "evict":
            self._evictions += result or 0
        elif kind == "clear" and result:
            self._clear_wanted = False
            self._blocks = 0
        if isinstance(error, RemoteRefusedError):
            self._write_health.failed(str(error))
            self._writes_from = time.monotonic() + self._retry_seconds
        elif error is not None and not isinstance(error, CorruptRecordError | TimeoutError):
            self._fail(self._address.hide(str(error)))
        elif error is None and result is not None:
            if kind == "probe" or not self._down:
                self._down = False
                self._health.succeeded()
            if kind == "store":
                self._write_health.succeeded()

    def _fail(self, error: str) -> None:
        self._health.failed(error)
        self._down = True
        self._down_until = time.monotonic() + self._retry_seconds

    def _disconnect(self) -> None:
        for client in (self._client, self._asking):
            client.connection_pool.disconnect(inuse_connections=True)
