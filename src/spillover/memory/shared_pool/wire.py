"""What the owner of a shared pool and its clients say to each other: frames of msgpack over a local socket.

A frame is four bytes of length and a message. A client asks, the owner answers, in order. Many blocks go in
one message.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import msgspec

from spillover.errors import SpilloverError

VERSION = 2
LENGTH = struct.Struct("<I")
MOST_BYTES = 16 << 20  # of a message: a quarter of a million keys
NAME = "pool.sock"
LONGEST_PATH = 107  # bytes of a socket's path


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """First message of an engine; the answer is Welcome, with the memory's file descriptor beside it."""

    version: int
    identity: bytes
    payload_bytes: int
    description: dict[str, str]
    engine: str  # the same for all connections of an engine


class Find(msgspec.Struct, tag="find", array_like=True, frozen=True):
    keys: list[bytes]


class Take(msgspec.Struct, tag="take", array_like=True, frozen=True):
    keys: list[bytes]


class Publish(msgspec.Struct, tag="publish", array_like=True, frozen=True):
    places: list[int]
    checksums: list[int]


class Pin(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    keys: list[bytes]


class Release(msgspec.Struct, tag="release", array_like=True, frozen=True):
    """Let go of what was read; `damaged` are blocks that did not match their checksum, to be forgotten."""

    places: list[int]
    damaged: list[bytes]


class Evict(msgspec.Struct, tag="evict", array_like=True, frozen=True):
    """Forget the least recently used blocks: of the client's model or, of a client without one, of the named model
    or of all."""

    count: int
    identity: str | None = None  # as hexadecimal digits, or the first of them
    older_than: float | None = None  # seconds


class Clear(msgspec.Struct, tag="clear", array_like=True, frozen=True):
    """Forget all blocks of the client's model."""


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Ask for a Report: of the client's model or, for a client without one, of all. Also whether the owner is there."""


class Keep(msgspec.Struct, tag="keep", array_like=True, frozen=True):
    """Ask for a run of bytes that engines keep once: weights. The answer is Kept, with the run's file descriptor beside
    it unless it is BUSY or FULL. The run is the connection's until that closes."""

    version: int
    digest: bytes
    nbytes: int
    engine: str


class Written(msgspec.Struct, tag="written", array_like=True, frozen=True):
    """Let others have a run that was to be written."""

    digest: bytes
    nbytes: int


Request = Hello | Find | Take | Publish | Pin | Release | Evict | Clear | Ask | Keep | Written


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    generation: bytes  # of the memory: another owner has another
    size: int  # bytes of the memory
    slab_bytes: int  # of which it has whole ones: no block reaches from one into the next


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    reason: str


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    there: list[bool]


class Places(msgspec.Struct, tag="places", array_like=True, frozen=True):
    places: list[int]


class Pinned(msgspec.Struct, tag="pinned", array_like=True, frozen=True):
    blocks: list[tuple[int, int] | None]  # place and checksum


class Count(msgspec.Struct, tag="count", array_like=True, frozen=True):
    count: int


NEW = "new"  # of a run: to be written
READY = "ready"
BUSY = "busy"  # another engine is writing it
FULL = "full"


class Kept(msgspec.Struct, tag="kept", array_like=True, frozen=True):
    state: str  # NEW, READY, BUSY or FULL


class ModelReport(msgspec.Struct, frozen=True):
    identity: str
    description: dict[str, str]
    payload_bytes: int
    blocks: int
    bytes: int
    engines: int
    hits: int
    misses: int
    stores: int
    evictions: int
    last_use: float  # time.time()


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True):
    pid: int
    capacity: int  # bytes
    used: int  # bytes of slots that are not free
    prepared: int  # bytes taken from the system
    engines: int
    uptime: float
    models: list[ModelReport]
    weights: int  # bytes of weights, for which `capacity` is smaller
    weights_used: int  # bytes of those that an engine has


Reply = Welcome | Refused | Found | Places | Pinned | Count | Report | Kept

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    return _requests.decode(body)


def decode_reply(body: bytes | memoryview) -> Reply:
    return _replies.decode(body)


def socket_path(given: str | None) -> Path:
    """Return where the owner listens: the path that was given or, for None and "auto", one place for each user."""
    if given is not None and given != "auto":
        path = Path(given).expanduser().absolute()
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime) / "spillover" / NAME
    else:
        path = Path.home() / ".cache" / "spillover" / "pool" / NAME
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise SpilloverError(f"the path of a pool's socket has at most {LONGEST_PATH} bytes, and {path} is longer")
    return path


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
