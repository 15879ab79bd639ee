"""The tokens of finished requests, in a file next to a disk tier's blocks, from which drafts are made after a restart.

Blocks are named by digests, from which tokens cannot be recovered, so tokens are stored separately. The file is
bounded: when it is full, the older half is dropped. A separate thread writes it, under the lock of the disk tier.
A record has a mark, the digest of model and `cache_salt`, the tokens and a seal over all of these and the identity of
the cache; bytes that are not a valid record are skipped, and the next record is found by its mark.
"""

from __future__ import annotations

import hmac
import logging
import os
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from spillover.memory.kv.digest import DIGEST_BYTES, TOKEN_BYTES, packed
from spillover.memory.tiers.folder import TEMPORARY, TOKENS, CacheFolder
from spillover.memory.tiers.seal import PLAIN, Seal

log = logging.getLogger("spillover.memory")

MOST_BYTES = 1 << 20
LEAST_BYTES = 1 << 14
SHARE = 64  # a log uses at most 1 / SHARE of its disk tier's bytes
MOST_TOKENS = 4096  # maximum number of tokens in one record
MOST_WAITING = 256  # maximum number of records that wait to be written, as the disk may hang
_MARK = b"SPTK"
_HEAD = struct.Struct(f"<4sI{DIGEST_BYTES}s")  # mark, number of tokens, digest


class TokenLog:
    def __init__(self, root: str | Path, capacity: int, identity: bytes, seal: Seal = PLAIN) -> None:
        """Determine the path and size limit of the file, without I/O. `capacity`: bytes of the disk tier at `root`."""
        self.path = CacheFolder.of(Path(root), seal.identity(identity)).path / TOKENS
        self.most_bytes = min(MOST_BYTES, capacity // SHARE)  # maximum size of the file; 0: the log is disabled
        if self.most_bytes < LEAST_BYTES:
            self.most_bytes = 0
        self._identity = identity
        self._seal = seal
        self._nbytes = 0
        self._waiting: deque[bytes] = deque()
        self._news = threading.Condition()
        self._closing = False
        self._failed = False
        self._writer: threading.Thread | None = None

    def load(self) -> Iterator[tuple[bytes, array[int]]]:
        """Yield (digest, tokens) of every record, oldest first; log a warning about damaged bytes."""
        data = self._read()
        found, skipped = self._records(data)
        self._nbytes = len(data)
        if skipped:
            log.warning("%s: %d bytes of kept tokens are damaged and left out; nothing is drafted from them", self.path,
                        skipped)
        for start, _ in found:
            _, count, digest = _HEAD.unpack_from(data, start)
            first = start + _HEAD.size
            yield digest, array("i", data[first:first + TOKEN_BYTES * count])

    def append(self, digest: bytes, tokens: Sequence[int]) -> None:
        """Queue tokens, at most the last MOST_TOKENS, to be written soon. It never waits for the disk."""
        if not self.most_bytes or self._failed or not tokens:
            return
        record = self._record(digest, tokens[-self._most_tokens():])
        with self._news:
            if self._closing or len(self._waiting) >= MOST_WAITING:
                return
            self._waiting.append(record)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="spillover-tokens", daemon=True)
                self._writer.start()
            self._news.notify()

    def close(self, seconds: float) -> None:
        """Write queued records for at most this many seconds; nothing is written afterwards."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._writer is not None:
            self._writer.join(max(0.0, seconds))
            with self._news:
                self._waiting.clear()

    def _most_tokens(self) -> int:
        room = self.most_bytes // 2 - _HEAD.size - self._seal.nbytes
        return min(MOST_TOKENS, room // TOKEN_BYTES)

    def _record(self, digest: bytes, tokens: Sequence[int]) -> bytes:
        data = _HEAD.pack(_MARK, len(tokens), digest) + packed(tokens)
        return data + self._seal.of_payload(self._identity + data)

    def _records(self, data: bytes) -> tuple[list[tuple[int, int]], int]:
        """Return the (start, end) of each valid record, and the number of bytes outside of records."""
        found, skipped, at = [], 0, 0
        while at < len(data):
            end = self._end_of(data, at)
            if end is None:
                start, at = at, data.find(_MARK, at + 1)
                at = len(data) if at < 0 else at
                skipped += at - start
            else:
                found.append((at, end))
                at = end
        return found, skipped

    def _end_of(self, data: bytes, at: int) -> int | None:
        """Return the end of the record that starts at this offset; None if no valid record does."""
        if len(data) - at < _HEAD.size:
            return None
        mark, count, _ = _HEAD.unpack_from(data, at)
        sealed = at + _HEAD.size + TOKEN_BYTES * count
        end = sealed + self._seal.nbytes
        if mark != _MARK or not 0 < count <= MOST_TOKENS or end > len(data):
            return None
        right = self._seal.of_payload(self._identity + data[at:sealed])
        return end if hmac.compare_digest(right, data[sealed:end]) else None

    def _read(self) -> bytes:
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return file.read(2 * MOST_BYTES)  # a log is never larger
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s cannot be read: %s; drafts start without the tokens of earlier requests", self.path, error)
            return b""

    # Methods of the writer thread

    def _write(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closing:
                    self._news.wait()
                if not self._waiting:
                    return
                records = list(self._waiting)
                self._waiting.clear()
            try:
                for record in records:
                    self._add(record)
            except OSError as error:
                self._failed = True
                log.warning("%s cannot be written: %s; tokens from now on are not available for drafts after a restart",
                            self.path, error)
                return

    def _add(self, record: bytes) -> None:
        if self._nbytes + len(record) > self.most_bytes:
            self._shorten()
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab") as file:
            file.write(record)
            self._nbytes = file.tell()

    def _shorten(self) -> None:
        """Drop all but the newest records, which may use up to half of the file's maximum size."""
        data = self._read()
        found, _ = self._records(data)
        first = len(found)
        nbytes = 0
        while first and nbytes + found[first - 1][1] - found[first - 1][0] <= self.most_bytes // 2:
            first -= 1
            nbytes += found[first][1] - found[first][0]
        temporary = self.path.with_name(TOKENS + TEMPORARY)
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.writelines(data[start:end] for start, end in found[first:])
        os.replace(temporary, self.path)
        self._nbytes = nbytes
