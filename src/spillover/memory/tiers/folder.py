"""The folder of a disk tier: one sub-folder per cache, named by its identity, and a lock that admits one process.

    PATH/lock
    PATH/<identity in hex>/description.json    model, dtype, block size, layout: for display only
    PATH/<identity in hex>/<number>.kv         segments
    PATH/<identity in hex>/recency             when each record was last used; written when the tier is closed
    PATH/<identity in hex>/tokens              tokens of finished requests, if drafts are made from them (token_log.py)

Other files are neither counted nor changed.
"""

import fcntl
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import checksum
from spillover.memory.tiers.segment import MAX_IDENTITY_BYTES, SUFFIX, Segment

log = logging.getLogger("spillover.memory")

LOCK = "lock"
DESCRIPTION = "description.json"
RECENCY = "recency"
TOKENS = "tokens"
TEMPORARY = ".tmp"
OTHER_FILES = (DESCRIPTION, RECENCY, TOKENS)  # files of a cache next to its segments
MAX_DESCRIPTION_BYTES = 4096
RECENCY_BYTES = 16  # bytes per record in the recency file
_RECENCY = struct.Struct("<Qd")  # sequence number of a record, time of its last use


class FolderLock:
    """A lock held by the one process that may write. It is released when the process ends, even if it is killed."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def acquire(cls, folder: Path, advice: str = "stop that one, or choose another folder") -> "FolderLock | None":
        """Lock the folder; SpilloverError if another process has it; None if it cannot be written, so needs no lock."""
        path = folder / LOCK
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise SpilloverError(
                f"the disk cache at {folder} is in use by process {holder or '(unknown)'}; {advice}"
            ) from None
        except OSError:
            pass  # a file system without locks: checksums still prevent wrong bytes from being loaded
        with suppress(OSError):  # the process id serves the error message above only
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        return cls(file)

    def release(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The file of a segment: path, size and modification time."""

    path: Path
    nbytes: int
    modified: float


class CacheFolder:
    """The blocks of one identity on one disk."""

    def __init__(self, path: Path, identity: bytes) -> None:
        self.path = path
        self.identity = identity

    @classmethod
    def of(cls, root: Path, identity: bytes) -> "CacheFolder":
        assert 0 < len(identity) <= MAX_IDENTITY_BYTES, f"an identity of {len(identity)} bytes"
        return cls(root / identity.hex(), identity)

    @classmethod
    def all(cls, root: Path) -> "list[CacheFolder]":
        """Return every cache under the root, least recently used first."""
        found = []
        for path in root.iterdir():
            with suppress(ValueError):
                cache = cls(path, bytes.fromhex(path.name))
                if 0 < len(cache.identity) <= MAX_IDENTITY_BYTES and cache._is_one():
                    found.append(cache)
        return sorted(found, key=lambda folder: (folder.last_use(), folder.path))

    def make(self) -> None:
        """Create the folder; SpilloverError if there is a symbolic link in its place."""
        self.path.mkdir(mode=0o700, exist_ok=True)  # private, as prompts can be recovered from its files
        found = self.path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise SpilloverError(f"--disk {self.path.parent} cannot be used: {self.path.name} in it is a symbolic "
                                 "link; remove it")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            log.warning("disk cache at %s: other users can write to it, and so change this server's answers; give a "
                        "folder that only you can write to, or --kv-store-key-file", self.path)

    def segment_files(self) -> list[SegmentFile]:
        """Return the segment files, oldest first."""
        files = []
        for path in self._files(SUFFIX):
            with suppress(FileNotFoundError):
                found = path.lstat()
                files.append(SegmentFile(path, found.st_size, found.st_mtime))
        return sorted(files, key=lambda file: (file.modified, file.path))

    def segments(self, writable: bool = False) -> list[Segment]:
        """Return the readable segments; a file that is not a segment (yet), or was just removed, is left out."""
        segments = []
        for path in sorted(self._files(SUFFIX)):
            with suppress(OSError):
                if (segment := Segment.open(path, self.identity, writable)) is not None:
                    segments.append(segment)
        return segments

    def nbytes(self) -> int:
        return self.small_bytes() + sum(file.nbytes for file in self.segment_files())

    def small_bytes(self) -> int:
        """Return the bytes of the files other than segments."""
        total = 0
        for name in OTHER_FILES:
            with suppress(OSError):
                total += (self.path / name).stat().st_size
        return total

    def last_use(self) -> float:
        """Return when the cache was last opened, closed or written, in seconds since 1970."""
        times = [file.modified for file in self.segment_files()]
        for name in OTHER_FILES:
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(times, default=0.0)

    def segment_path(self, number: int) -> Path:
        return self.path / f"{number:06}{SUFFIX}"

    def describe(self, description: Mapping[str, str]) -> None:
        text = json.dumps({"identity": self.identity.hex(), **description}, indent=1).encode()
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise SpilloverError(
                f"a cache's description may take {MAX_DESCRIPTION_BYTES} bytes, and this one takes {len(text)}"
            )
        self._replace(DESCRIPTION, text)

    def description(self) -> dict[str, str]:
        """Return the description; empty if it cannot be read."""
        try:
            found = json.loads((self.path / DESCRIPTION).read_bytes())
            return {str(name): str(value) for name, value in found.items() if name != "identity"}
        except (OSError, ValueError, AttributeError):
            return {}

    def touch(self) -> None:
        os.utime(self.path / DESCRIPTION)

    def write_recency(self, last_uses: Iterable[tuple[int, float]]) -> None:
        """Write (sequence, last use) of every record."""
        data = b"".join(_RECENCY.pack(*use) for use in last_uses)
        self._replace(RECENCY, data + checksum(data).to_bytes(8, "little"))

    def recency(self) -> dict[int, float]:
        """Read the times of last use by sequence; records written since the tier was last closed are missing."""
        try:
            whole = (self.path / RECENCY).read_bytes()
        except OSError:
            return {}
        data, check = whole[:-8], whole[-8:]
        if len(data) % _RECENCY.size or int.from_bytes(check, "little") != checksum(data):
            return {}
        now = time.time()  # a time in the future, from a wrong clock, must not keep a record indefinitely
        return {sequence: min(used, now) for sequence, used in _RECENCY.iter_unpack(data)}

    def tidy(self) -> None:
        """Remove files of interrupted writes, and the folder itself if it has no segment."""
        for path in self._files(TEMPORARY):
            path.unlink(missing_ok=True)
        if not any(self._files(SUFFIX)):
            for name in OTHER_FILES:
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # it contains other files
                self.path.rmdir()

    def _is_one(self) -> bool:
        """Return whether the folder is a cache, not just any folder whose name is hex digits."""
        if self.identity.hex() != self.path.name:
            return False
        return (self.path / DESCRIPTION).exists() or bool(self._files(SUFFIX))

    def _files(self, suffix: str) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if path.suffix == suffix]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically: a reader sees the old file or the new one."""
        temporary = self.path / (name + TEMPORARY)
        try:
            temporary.unlink(missing_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(data)
            os.replace(temporary, self.path / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
