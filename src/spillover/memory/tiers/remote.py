"""The remote tier: a store with the Redis protocol (Valkey, Redis), shared by all engines of one identity.

A value is a record header and the payload. A store that is down, slow, full, or not a Redis server is treated as a
tier without blocks (see `served.py`).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import CorruptRecordError, Ticket, TierStats
from spillover.memory.tiers.health import Health
from spillover.memory.tiers.record import HEADER_BYTES, RecordHeader
from spillover.memory.tiers.remote_address import RemoteAddress
from spillover.memory.tiers.seal import PLAIN, Seal
from spillover.memory.tiers.served import Items, ServedTier
from spillover.units import format_bytes

TIMEOUT_SECONDS = 1.0
LOOKUP_SHARE = 0.25  # share of the timeout for a lookup
RETRY_SECONDS = 1.0
PROBE_SECONDS = 5.0  # seconds without a lookup after which the server is probed
BATCH_BYTES = 4 << 20  # maximum bytes of one round trip
READ_BYTES = 256 << 10  # bytes per read from the socket; much faster than redis-py's 32 KiB
FORGET_BATCH = 1000

# The order of use of all blocks of an identity is a sorted set: name -> microseconds, by the server's clock. The first
# block of a batch counts as the most recently used, since a prefix without its beginning is useless.
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl = tonumber(ARGV[1])
"""
# ARGV: ttl in ms or 0, maximum number of blocks, names about to be set. The script evicts blocks to make room for them.
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
# ARGV: ttl in ms or 0, names of blocks that were used.
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
# ARGV: number of blocks to evict.
_EVICT = """
local oldest = redis.call('ZPOPMIN', KEYS[1], ARGV[1])
for i = 1, #oldest, 2 do redis.call('UNLINK', oldest[i]) end
return #oldest / 2
"""


class RemoteUnavailableError(Exception):
    """The server is down or cannot be used at all."""


class RemoteRefusedError(Exception):
    """The server answers but accepts no blocks: it is full or read-only, or denies permission."""


