"""The protocol between the owner of a shared pool and its clients: frames of msgpack over a local socket.

A frame is four bytes of length and a message. The owner answers a client's requests in order. One message may be about
many blocks.
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
MOST_BYTES = 16 << 20  # maximum bytes of a message: a quarter of a million keys
NAME = "pool.sock"
LONGEST_PATH = 107  # maximum bytes of a socket's path


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The first message of an engine; the answer is Welcome, with the memory's file descriptor."""

    version: int
    identity: bytes
    payload_bytes: int
    description: dict[str, str]
    engine: str  # id of the engine, the same for all its connections


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
    """Release pinned blocks, and drop `damaged` ones, which did not match their checksum."""

    places: list[int]
    damaged: list[bytes]


class Evict(msgspec.Struct, tag="evict", array_like=True, frozen=True):
    """Drop the least recently used blocks: of the client's model or, for a client without one, of the named model or
    of all."""

    count: int
    identity: str | None = None  # hexadecimal digits of the identity, or a prefix of them; None: all models
    older_than: float | None = None  # drop only blocks not used for this many seconds; None: of any age


class Clear(msgspec.Struct, tag="clear", array_like=True, frozen=True):
    """Drop all blocks of the client's model."""


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Request a Report: of the client's model or, for a client without one, of all. It also serves as a probe."""


class Keep(msgspec.Struct, tag="keep", array_like=True, frozen=True):
    """Request a run of bytes that engines share, such as weights. The answer is Kept, with the run's file descriptor
    unless it is BUSY or FULL. The connection uses the run until it closes."""

    version: int
    digest: bytes
    nbytes: int
    engine: str


class Written(msgspec.Struct, tag="written", array_like=True, frozen=True):
    """Mark a NEW run as written, so that other engines can use it."""

    digest: bytes
    nbytes: int


Request = Hello | Find | Take | Publish | Pin | Release | Evict | Clear | Ask | Keep | Written


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    generation: bytes  # random id of the memory, different for each owner process
    size: int  # bytes of the memory
    slab_bytes: int  # bytes of a slab; the memory is whole slabs, and no block crosses from one into the next


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    reason: str


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    there: list[bool]


class Places(msgspec.Struct, tag="places", array_like=True, frozen=True):
    places: list[int]


class Pinned(msgspec.Struct, tag="pinned", array_like=True, frozen=True):
    blocks: list[tuple[int, int] | None]  # offset and checksum of each block; None if the pool does not have it


class Count(msgspec.Struct, tag="count", array_like=True, frozen=True):
    count: int


NEW = "new"  # the requesting engine has to write the run
READY = "ready"
BUSY = "busy"  # another engine is writing the run
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
    last_use: float  # time of the last use in seconds since 1970


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True):
    pid: int
    capacity: int  # maximum bytes of blocks
    used: int  # bytes of slots that are not free
    prepared: int  # bytes of blocks' memory allocated from the system
    engines: int
    uptime: float
    models: list[ModelReport]
    weights: int  # bytes of weights, by which `capacity` is smaller
    weights_used: int  # bytes of weights that engines use now


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
    """Return the path where the owner listens: the given one or, for None and "auto", a default path per user."""
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
    """Return the ids of the process and user at the other end, as reported by the kernel."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
