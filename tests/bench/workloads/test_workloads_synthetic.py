"""Workloads for a server have the promised lengths, counts and sharing, and different tokens in every repeat."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.workloads import workloads_synthetic as synthetic
from spillover.bench.workloads.sharing import Part, simulate, token_parts
from spillover.bench.workloads.workload_stats import Shape
from spillover.bench.workloads.workloads import WARMUP, Vocabulary
from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
from spillover.errors import SpilloverError

VOCABULARY = Vocabulary(5000, frozenset({0, 1, 2, 4999}))
ALL = {
    "random": synthetic.random_shapes(20, 50, 9, 0.5, prefix_len=33, seed=3),
    "mixed": synthetic.mixed_shapes(20, (4, 90), (2, 30), prefix_len=20, seed=3),
    "generated-shared-prefix": synthetic.generated_shared_prefix_shapes(4, 5, 64, 16, 8, seed=3),
    "gsp turns": synthetic.generated_shared_prefix_shapes(3, 2, 64, 16, 8, turns=3, seed=3),
    "prefix-repetition": synthetic.prefix_repetition_shapes(20, 32, 16, 4, 8, seed=3),
    "multi-turn": synthetic.multi_turn_shapes(5, 4, 20, 40, 10, 7, 0.3, 0.5, seed=3),
    "prefill-mix": synthetic.prefill_mix_shapes(20, 0.2, 200, 4, 16, 12),
    "variable-output": synthetic.variable_output_shapes(20, (1, 5, 9), 30, seed=3),
}


def ids(request: ServeRequest) -> tuple[int, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


@pytest.mark.parametrize("name", ALL)
def test_repeats_keep_lengths_and_change_every_prompt(name: str) -> None:
    workload = SyntheticWorkload(name, ALL[name], VOCABULARY, seed=3)
    first, again, second, warmup = (workload.requests(repeat) for repeat in (0, 0, 1, WARMUP))
    assert first == again
    for request in first:
        assert len(request.prompt) == request.prompt_len
        assert not VOCABULARY.special_ids & set(ids(request))
    for other in (second, warmup):
        assert [(r.prompt_len, r.output_len, r.session, r.turn, r.think) for r in first] == [
            (r.prompt_len, r.output_len, r.session, r.turn, r.think) for r in other]
        # No first block of one repeat is a first block of another: there are no prefix cache hits.
        assert not {ids(r)[:4] for r in first} & {ids(r)[:4] for r in other}


@pytest.mark.parametrize("name", ALL)
def test_the_statistics_are_those_of_the_tokens(name: str) -> None:
    workload = SyntheticWorkload(name, ALL[name], VOCABULARY, seed=3)
    said: dict[int | None, tuple[int, ...]] = {}
    prompts = []
    for index, request in enumerate(workload.requests(0)):
        prompt = (said.get(request.session, ()) if request.session is not None else ()) + ids(request)
        answer = tuple(-(100 * index + place + 1) for place in range(request.output_len))
        said[request.session] = prompt + answer
        prompts.append((prompt, answer))
    # Parts of one token: a cache of single tokens, rounded to blocks only at lookup.
    result = simulate((token_parts((*prompt, *answer[:-1]), 1), Part(("none", index), 1))
                      for index, (prompt, answer) in enumerate(prompts))
    stats = workload.stats()
    assert stats.count == len(prompts)
    assert stats.prompt.total == sum(len(prompt) for prompt, _ in prompts)
    assert stats.prompt.max == max(len(prompt) for prompt, _ in prompts)
    assert stats.output.total == sum(len(answer) for _, answer in prompts)
    assert stats.working_set_tokens == result.working_set_tokens
    assert stats.sessions == len({r.session for r in workload.requests(0)} - {None})
    assert stats.as_dict()["sharing"] == stats.sharing


def test_no_two_workloads_or_parts_begin_alike() -> None:
    """No two workloads or parts share a prefix: a server that has seen one has no cache hits for another."""
    workloads = [SyntheticWorkload(name, shapes, VOCABULARY, seed=3) for name, shapes in ALL.items()]
    workloads += [SyntheticWorkload("random", synthetic.random_shapes(20, size, 9, seed=3), VOCABULARY, seed=3)
                  for size in (50, 60)]
    begins = [{ids(request)[:4] for request in workload.requests(0)} for workload in workloads]
    assert sum(map(len, begins)) == len(set().union(*begins))
    parts = [Shape((Part(key, 8),), 1) for key in ((0,), (0, 0), (0, 0, 0), (1,), (1, 0), (0, 1))]
    drawn = {ids(request) for request in SyntheticWorkload("keys", tuple(parts), VOCABULARY).requests(0)}
    assert len(drawn) == len(parts)


def test_sglangs_defaults_of_the_shared_prefix() -> None:
    shapes = synthetic.generated_shared_prefix_shapes()
    stats = SyntheticWorkload("generated-shared-prefix", shapes).stats()
    assert (stats.count, stats.prompt.max, stats.prompt.mean, stats.output.mean) == (1024, 2176, 2176, 256)
    assert stats.shared_tokens == 64 * 15 * 2048
    assert stats.working_set_tokens == 64 * 2048 + 1024 * (128 + 255)


@settings(max_examples=50, deadline=None)
@given(groups=st.integers(1, 8), per_group=st.integers(1, 8), ratio=st.floats(0, 1), ordered=st.booleans(),
       seed=st.integers(0, 99))
def test_groups_are_complete_and_lengths_within_the_ratio(groups: int, per_group: int, ratio: float, ordered: bool,
                                                          seed: int) -> None:
    shapes = synthetic.generated_shared_prefix_shapes(groups, per_group, 50, 20, 10, ratio, ordered=ordered, seed=seed)
    found = [shape.parts[0].key for shape in shapes]
    assert sorted(Counter(found).values()) == [per_group] * groups
    if ordered:
        assert found == sorted(found)  # type: ignore[type-var]
    for shape in shapes:
        system, question = shape.parts
        assert max(1, int(50 * ratio)) <= system.length <= 50
        assert max(1, int(20 * ratio)) <= question.length <= 20
        assert max(1, int(10 * ratio)) <= shape.output_len <= 10


def test_fewer_prompts_than_the_groups_make_are_a_sample_of_them() -> None:
    some = synthetic.generated_shared_prefix_shapes(8, 8, 32, 8, 4, limit=10, seed=1)
    every = synthetic.generated_shared_prefix_shapes(8, 8, 32, 8, 4, seed=1)
    assert some == every[:10]
    with pytest.raises(SpilloverError, match="--num-prompts 65"):
        synthetic.generated_shared_prefix_shapes(8, 8, limit=65)


def test_every_prefix_comes_equally_often() -> None:
    shapes = synthetic.prefix_repetition_shapes(100, 256, 256, 10, 128)
    assert set(Counter(shape.parts[0].key for shape in shapes).values()) == {10}
    stats = SyntheticWorkload("prefix-repetition", shapes).stats()
    assert stats.shared_tokens == 90 * 256
    with pytest.raises(SpilloverError, match="--prefix-repetition-num-prefixes"):
        synthetic.prefix_repetition_shapes(5, num_prefixes=10)


def test_a_session_is_told_turn_by_turn_and_holds_what_was_said() -> None:
    shapes = synthetic.multi_turn_shapes(3, 4, shared_len=32, prefix_len=64, input_len=16, output_len=8, think_time=2.0)
    assert [(shape.turn, shape.session) for shape in shapes] == [(turn, s) for turn in range(4) for s in range(3)]
    assert [shape.prompt_len for shape in shapes[:3]] == [112] * 3
    assert {shape.prompt_len for shape in shapes[3:]} == {16}
    assert all(shape.think == 0 for shape in shapes[:3])
    assert all(shape.think > 0 for shape in shapes[3:])
    stats = SyntheticWorkload("multi-turn", shapes).stats()
    assert stats.prompt.max == 112 + 3 * (8 + 16)
    # Each later turn finds everything before it except the last token of the answer, in whole blocks.
    assert stats.shared_tokens == 2 * 32 + 3 * sum((112 + 24 * turn + 7) // 16 * 16 for turn in range(3))


def test_long_prompts_are_spread_among_the_short() -> None:
    shapes = synthetic.prefill_mix_shapes(100, 0.1)
    places = [index for index, shape in enumerate(shapes) if shape.prompt_len == 2048]
    assert places == list(range(5, 100, 10))
    assert {(shape.prompt_len, shape.output_len) for shape in shapes} == {(2048, 16), (64, 128)}
    assert {shape.prompt_len for shape in synthetic.prefill_mix_shapes(10, 0.0)} == {64}


def test_output_lengths_are_balanced_and_mixed() -> None:
    shapes = synthetic.variable_output_shapes(200)
    outputs = [shape.output_len for shape in shapes]
    assert Counter(outputs) == dict.fromkeys((16, 32, 64, 256, 512), 40)
    assert outputs[:5] != [16, 32, 64, 256, 512]


def test_without_a_vocabulary_there_are_statistics_but_no_tokens() -> None:
    workload = SyntheticWorkload("random", synthetic.random_shapes(4))
    assert workload.stats().count == 4
    with pytest.raises(SpilloverError, match="--tokenizer"):
        workload.requests(0)


def test_parts_of_one_key_and_other_lengths_begin_alike() -> None:
    shapes = (Shape((Part((0, 1), 10),), 1), Shape((Part((0, 1), 25), Part((0, 2), 3)), 1))
    short, long = SyntheticWorkload("x", shapes, VOCABULARY).requests(0)
    assert ids(long)[:10] == ids(short)
