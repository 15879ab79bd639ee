"""Prompts have exactly the promised lengths, and the same seed gives the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.bench.throughput import offline
from spillover.bench.workloads.workload_stats import Shape
from spillover.bench.workloads.workloads import WARMUP, Vocabulary, is_usable
from spillover.bench.workloads.workloads_recorded import sharegpt
from spillover.bench.workloads.workloads_synthetic import (
    SyntheticWorkload,
    mixed_shapes,
    random_shapes,
    random_workload,
)
from spillover.errors import SpilloverError

VOCABULARY = Vocabulary(500, frozenset({0, 1, 2, 499}))


class Words:
    """A tokenizer with one id per word."""

    vocabulary = VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [3 + len(word) for word in text.split()]

    chat = encode

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError


@settings(max_examples=50, deadline=None)
@given(input_len=st.integers(1, 200), output_len=st.integers(1, 50), prefix=st.integers(0, 40),
       ratio=st.floats(0, 0.9), seed=st.integers(0, 1000))
def test_random_lengths_stay_in_the_range(input_len: int, output_len: int, prefix: int, ratio: float,
                                          seed: int) -> None:
    shapes = random_shapes(20, input_len, output_len, ratio, prefix, seed)
    requests = offline(SyntheticWorkload("random", shapes, VOCABULARY, seed), 0)
    assert len(requests) == 20
    for request in requests:
        own = len(request.prompt_token_ids) - prefix
        assert max(1, int(input_len * (1 - ratio))) <= own <= input_len * (1 + ratio) + 1
        assert max(1, int(output_len * (1 - ratio))) <= request.output_len <= output_len * (1 + ratio) + 1
        assert request.prompt_token_ids[:prefix] == requests[0].prompt_token_ids[:prefix]
        assert not VOCABULARY.special_ids & set(request.prompt_token_ids)
        assert max(request.prompt_token_ids) < VOCABULARY.size


def test_without_a_range_ratio_lengths_are_exact() -> None:
    requests = offline(random_workload(VOCABULARY, 8, 33, 7), 0)
    assert {(len(request.prompt_token_ids), request.output_len) for request in requests} == {(33, 7)}


@pytest.mark.parametrize("shapes", [random_shapes(16, 20, 9, 0.5, seed=4), mixed_shapes(16, (4, 90), (2, 30), seed=4)])
def test_a_repeat_has_the_same_lengths_and_other_tokens(shapes: tuple[Shape, ...]) -> None:
    workload = SyntheticWorkload("random", shapes, VOCABULARY, seed=4)
    first, again, second, warmup = (offline(workload, repeat) for repeat in (0, 0, 1, WARMUP))
    assert first == again
    for other in (second, warmup):
        assert [(len(a.prompt_token_ids), a.output_len) for a in first] == [
            (len(b.prompt_token_ids), b.output_len) for b in other]
        assert not {a.prompt_token_ids for a in first} & {b.prompt_token_ids for b in other}


def test_mixed_lengths_are_spread_over_the_magnitudes_and_every_second_shares_the_prefix() -> None:
    shapes = mixed_shapes(400, (10, 1000), (1, 100), prefix_len=5, seed=1)
    requests = offline(SyntheticWorkload("mixed", shapes, VOCABULARY, seed=1), 0)
    lengths = [len(request.prompt_token_ids) - 5 * (index % 2) for index, request in enumerate(requests)]
    assert min(lengths) >= 10
    assert max(lengths) <= 1000
    assert 0.4 < sum(length < 100 for length in lengths) / 400 < 0.6  # half of a log-uniform range
    assert len({request.prompt_token_ids[:5] for request in requests[1::2]}) == 1


def test_a_bad_range_is_refused_in_one_sentence() -> None:
    with pytest.raises(SpilloverError, match="--random-range-ratio"):
        random_shapes(4, range_ratio=1.0)
    with pytest.raises(SpilloverError, match="--num-prompts"):
        random_shapes(0)


def test_sharegpt_is_filtered_as_vllm_filters_it(tmp_path: Path) -> None:
    def talk(*lengths: int) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": "w " * length} for length in lengths]}

    file = tmp_path / "talks.json"
    file.write_text(json.dumps([talk(10, 20), talk(3, 20), talk(10, 3), talk(1025, 9), talk(1000, 1049), talk(10),
                                talk(1000, 1048, 5)]))
    workload = sharegpt(str(file), Words(), 10)
    lengths = {(len(request.prompt_token_ids), request.output_len) for request in offline(workload, 0)}
    assert lengths == {(10, 20), (1000, 1048)}
    # A fixed output length replaces the answer's, even if that is short.
    fixed = offline(sharegpt(str(file), Words(), 10, output_len=2), 0)
    assert {request.output_len for request in fixed} == {2}
    assert len(fixed) == 4
    warmup = offline(workload, WARMUP)
    assert not {r.prompt_token_ids for r in warmup} & {r.prompt_token_ids for r in offline(workload, 0)}


def test_usable_lengths() -> None:
    assert is_usable(4, 4)
    assert not is_usable(3, 4)
    assert not is_usable(4, 3)
    assert is_usable(4, 1, check_output=False)
    assert not is_usable(1025, 4)
    assert not is_usable(1024, 1025)


@pytest.mark.parametrize("content", ["not json", '{"a": 1}', '[{"conversations": [1, 2]}]', "[]"])
def test_a_file_that_is_not_sharegpt_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(SpilloverError, match=r"bad\.json"):
        sharegpt(str(file), Words(), 4)
    with pytest.raises(SpilloverError, match="cannot read"):
        sharegpt(str(tmp_path / "absent.json"), Words(), 4)


def test_the_real_sample_gives_what_is_asked_for(shared_data: Path) -> None:
    workload = sharegpt(str(shared_data / "sharegpt_sample.json"), Words(), 100)
    assert len(workload.requests(0)) == 100
    assert all(is_usable(len(r.prompt_token_ids), r.output_len) for r in offline(workload, 0))
