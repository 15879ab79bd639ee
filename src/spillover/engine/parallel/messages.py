"""The messages between rank 0 and the processes of the other ranks."""

from __future__ import annotations

import msgspec

from spillover.engine.config import EngineConfig
from spillover.engine.step import Step, decode_step, encode_step
from spillover.plan.planner import Plan


class Launch(msgspec.Struct):
    """The first message to a rank."""

    config: EngineConfig  # the configuration after planning
    plan: Plan  # the plan of the rank
    rank: int
    parent: int  # pid of rank 0's process, with which the rank exits
    folder: str  # folder of the file store through which ranks meet
    threads: int
    pool: int | None = None  # descriptor of shared memory for the KV pool; None: the rank allocates the pool itself
    shares_pool: bool = False  # on CUDA: whether rank 0 maps the rank's KV pool


class Started(msgspec.Struct, tag=True):
    """The rank has started, and is about to meet the others."""


class Met(msgspec.Struct, tag=True):
    """The rank has met the others."""


class Loaded(msgspec.Struct, tag=True):
    """The rank has loaded its part and waits for steps."""

    weight_bytes: int


class Lost(msgspec.Struct, tag=True):
    """The rank has failed and exits."""

    why: str
    expected: bool  # True: `why` is a message for the user; False: it is a traceback


FromRank = Started | Met | Loaded | Lost
STOP = b""  # sent to a rank in place of a step, to stop it


def encode(message: Launch | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def encode_rank_step(step: Step, running: int) -> bytes:
    """Encode a step for the other ranks. `running`: number of earlier steps whose results rank 0 has not taken yet."""
    return bytes([running]) + encode_step(step)


def decode_rank_step(message: bytes) -> tuple[Step, int]:
    return decode_step(message[1:]), message[0]


def decode_launch(message: bytes) -> Launch:
    return msgspec.msgpack.decode(message, type=Launch)


def decode_from_rank(message: bytes) -> FromRank:
    found: FromRank = msgspec.msgpack.decode(message, type=FromRank)
    return found
