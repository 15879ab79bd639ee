"""The scheduler without a model: every request finishes correctly under any admission, chunking and preemption."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from spillover.engine.loop import Engine
from spillover.engine.queue_policy import POLICIES
from spillover.engine.requests.request import Request, Status
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.engine.speculation.drafters.drafter import Draft
from spillover.engine.speculation.speculator import AdaptiveSpeculator, Speculator
from spillover.engine.step import Phase
from spillover.memory.connector import NullConnector
from spillover.memory.kv.kv_cache import KVCache
from support.simulated import VOCAB, SimulatedRunner, expected_tokens


def make_engine(num_blocks: int = 64, block_size: int = 8, windows: tuple[int | None, ...] = (None,),
                prefix_caching: bool = True, overlap: bool = True, speculator: Speculator | None = None,
                **config: object) -> Engine:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 96, **config}
    kv = KVCache(num_blocks, block_size, windows, prefix_caching=prefix_caching)
    scheduler = Scheduler(SchedulerConfig(num_groups=len(windows), **options), kv, NullConnector(), speculator)
    return Engine(scheduler, SimulatedRunner(block_size, windows), overlap)


def request(name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), **fields)


def drain(engine: Engine, limit: int = 5000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def random_prompt(rng: random.Random, shared: list[int], longest: int) -> list[int]:
    prefix = shared[: rng.randrange(len(shared))] if rng.random() < 0.6 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    return (prefix + tail)[:longest]


def test_a_request_that_does_not_fit_is_not_tried_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=5, block_size=16)
    tried: list[str] = []
    admit = KVCache.admit
    monkeypatch.setattr(KVCache, "admit", lambda kv, seq, *rest: (tried.append(seq), admit(kv, seq, *rest))[1])
    first, second = request("a", [1] * 16, 48), request("b", [2] * 70, 4)
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(second)
    drain(engine)
    assert second.output_token_ids == expected_tokens(second, 96)
    assert 1 < tried.count("b") <= 12, "for each block that the other one took or filled, not for each of its 48 steps"


class HalfRight:
    """Drafts the tokens that will follow, some of them replaced by wrong ones."""

    expected = None
    sequential = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._draft(request, most) for request, most in asked]

    def end(self, request: Request) -> None:
        pass

    def _draft(self, request: Request, most: int) -> Draft:
        coming = expected_tokens(request, 1000)[len(request.output_token_ids):][:self._rng.randint(0, most)]
        tokens = tuple(self._rng.randrange(VOCAB) if self._rng.random() < 0.2 else token for token in coming)
        return Draft(tokens, (0.8,) * len(tokens))


@pytest.mark.parametrize("seed", range(120))
def test_every_request_gets_its_own_tokens_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None, 16), (24,), (None, 8, 8)])
    block_size = rng.choice([8, 16])
    engine = make_engine(
        # few blocks force preemption, with large blocks as with small ones; one longest sequence must fit
        num_blocks=rng.choice([16, 24, 64]) * len(windows) * 8 // block_size,
        block_size=block_size,
        windows=windows,
        prefix_caching=rng.random() < 0.7,
        overlap=rng.random() < 0.7,
        max_num_seqs=rng.choice([1, 3, 8, 32]),
        max_num_batched_tokens=rng.choice([7, 13, 64, 256]),
        static_batching=rng.random() < 0.2,
        policy=rng.choice(list(POLICIES)),
        watermark=rng.choice([0.0, 0.01, 0.1]),
        speculator=(AdaptiveSpeculator(HalfRight(random.Random(seed)), rng.randint(1, 9), adaptive=rng.random() < 0.2)
                    if rng.random() < 0.5 else None),
    )
    scheduler = engine.scheduler
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    requests: list[Request] = []
    aborted: set[Request] = set()

    def submit() -> None:
        prompt = random_prompt(rng, shared, 80)
        stop_ids = frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.5 else frozenset()
        salt = rng.choice([None, None, "a", "b"])
        members = rng.choice([1, 1, 1, 3])
        parent: Request | None = None
        for _ in range(members):
            new = Request(
                f"r{len(requests)}", prompt,
                SamplingParams(max_tokens=rng.randint(1, 24), repetition_penalty=1.2 if rng.random() < 0.2 else 1.0),
                stop_ids=stop_ids, priority=rng.randrange(3), cache_salt=salt, parent=parent,
            )
            parent = parent or new
            requests.append(new)
            scheduler.add(new)

    for _ in range(rng.randint(1, 12)):
        submit()
    for _ in range(4000):
        if not engine.has_work:
            break
        engine.step()
        scheduler.check()
        if rng.random() < 0.05 and len(requests) < 40:
            submit()
        if rng.random() < 0.03:
            victim = rng.choice(requests)
            if victim.status is not Status.FINISHED:
                aborted.add(victim)
                scheduler.stop(victim, "abort")
                scheduler.check()
    assert not engine.has_work, "the engine does not come to an end"
    for done in requests:
        output = done.output_token_ids
        expected = expected_tokens(done, scheduler.config.max_model_len)
        if done in aborted:
            assert output == expected[: len(output)]
        else:
            assert output == expected
            assert done.finish_reason == ("stop" if output[-1] in done.stop_ids else "length")
            assert done.sources is not None
        if done.sources is not None:
            assert done.sources.total == done.num_prompt
    stats = scheduler.kv.stats
    assert stats.free + stats.evictable == stats.total
    scheduler.kv.reset_prefix_cache()
    assert scheduler.kv.stats.free == stats.total


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_take_only_what_nobody_else_needs(overlap: bool) -> None:
    """In a pool that is just large enough drafts are shortened, and no request is preempted for them."""
    speculator = AdaptiveSpeculator(HalfRight(random.Random(1)), 12, adaptive=False)
    engine = make_engine(num_blocks=12, max_num_batched_tokens=20, watermark=0.0, overlap=overlap,
                         speculator=speculator)
    requests = [request(f"r{i}", [i + 1] * 4, max_tokens=20) for i in range(4)]
    for each in requests:
        engine.scheduler.add(each)
    drain(engine)
    assert engine.scheduler.num_preemptions == 0
    assert all(each.output_token_ids == expected_tokens(each, 96) for each in requests)
    items = [item for step in engine.runner.steps for item in step.items if item.phase is Phase.VERIFY]
    assert items
    assert all(item.count == item.num_samples == 1 + len(item.draft) for item in items)
    assert max(step.num_tokens for step in engine.runner.steps) <= 20
    counts = speculator.stats().counts
    assert counts.tokens == sum(len(item.draft) for item in items)
    assert 0 < counts.accepted == sum(counts.by_position) < counts.tokens
    assert sum(each.drafts.accepted for each in requests) == counts.accepted
    assert len(engine.runner.steps) < 4 + 20


def test_random_scenarios_do_preempt_chunk_and_hit() -> None:
    """The random scenarios do preempt, chunk and hit the cache, and the tokens are still right."""
    engine = make_engine(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=13, policy="fcfs", watermark=0.0)
    requests = [request(f"r{i}", [1] * 16 + [i + 1] * 4, max_tokens=40) for i in range(8)]
    for each in requests:
        engine.scheduler.add(each)
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert any(item.start + item.count < 20 for step in engine.runner.steps for item in step.items)
    assert sum(r.sources.device for r in requests) > 0
    assert all(r.output_token_ids == expected_tokens(r, 96) for r in requests)


def test_decode_is_never_starved_by_a_stream_of_long_prompts() -> None:
    engine = make_engine(num_blocks=500, max_num_seqs=64, max_num_batched_tokens=32, overlap=False)
    reader = request("reader", [1, 2, 3], max_tokens=60)
    engine.scheduler.add(reader)
    engine.step()
    for index in range(200):
        engine.scheduler.add(request(f"long{index}", [index % VOCAB, *range(40), 7], max_tokens=2))
    before = len(reader.output_token_ids)
    for _ in range(30):
        engine.step()
    assert len(reader.output_token_ids) - before == 30


def test_a_step_keeps_to_the_token_budget_and_the_batch_limit() -> None:
    engine = make_engine(num_blocks=500, max_num_seqs=5, max_num_batched_tokens=19)
    for index in range(30):
        engine.scheduler.add(request(f"r{index}", [index] * 30, max_tokens=5))
    drain(engine)
    sizes = [(step.num_tokens, len(step.items)) for step in engine.runner.steps]
    assert max(tokens for tokens, _ in sizes) == 19
    assert max(count for _, count in sizes) <= 5


def test_without_chunking_a_prompt_runs_in_one_step() -> None:
    engine = make_engine(num_blocks=500, max_num_batched_tokens=96, chunked_prefill=False, prefix_caching=False)
    for index in range(6):
        engine.scheduler.add(request(f"r{index}", [index] * 50, max_tokens=5))
    drain(engine)
    prefills = [item.count for step in engine.runner.steps for item in step.items if item.start == 0]
    assert prefills == [50] * 6


def test_static_batching_admits_only_when_the_batch_has_ended() -> None:
    engine = make_engine(num_blocks=500, max_num_seqs=4, max_num_batched_tokens=1000, static_batching=True)
    for index in range(10):
        engine.scheduler.add(request(f"r{index}", [index] * 10, max_tokens=1 + 5 * (index % 4)))
    drain(engine)
    first_seen: dict[str, int] = {}
    last_seen: dict[str, int] = {}
    for number, step in enumerate(engine.runner.steps):
        for item in step.items:
            name = f"r{engine.runner.prompts[item.id][0]}"
            first_seen.setdefault(name, number)
            last_seen[name] = number
    for index in range(10):
        group = index // 4
        if group:
            ended = max(last_seen[f"r{i}"] for i in range(4 * (group - 1), 4 * group))
            assert first_seen[f"r{index}"] > ended


def test_continuous_batching_fills_a_place_as_soon_as_it_is_free() -> None:
    engine = make_engine(num_blocks=500, max_num_seqs=2, overlap=False)
    for name, length, tokens in (("short", 3, 2), ("long", 4, 30), ("next", 5, 2)):
        engine.scheduler.add(request(name, [7] * length, max_tokens=tokens))
    drain(engine)
    last = {len(engine.runner.prompts[item.id]): i for i, step in enumerate(engine.runner.steps) for item in step.items}
    assert last[5] < last[4]


def test_policies_order_the_queue() -> None:
    lengths = {"a": 0, "b": 16, "c": 16, "d": 8}
    prompts = {"a": [9] * 20, "b": [1] * 20, "c": [1] * 18, "d": [2] * 20}
    waiting = [request(name, prompt, priority=-index) for index, (name, prompt) in enumerate(prompts.items())]

    def order(policy: str) -> str:
        return "".join(r.request_id for r in POLICIES[policy](waiting, lambda r: lengths[r.request_id]))

    assert order("fcfs") == "abcd"
    assert order("priority") == "dcba"
    assert order("lpm") == "bcda"
    assert order("dfs-weight") == "abcd"  # unmatched first at the root, then the heavier of the two subtrees
    lengths["d"] = 16
    prompts_like_d = [request(f"e{i}", [2] * 20) for i in range(3)]
    lengths.update({r.request_id: 16 for r in prompts_like_d})
    mixed = [*waiting, *prompts_like_d]
    ordered = [r.request_id for r in POLICIES["dfs-weight"](mixed, lambda r: lengths[r.request_id])]
    assert ordered == ["a", "d", "e0", "e1", "e2", "b", "c"]


def test_siblings_share_the_prompt_and_compute_it_once() -> None:
    for prefix_caching in (True, False):
        engine = make_engine(num_blocks=500, max_num_seqs=8, prefix_caching=prefix_caching)
        parent = request("s0", list(range(40)), max_tokens=4)
        siblings = [request(f"s{i}", list(range(40)), max_tokens=4, parent=parent) for i in (1, 2, 3)]
        for each in (parent, *siblings):
            engine.scheduler.add(each)
        drain(engine)
        rows = sum(item.count for step in engine.runner.steps for item in step.items if item.start < 40)
        assert rows == 40 + 3 * 8  # each sibling computes only its last block
        assert all(r.output_token_ids == parent.output_token_ids for r in siblings)


def test_a_full_prefix_hit_still_computes_one_token() -> None:
    for length in (15, 16, 17, 32, 33):
        engine = make_engine(num_blocks=100)
        both = [request(name, list(range(length)), max_tokens=3) for name in ("first", "again")]
        for one in both:
            engine.scheduler.add(one)
            drain(engine)
        again = [item for step in engine.runner.steps for item in step.items if item.id == 2]
        assert again[0].start == (length - 1) // 8 * 8
        assert both[1].sources.device == again[0].start
