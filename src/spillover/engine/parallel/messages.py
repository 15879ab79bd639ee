"""What rank 0 and the processes of the other ranks say to each other, beside the steps themselves."""

from __future__ import annotations

import msgspec

from spillover.engine.config import EngineConfig
from spillover.engine.step import Step, decode_step, encode_step
from spillover.plan.planner import Plan


class Launch(msgspec.Struct):
    """The first message to a rank."""

    config: EngineConfig  # as planned
    plan: Plan  # of the rank
    rank: int
    parent: int  # process that the rank ends with
    folder: str  # where ranks meet
    threads: int
    pool: int | None = None  # descriptor of shared memory for the KV pool; None: its own
    shares_pool: bool = False  # on CUDA: rank 0 maps the KV pool


class Started(msgspec.Struct, tag=True):
    """The rank is there, and about to meet the others."""


class Met(msgspec.Struct, tag=True):
    """The rank has met the others."""


class Loaded(msgspec.Struct, tag=True):
    """The rank waits for steps."""

    weight_bytes: int


class Lost(msgspec.Struct, tag=True):
    """The rank has failed and ends."""

    why: str
    expected: bool  # a sentence for the user; else a traceback


FromRank = Started | Met | Loaded | Lost
STOP = b""  # to a rank, in place of a step


def encode(message: Launch | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def encode_turn(step: Step, running: int) -> bytes:
    """Make the message of a step. `running`: earlier steps whose results rank 0 has not taken yet."""
    return bytes([running]) + encode_step(step)


def decode_turn(message: bytes) -> tuple[Step, int]:
    return decode_step(message[1:]), message[0]


def decode_launch(message: bytes) -> Launch:
    return msgspec.msgpack.decode(message, type=Launch)


def decode_from_rank(message: bytes) -> FromRank:
    found: FromRank = msgspec.msgpack.decode(message, type=FromRank)
    return found
