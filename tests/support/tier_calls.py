"""Operations common to tests of tiers: make payloads, wait for tickets with a deadline, store and load in one call."""

import random
import time
from collections.abc import Sequence
from typing import Any

from spillover.memory.tiers.base import Ticket, Tier

IDENTITY = bytes(range(32))
OTHER_IDENTITY = bytes(range(1, 33))
DESCRIPTION = {"model": "tiny", "dtype": "bfloat16", "block_size": "16", "layout": "test"}


def no_wake() -> None:
    pass


def block_key(number: int) -> bytes:
    return number.to_bytes(32, "big") + b"\0"


def block_bytes(seed: object, nbytes: int) -> bytes:
    return random.Random(repr(seed)).randbytes(nbytes)


def wait(tier: Tier | None, tickets: Sequence[Ticket[Any]], seconds: float = 30.0) -> list[Any]:
    """Return the results; fail if a ticket is not done in time."""
    deadline = time.monotonic() + seconds
    while not all(ticket.done() for ticket in tickets):
        assert time.monotonic() < deadline, "a ticket is still not done"
        if tier is not None:
            tier.poll()
        time.sleep(0.0005)
    if tier is not None:
        tier.poll()
    return [ticket.result() for ticket in tickets]


def put(tier: Tier, blocks: dict[bytes, bytes]) -> list[bool | None]:
    return wait(tier, tier.store([(key, memoryview(payload)) for key, payload in blocks.items()]))


def get(tier: Tier, keys: Sequence[bytes], nbytes: int) -> list[bytes | None]:
    """Return the payloads, None for each load that did not succeed."""
    buffers = [memoryview(bytearray(nbytes)) for _ in keys]
    results = wait(tier, tier.load(list(zip(keys, buffers, strict=True))))
    return [bytes(buffer) if result else None for buffer, result in zip(buffers, results, strict=True)]


def has(tier: Tier, keys: Sequence[bytes]) -> list[bool]:
    (found,) = wait(tier, [tier.lookup(keys)])
    return found if found is not None else [False] * len(keys)


def close(tier: Tier, seconds: float = 10.0) -> None:
    tier.close(time.monotonic() + seconds)