class RemoteTier(ServedTier):
    """A tier in a Redis server, limited by `ttl=` and `size=`, the latter over all engines that share the identity.

    If engines give different sizes, the smallest applies. Without `size=` the server's memory policy decides, and
    evict(), which has no order of use then, drops nothing.
    """

    name = "remote"
    _harmless = (*ServedTier._harmless, RemoteRefusedError)

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
        """Connect lazily. `timeout=` in the address overrides the argument; `threads`: workers in each direction."""
        address = RemoteAddress.parse(url)
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
        batch = max(1, BATCH_BYTES // value_bytes)
        if self._max_blocks is not None:
            batch = min(batch, self._max_blocks)  # a batch must not evict its own blocks
        seconds = address.timeout if address.timeout is not None else timeout
        super().__init__(f"remote cache at {address.shown}", payload_bytes, wake, batch=batch, seconds=seconds,
                         lookup_seconds=lookup_timeout if lookup_timeout is not None else seconds * LOOKUP_SHARE,
                         retry_seconds=retry_seconds, probe_seconds=probe_seconds, threads=threads, down=False)
        self._client = self._connect(self._seconds)
        self._asking = self._connect(self._lookup_seconds)
        self._write_health = Health(f"remote cache at {address.shown} accepts no blocks")
        self._writes_from = 0.0  # monotonic time before which nothing is stored, because the server refused a store
        self._accounts: deque[tuple[int, int]] = deque()  # from workers: (number of blocks in the store, evicted)
        self._blocks = self._evictions = 0
        self._submit_probe()  # so that a wrong address is logged at the start

    # Tier methods

    def lookup(self, keys: Sequence[bytes]) -> Ticket[list[bool]]:
        self.poll()
        if not keys or not self._usable():
            return Ticket.ended([False] * len(keys))
        names = [self._name(key) for key in keys]

        def ask() -> list[bool]:
            # One command for all is several times cheaper, and usually all blocks exist or none does.
            pipe = self._asking.pipeline(transaction=False)
            pipe.exists(*names)
            count = self._execute(pipe)[0]
            if count in (0, len(names)):
                return [count > 0] * len(names)
            for name in names:
                pipe.exists(name)
            return [reply == 1 for reply in self._execute(pipe)]

        return self._submit(self._lookups, "lookup", ask, time.monotonic() + self._lookup_seconds)

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

    def stats(self) -> TierStats:
        """Return statistics; `blocks` is the latest known number of all engines' blocks, 0 without `size=`."""
        self.poll()
        return replace(
            self._counters(),
            blocks=self._blocks,
            bytes=self._blocks * self.payload_bytes,
            capacity_bytes=self._address.size,
            evictions=self._evictions,
            available=self._usable() and self._write_health.ok,
        )

    def damage(self, key: bytes, bit: int) -> bool:
        """Flip one bit of a stored payload, for tests of damage detection; False if there is no such block.

        It waits for the server.
        """
        name, at = self._name(key), HEADER_BYTES + bit // 8 % self.payload_bytes
        try:
            byte: Any = self._client.getrange(name, at, at)
            if len(byte) == 1:
                self._client.setrange(name, at, bytes([byte[0] ^ 1 << bit % 8]))
            return len(byte) == 1
        except RedisError:
            return False

    # Methods called by workers

    def _store(self, items: Items, deadline: float) -> list[bool | Exception]:
        names = [self._name(key) for key, _ in items]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.exists(name)
        stored = [reply == 1 for reply in self._execute(pipe)]
        if any(stored):
            self._touch([name for name, found in zip(names, stored, strict=True) if found])
        new = [i for i, found in enumerate(stored) if not found]
        if new:
            self._set([names[i] for i in new], [items[i] for i in new])
        return [True] * len(items)

    def _set(self, names: Sequence[bytes], items: Items) -> None:
        # One transaction with the accounting, so that no value is stored that is not accounted for.
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

    def _load(self, items: Items, deadline: float) -> list[bool | Exception]:
        names = [self._name(key) for key, _ in items]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        values = self._execute(pipe)
        results = [self._take(value, *item) for value, item in zip(values, items, strict=True)]
        bad = [name for name, result in zip(names, results, strict=True) if isinstance(result, CorruptRecordError)]
        if bad:
            self._try(lambda: self._client.unlink(*bad))  # so that these blocks can be stored again
        self._touch(names)
        return results

    def _take(self, value: object, key: bytes, buffer: memoryview) -> bool | Exception:
        if value is None:
            return False
        if not isinstance(value, bytes):
            return CorruptRecordError("no block is stored under this name")
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
        """Mark blocks as just used."""
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
        """Execute commands and return the replies, some of which may be errors; raise if all are, or the call fails."""
        try:
            replies: list[Any] = pipe.execute(raise_on_error=False)
        except RedisError as error:
            raise self._unavailable(error) from None
        if all(isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE") for reply in replies):
            raise self._unavailable(replies[0])
        return replies

    def _try(self, call: Callable[[], object]) -> None:
        """Try a command whose failure, for example on a read-only replica, does not matter to the result."""
        with suppress(RedisError):
            call()

    def _unavailable(self, error: Exception) -> RemoteUnavailableError:
        return RemoteUnavailableError(self._address.hide(str(error)) or type(error).__name__)

    def _probe(self) -> bool:
        try:
            return bool(self._asking.ping())
        except RedisError as error:
            raise self._unavailable(error) from None

    # Results of requests

    def _ended(self, kind: str, result: Any, error: Exception | None) -> None:
        if kind == "evict":
            self._evictions += result or 0
        elif kind == "clear" and result:
            self._blocks = 0
        if isinstance(error, RemoteRefusedError):
            self._write_health.failed(str(error))
            self._writes_from = time.monotonic() + self._retry_seconds
        elif error is None and result is not None:
            if not self._down:
                self._health.succeeded()
            if kind == "store":
                self._write_health.succeeded()

    def _count(self) -> None:
        while self._accounts:
            self._blocks, evicted = self._accounts.popleft()
            self._evictions += evicted

    def _accepts_blocks(self) -> bool:
        return self._usable() and time.monotonic() >= self._writes_from

    def _error_text(self, error: Exception) -> str:
        return self._address.hide(str(error))

    # Methods called by the owner's thread

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

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
            client.connection_pool.make_connection()  # makes no connection, but checks every parameter
        except (TypeError, ValueError, RedisError) as error:
            problem = self._address.hide(str(error)).replace("AbstractConnection.__init__() got an ", "")
            raise SpilloverError(f"the remote store {self._address.shown} cannot be used: {problem}") from None
        return client

    def _abort_stuck_requests(self) -> None:
        """Free the workers, which a server that sends very slowly would block indefinitely."""
        self._fail("no answer within the deadline")
        self._disconnect()

    def _disconnect(self) -> None:
        for client in (self._client, self._asking):
            client.connection_pool.disconnect(inuse_connections=True)
