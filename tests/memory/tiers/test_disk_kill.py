"""kill -9 during a write: stored blocks are found, torn ones are not, and no wrong byte is ever loaded."""

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support import TESTS
from support.disk_writer import BATCH, PAYLOAD, SLOTS, big_block, open_big
from support.tier_calls import block_key, close, get, has, put


def write_until_killed(path: Path, first: int, seconds: float = 60.0, kill_at: int | None = None) -> int:
    """Return the last block reported as stored, or first - 1; the writer is killed after `seconds`, or kills itself."""
    command = [sys.executable, "-m", "support.disk_writer", str(path), str(first)]
    if kill_at is not None:
        command.append(str(kill_at))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS)
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    said = ""
    if kill_at is None:
        said = process.stdout.readline()
        time.sleep(seconds)
        process.kill()
    said += process.stdout.read()
    assert process.stderr.read() == ""
    process.wait(10)
    watchdog.cancel()
    whole = [line for line in said.splitlines(keepends=True) if line.endswith("\n")]
    return int(whole[-1]) if whole else first - 1


def check_what_is_left(path: Path, first: int, last: int) -> None:
    tier = open_big(path)
    assert tier.dropped == 0, "a killed process tears no record: its header is written last"
    numbers = range(max(0, last - 3 * SLOTS), last + 4 * BATCH)
    keys = [block_key(number) for number in numbers]
    there = has(tier, keys)
    for number, found, payload in zip(numbers, there, get(tier, keys, PAYLOAD), strict=True):
        assert (payload is not None) == found, f"block {number} was found, but did not load"
        assert payload in (None, big_block(number)), f"block {number} is wrong"
    # The batch after the last line may have evicted others already, but only the oldest.
    sure = range(max(first, last - (SLOTS - 2 * BATCH)), last + 1)
    assert has(tier, [block_key(number) for number in sure]) == [True] * len(sure)
    assert sum(there) <= SLOTS
    tier.check()
    close(tier)


def test_kill_at_random_moments(tmp_path: Path) -> None:
    moments = random.Random(7)
    first = 0
    for _ in range(6):
        last = write_until_killed(tmp_path, first, moments.uniform(0.0, 0.1))
        assert last >= first
        check_what_is_left(tmp_path, first, last)
        first = last + 5 * BATCH


def test_kill_in_the_middle_of_every_write(tmp_path: Path) -> None:
    """Kill writes of a segment's title, header, payload and header, on an empty folder and then over records."""
    first = 0
    for kill_at in [1, 2, 3, 4, 5, *random.Random(5).sample(range(6, 60), 5)]:
        last = write_until_killed(tmp_path, first, kill_at=kill_at)
        check_what_is_left(tmp_path, first, last)
        first = last + 5 * BATCH


@pytest.mark.parametrize("seed", range(3))
def test_whatever_power_loss_leaves_behind(tmp_path: Path, seed: int) -> None:
    """After any mixture of old and new payload under the old, new, empty or torn header, nothing wrong is loaded."""
    old, new = block_key(1), block_key(2)
    tier = open_big(tmp_path)
    put(tier, {old: big_block(1)})
    close(tier)
    (path,) = tmp_path.rglob("*.kv")
    before = path.read_bytes()
    tier = open_big(tmp_path)
    tier.evict(1)
    put(tier, {new: big_block(2)})
    close(tier)
    after = path.read_bytes()
    header, payload = slice(4096, 4096 + 256), 8192
    assert before[header] != after[header]
    moments = random.Random(seed)
    outcomes = set()
    for _ in range(20):
        state = bytearray(before)
        head = moments.choice(("old", "zero", "new", "torn"))
        cut = moments.choice((0, PAYLOAD, moments.randrange(1, PAYLOAD)))
        state[payload : payload + cut] = after[payload : payload + cut]
        middle = moments.randrange(40, 80)  # within the key, which differs
        heads = {"old": before[header], "new": after[header], "zero": bytes(256)}
        state[header] = heads.get(head, after[header][:middle] + before[header][middle:])
        path.write_bytes(state)
        tier = open_big(tmp_path)
        old_whole, new_whole = head == "old" and cut == 0, head == "new" and cut == PAYLOAD
        assert has(tier, [old, new]) == [old_whole, new_whole], "the last records are checked at the start"
        assert get(tier, [old, new], PAYLOAD) == [
            big_block(1) if old_whole else None,
            big_block(2) if new_whole else None,
        ]
        assert tier.dropped == (head != "zero" and not old_whole and not new_whole)
        outcomes.add((old_whole, new_whole))
        close(tier)
    assert len(outcomes) >= 2
