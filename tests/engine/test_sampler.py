"""A row's token depends only on its own logits, parameters, seed and step, and has the requested distribution."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spillover.engine.batch import sampler
from spillover.engine.batch.sampler import (
    LogprobRow,
    RowState,
    build_sampling_batch,
    prompt_logprobs,
    sample,
    to_position_logprobs,
    uniform,
)
from spillover.engine.requests.request_factory import check_token_ids
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import RequestError

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def draw(logits: Tensor, rows: list[RowState]) -> list[int]:
    return sample(logits, build_sampling_batch(rows, logits.shape[1], logits.device)).token_ids.tolist()


def support(logits: Tensor, params: SamplingParams, draws: int = 4000) -> set[int]:
    """Return the tokens that can be drawn, for distributions whose smallest probability is well above 1 / draws."""
    return set(draw(logits.expand(draws, -1), [RowState(params, seed=0, step=i) for i in range(draws)]))


def reference_draw(logits: Tensor, row: RowState) -> int:
    """Draw for one row in plain Python: integers, loops and Python's own sort."""
    params, values = row.params, logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in set(row.prompt_token_ids) | set(row.output_token_ids):
        if values[token] > 0:
            values[token] /= params.repetition_penalty
        else:
            values[token] *= params.repetition_penalty
    for token in set(row.output_token_ids):
        values[token] -= torch.tensor(params.frequency_penalty) * row.output_token_ids.count(token)
        values[token] -= params.presence_penalty
    for token in range(len(values)):
        if row.mask is not None and not (int(row.mask[token // 32]) >> token % 32) & 1:
            values[token] = -math.inf
        if row.step < params.min_tokens and token in row.stop_ids:
            values[token] = -math.inf
    if params.greedy:
        return max(range(len(values)), key=lambda token: (values[token].item(), -token))
    values = values / torch.tensor(params.temperature)
    weights = [int(weight * 2.0**40) for weight in (values - values.max()).exp().tolist()]
    order = sorted(range(len(values)), key=lambda token: (-values[token].item(), token))
    order = [token for token in order if (values - values.max()).exp()[token] >= torch.tensor(params.min_p)]
    order = order[:params.top_k or None]
    total, before, kept = sum(weights[token] for token in order), 0, set()
    for token in order:
        if before < params.top_p * total:
            kept.add(token)
        before += weights[token]
    target = math.floor(uniform(row.seed, row.step) * sum(weights[token] for token in kept))
    return next(token for token in range(len(values))
                if token in kept and (target := target - weights[token]) < 0)


@st.composite
def row_states(draw: st.DrawFn, vocab_size: int) -> RowState:
    rng = random.Random(draw(st.integers(0, 10**9)))
    maybe = lambda value, default: value if rng.random() < 0.4 else default  # noqa: E731
    params = SamplingParams(
        temperature=maybe(0.0, rng.uniform(0.1, 2.0)),
        top_k=maybe(rng.randint(1, vocab_size + 2), 0),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(3)}, None),
        min_tokens=maybe(4, 0),
        logprobs=maybe(2, None),
    )
    mask = torch.tensor([rng.getrandbits(32) - 2**31 for _ in range((vocab_size + 31) // 32)], dtype=torch.int32)
    return RowState(params, seed=rng.getrandbits(64), step=rng.randrange(10),
                    prompt_token_ids=[rng.randrange(vocab_size) for _ in range(5)],
                    output_token_ids=[rng.randrange(vocab_size) for _ in range(6)],
                    mask=maybe(mask | 2, None), stop_ids=(3, 5, vocab_size + 7))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_alone_and_in_any_batch(device: str, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([7, 33, 257, 1500]))
    rows = data.draw(st.lists(row_states(vocab_size), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * 4).to(torch.bfloat16).float()  # with ties
    logits = logits.to(device)
    before = logits.clone()
    together = sample(logits, build_sampling_batch(rows, vocab_size, device))
    assert torch.equal(logits, before)
    alone = [sample(logits[i:i + 1], build_sampling_batch([row], vocab_size, device)) for i, row in enumerate(rows)]
    assert together.token_ids.tolist() == [int(one.token_ids) for one in alone]
    for i, one in enumerate(alone):
        if one.logprobs is not None and device == "cpu":
            assert together.logprobs is not None
            assert torch.equal(together.logprobs.logprob[i], one.logprobs.logprob[0])
    order = data.draw(st.permutations(range(len(rows))))
    assert draw(logits[list(order)], [rows[i] for i in order]) == [int(together.token_ids[i]) for i in order]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_tokens_are_those_of_a_plain_python_reference(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([7, 40, 100]))
    rows = data.draw(st.lists(row_states(vocab_size), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 3
    assert draw(logits, rows) == [reference_draw(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("device", DEVICES)
def test_frequencies_are_the_probabilities(device: str) -> None:
    """A chi-square test over 20,000 steps of one seed, and over the first step of as many seeds, passes."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -2.0], device=device)
    draws = 20_000
    for temperature in (0.7, 1.0, 1.5):
        params = SamplingParams(temperature=temperature)
        expected = torch.softmax(logits.cpu().double() / temperature, dim=0) * draws
        for rows in ([RowState(params, 7, i) for i in range(draws)], [RowState(params, i, 0) for i in range(draws)]):
            counts = torch.bincount(torch.tensor(draw(logits.expand(draws, -1), rows)), minlength=6)
            chi_square = ((counts - expected) ** 2 / expected).sum()
            assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_filters_keep_what_transformers_keeps() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = torch.randn(1, 12, generator=generator)
        for params, warper in [
            (SamplingParams(top_k=4), TopKLogitsWarper(4)),
            (SamplingParams(top_p=0.7), TopPLogitsWarper(0.7)),
            (SamplingParams(min_p=0.3), MinPLogitsWarper(0.3)),
        ]:
            kept = warper(None, logits.clone()).isfinite().nonzero()[:, 1].tolist()
            assert support(logits, params) == set(kept)


def test_min_p_then_top_k_then_top_p_of_what_is_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log()
    assert support(logits, SamplingParams(top_p=0.72)) == {0, 1, 2}
    assert support(logits, SamplingParams(top_k=3, top_p=0.72)) == {0, 1}  # 0.7 of the 0.85 that top-k keeps
    assert support(logits, SamplingParams(top_k=3, top_p=0.72, min_p=0.5)) == {0, 1}
    assert support(logits, SamplingParams(min_p=0.5, top_p=0.5)) == {0}  # 4/7 of what min-p keeps
    assert support(logits, SamplingParams(top_p=1e-9)) == {0}


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_first_of_equals_and_so_does_top_k_1(device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]], device=device)
    assert support(logits, SamplingParams(temperature=0.0), 10) == {1}
    assert support(logits, SamplingParams(top_k=1), 100) == {1}
    assert support(logits, SamplingParams(top_k=2), 100) == {1, 3}
    assert support(logits, SamplingParams(top_p=0.4), 100) == {1, 3}
    rows = [RowState(SamplingParams(temperature=t), 1, i) for i, t in enumerate([0.0, 1.0, 1e-6, 2.0, 0.0])]
    tokens = draw(logits.expand(5, -1), rows)
    assert [tokens[0], tokens[2], tokens[4]] == [1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_an_impossible_token_is_never_drawn(device: str) -> None:
    """An impossible token is never drawn, even at either end of the vocabulary with a random number of 0 or near 1."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, :10] = logits[:, -10:] = -torch.inf
    logits[:, 500:600] = -1e5
    rows = [RowState(SamplingParams(temperature=0.3), 0, 0) for _ in range(64)]
    for number in (0.0, 1 - 2.0**-53, 1 - 2.0**-24):
        batch = build_sampling_batch(rows, 1000, device)
        assert batch.uniform is not None
        batch.uniform.fill_(number)
        tokens = sample(logits, batch).token_ids
        assert logits.gather(1, tokens.unsqueeze(1)).min() > -1e4
    assert draw(torch.tensor([[-torch.inf, 5.0, -torch.inf]]).to(device), [RowState(SamplingParams(), 1, 1)]) == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_possible_token_do_not_break_the_others(device: str) -> None:
    logits = torch.zeros(3, 50, device=device)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    rows = [RowState(SamplingParams(top_p=0.5, min_p=0.1), i, 0) for i in range(3)]
    tokens = draw(logits, rows)
    assert all(0 <= token < 50 for token in tokens)
    assert tokens[2:] == draw(logits[2:], rows[2:])


def test_shortcuts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates in place of a sort, and chunks of rows in place of the whole batch, give the same results."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.cat([torch.randn(6, 3000, generator=generator) * scale for scale in (0.01, 1, 5)])
    logits = logits.to(torch.bfloat16).float()
    rows = [RowState(SamplingParams(top_p=p, top_k=k, logprobs=3), i, i)
            for i, (p, k) in enumerate(itertools.product((0.1, 0.5, 0.9), (1, 2, 20, 200, 1500, 2999)))]
    for subset in (slice(0, 18), slice(0, 6), slice(6, 12), slice(12, 18)):
        batch = build_sampling_batch(rows[subset], 3000, "cpu")
        assert batch.candidates is not None
        usual = sample(logits[subset], batch)
        with monkeypatch.context() as patch:
            patch.setitem(sampler.SAMPLE_ENTRIES, "cpu", 7000)
            plain = sample(logits[subset], replace(batch, candidates=None))
        assert torch.equal(usual.token_ids, plain.token_ids)
        assert usual.logprobs is not None
        assert plain.logprobs is not None
        assert usual.logprobs.host_rows() == plain.logprobs.host_rows()


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    prompt, output = [1, 2, 3, 3], [4, 4, 5]
    row = RowState(SamplingParams(temperature=0, repetition_penalty=1.7), 0, 3, prompt, output)
    edited = sampler._edit(logits, build_sampling_batch([row], 30, "cpu"))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(edited, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    row = RowState(SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25), 0, 3, [1, 1], [2, 2, 3])
    edited = sampler._edit(torch.zeros(1, 5), build_sampling_batch([row], 5, "cpu"))
    assert edited.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0]]


def test_end_tokens_are_forbidden_below_min_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0, 4.0]])
    params = SamplingParams(temperature=0, min_tokens=2)
    assert [draw(logits, [RowState(params, 0, step, stop_ids=(0, 3))]) for step in range(4)] == [[1], [1], [0], [0]]


def test_a_mask_allows_only_its_tokens() -> None:
    logits = torch.arange(70.0).unsqueeze(0)
    mask = torch.zeros(3, dtype=torch.int32)
    mask[0], mask[1] = -(1 << 31), 1 << 3  # allows tokens 31 and 35
    rows = [RowState(SamplingParams(temperature=0), 0, 0, mask=mask), RowState(SamplingParams(temperature=0), 0, 0)]
    assert draw(logits.expand(2, -1), rows) == [35, 69]
    assert support(logits / 100, SamplingParams(), 50) - {31, 35} != set()
    hot = [RowState(SamplingParams(), 0, i, mask=mask) for i in range(50)]
    assert set(draw(logits.expand(50, -1) / 100, hot)) == {31, 35}


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_of_the_raw_distribution(device: str) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(device)
    rows = [RowState(SamplingParams(temperature=0.5, logprobs=k, logit_bias={7: 100.0}), i, 0)
            for i, k in enumerate((0, 3, 5, None))]
    sampled = sample(logits, build_sampling_batch(rows, 50, device))
    assert sampled.token_ids.tolist() == [7] * 4
    assert sampled.logprobs is not None
    expected = torch.log_softmax(logits, dim=-1)
    for i, row in enumerate(sampled.logprobs.host_rows()):
        by_rank = expected[i].argsort(descending=True).tolist()
        assert row.logprob == pytest.approx(expected[i, 7].item(), abs=1e-5)
        assert row.rank == by_rank.index(7) + 1
        assert row.top_ids == by_rank[:5]
        assert row.top_logprobs == pytest.approx(expected[i, by_rank[:5]].tolist(), abs=1e-5)


def test_prompt_logprobs_score_the_token_that_follows() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    scored = prompt_logprobs(logits, torch.tensor([4, 0, 19]), k=2)
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(3), torch.tensor([4, 0, 19])]
    torch.testing.assert_close(scored.logprob, expected)
    assert scored.top_ids.shape == (3, 2)
    assert prompt_logprobs(logits, torch.tensor([4, 0, 19]), k=0).top_ids.shape == (3, 0)


def test_a_position_lists_the_chosen_token_first_and_once() -> None:
    row = LogprobRow(-2.0, 3, [5, 9, 4], [-0.5, -1.5, -2.0])
    position = to_position_logprobs(row, 4, 3, decode=lambda token: f"t{token}")
    assert [(t, p.logprob, p.rank, p.decoded_token) for t, p in position.items()] == [
        (4, -2.0, 3, "t4"), (5, -0.5, 1, "t5"), (9, -1.5, 2, "t9")]
    assert list(to_position_logprobs(row, 4, 0)) == [4]
    assert list(to_position_logprobs(row, 4, 1)) == [4, 5]


def test_plain_greedy_rows_need_nothing_on_the_device() -> None:
    batch = build_sampling_batch([RowState(SamplingParams(temperature=0, top_p=0.5, top_k=3), 1, 2)] * 3, 100, "cpu")
    assert batch == sampler.SamplingBatch(all_greedy=True)


def test_a_full_sort_is_avoided_where_top_k_bounds_the_nucleus() -> None:
    def candidates(*params: SamplingParams) -> int | None:
        return build_sampling_batch([RowState(p, 0, 0) for p in params], 100, "cpu").candidates

    assert candidates(SamplingParams(top_k=20, top_p=0.9), SamplingParams(), SamplingParams(top_k=5)) == 20
    assert candidates(SamplingParams(top_k=20), SamplingParams(top_p=0.9)) is None


def test_random_numbers_depend_on_seed_and_step_and_fill_the_interval() -> None:
    numbers = [uniform(seed, step) for seed in range(-20, 20) for step in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(2**64 + 5, 3) == uniform(5, 3)
    assert uniform(42, 0) == 0.34329192209867343  # the number must not change between versions


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    check_token_ids(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(0,)), 10)
    with pytest.raises(RequestError, match="logit_bias names token 10"):
        check_token_ids(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(RequestError, match="stop_token_ids"):
        check_token_ids(SamplingParams(stop_token_ids=(99,)), 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sampling_never_waits_for_the_device() -> None:
    logits = torch.randn(8, 32_000, device="cuda")
    mask = torch.full((1000,), -1, dtype=torch.int32)
    params = SamplingParams(top_p=0.9, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, min_tokens=3,
                            logit_bias={3: 1.0}, logprobs=5)
    rows = [RowState(params, i, i, [1, 2], [3, 4], mask, (0, 1)) for i in range(8)]
    sample(logits, build_sampling_batch(rows, 32_000, "cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sample(logits, build_sampling_batch(rows, 32_000, "cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampled.token_ids.shape == (8,)
