"""Store blocks FIRST, FIRST + 1, ... on a disk tier until killed, and print which blocks are stored.

`python -m support.disk_writer FOLDER FIRST [KILL_AT]`: with KILL_AT the process kills itself with SIGKILL in the middle
of its KILL_AT-th write.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spillover.memory.tiers.disk import DiskTier
from spillover.memory.tiers.recovery import FIXED_BYTES, segment_cost
from support.disk_calls import open_disk
from support.tier_calls import block_key

PAYLOAD = 1 << 20
SLOTS = 12
SEGMENT_SLOTS = 5
BATCH = 3


def big_block(number: int) -> bytes:
    """Return a block's payload; it is made quickly, so that most of the time is spent writing."""
    return number.to_bytes(8, "little") * (PAYLOAD // 8)


def open_big(path: Path) -> DiskTier:
    last = SLOTS % SEGMENT_SLOTS
    capacity = (
        FIXED_BYTES + SLOTS // SEGMENT_SLOTS * segment_cost(SEGMENT_SLOTS, PAYLOAD) + segment_cost(last, PAYLOAD)
    )
    return open_disk(path, capacity_bytes=capacity, payload_bytes=PAYLOAD, segment_bytes=SEGMENT_SLOTS * PAYLOAD)


def kill_at_write(kill_at: int) -> None:
    real, count = os.pwritev, 0

    def write(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count == kill_at:
            if len(buffers[0]) > 4096:  # data within one page is written completely or not at all
                real(file, [buffers[0][: len(buffers[0]) // 2]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(file, buffers, offset)

    os.pwritev = write  # type: ignore[assignment]


def main() -> None:
    tier = open_big(Path(sys.argv[1]))
    number = int(sys.argv[2])
    if len(sys.argv) > 3:
        kill_at_write(int(sys.argv[3]))
    while True:
        numbers = range(number, number + BATCH)
        number += BATCH
        tickets = tier.store([(block_key(n), memoryview(big_block(n))) for n in numbers])
        while not all(ticket.done() for ticket in tickets):
            time.sleep(0.0001)
        assert all(ticket.result() for ticket in tickets)
        print(number - 1, flush=True)


if __name__ == "__main__":
    main()
