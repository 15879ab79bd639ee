"""If prefixes order the queue, requests that arrive together compute their shared prefix once, if it is most of what
they have to compute."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from spillover.engine.loop import Engine
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.shared_prompts import common_tokens
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.memory.connector import NullConnector
from spillover.memory.kv.kv_cache import KVCache
from support.simulated import VOCAB, SimulatedRunner, expected_tokens

RNG = random.Random(5)
SHARED = [RNG.randrange(VOCAB) for _ in range(400)]


def run(prompts: list[list[int]], num_blocks: int = 400, overlap: bool = True,
        fields: list[dict[str, Any]] | None = None, **config: Any) -> tuple[list[Request], int]:
    """Return the finished requests, with checked tokens, and the number of prompt rows computed."""
    options = {"policy": "lpm", "max_num_seqs": 16, "max_num_batched_tokens": 4096, "max_model_len": 1024, **config}
    engine = Engine(Scheduler(SchedulerConfig(num_groups=1, **options), KVCache(num_blocks, 8, (None,)),
                              NullConnector()), runner := SimulatedRunner(8, (None,)), overlap)
    requests = [Request(str(index), prompt, SamplingParams(max_tokens=4, temperature=0),
                        **(fields[index] if fields else {})) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(500):
        engine.step()
        engine.scheduler.check()
        if not engine.has_work:
            break
    for request in requests:
        assert request.output_token_ids == expected_tokens(request, 1024)
    return requests, sum(item.count for step in runner.steps for item in step.items) - 3 * len(requests)


def tails(count: int, shared: int, length: int) -> list[list[int]]:
    return [SHARED[:shared] + [RNG.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_common_beginning_is_computed_once(overlap: bool, policy: str) -> None:
    requests, rows = run(tails(6, 320, 40), overlap=overlap, policy=policy)
    assert rows == 320 + 6 * 40
    assert sorted(request.sources.device for request in requests if request.sources) == [0] + 5 * [320]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_keep_their_order(policy: str) -> None:
    assert run(tails(6, 320, 40), policy=policy)[1] == 6 * 360


def test_who_shares_nothing_does_not_wait() -> None:
    others = [[RNG.randrange(VOCAB) for _ in range(200)] for _ in range(3)]
    requests, _ = run(tails(2, 320, 40) + others)
    assert all(other.scheduled < requests[1].scheduled for other in requests[2:])


@pytest.mark.parametrize(("shared", "length"), [(120, 8), (200, 320)])
def test_it_is_not_worth_to_wait_for_little(shared: int, length: int) -> None:
    """A request does not wait for less than 128 shared tokens, or less than half of what it has to compute."""
    _, rows = run(tails(4, shared, length))
    assert rows == 4 * (shared + length)


def test_salts_static_batches_and_scored_prompts_do_not_wait() -> None:
    prompts = tails(4, 320, 40)
    assert run(prompts, fields=[{"cache_salt": str(index)} for index in range(4)])[1] == 4 * 360
    assert run(prompts, static_batching=True)[1] == 4 * 360


def test_what_the_cache_has_is_not_waited_for() -> None:
    """Requests wait for the short prompt; then the rest of the shared prefix is too short to wait for."""
    requests, rows = run([SHARED[:320], *tails(3, 400, 8)])
    assert rows == 320 + 3 * (400 - 320 + 8)
    assert all(request.sources is not None and request.sources.device == 320 for request in requests[1:])


@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_end_right(seed: int) -> None:
    """Random prompts finish correctly in small pools, with chunks, and with leaders preempted while others wait."""
    rng = random.Random(seed)
    prompts = [SHARED[:rng.randrange(1, 400)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
               for _ in range(14)]
    run(prompts, num_blocks=rng.randrange(64, 120), max_num_batched_tokens=rng.choice((64, 200, 4096)),
        max_num_seqs=rng.randrange(2, 9), overlap=bool(seed % 2))


def test_common_tokens() -> None:
    one = array("i", [1, 2, 3, 4])
    assert [common_tokens(one, array("i", other)) for other in ([], [2], [1], [1, 2, 9, 4], [1, 2, 3, 4, 5])] == [
        0, 0, 1, 2, 4]
    one.append(5)  # fails if its buffer is still exported
