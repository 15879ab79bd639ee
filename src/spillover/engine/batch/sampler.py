"""Sampling of token ids from logits, for a whole batch at once and without a host sync.

A row's token depends only on the row's logits, parameters, seed and step: the random number is a hash of (seed, step),
and probabilities are summed as integers, whose sum is the same in any order and on any device. So neither the other
rows of the batch nor the way the device splits the work can change a request's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.output.outputs import Logprob, PositionLogprobs
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.plan.workspace import SAMPLE_ENTRIES

# exp(logit - max) is scaled to an integer of up to 2**40; the sum of 2**18 tokens of this weight still fits in int64.
_WEIGHT_SCALE = 2.0**40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment


@dataclass(frozen=True)
class Penalties:
    """Penalties of the N <= R rows that have any, with the tokens that they apply to."""

    rows: Tensor  # [N] int64
    presence: Tensor  # [N, 1] float32
    frequency: Tensor  # [N, 1] float32
    repetition: Tensor  # [N, 1] float32
    prompt_mask: Tensor  # [N, V] bool; set only for rows with a repetition penalty
    output_counts: Tensor  # [N, V] int32


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of one step, with one row per sampled token. Fields that no row needs are None."""

    all_greedy: bool
    temperature: Tensor | None = None  # [R] float32; 0 is greedy; None if all rows are greedy
    uniform: Tensor | None = None  # [R] float64 in [0, 1)
    top_k: Tensor | None = None  # [R] int64; 0 is off
    top_p: Tensor | None = None  # [R] float64
    min_p: Tensor | None = None  # [R] float32
    candidates: int | None = None  # the largest top_k, if every row with a top_p has a top_k: no full sort is needed
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, ids [B] int64, values [B] float32
    mask: Tensor | None = None  # [R, ceil(V/32)] int32; a set bit allows a token
    banned: tuple[Tensor, Tensor] | None = None  # rows, ids [B] int64
    logprobs: int | None = None  # maximum number of alternatives over all rows


GREEDY = SamplingBatch(all_greedy=True)


class LogprobRow(NamedTuple):
    """One row of SampledLogprobs on the host."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class SampledLogprobs:
    """Log probabilities of the model's own distribution, before temperature, penalties and masks."""

    logprob: Tensor  # [R] float32, log probability of the chosen token
    rank: Tensor  # [R] int64; 1 is the most probable
    top_ids: Tensor  # [R, k] int64, most probable first
    top_logprobs: Tensor  # [R, k] float32

    def to_pinned(self) -> SampledLogprobs:
        """Copy to host memory without waiting; readable once the device has completed the work launched so far."""
        return SampledLogprobs(*(torch.empty_like(part, device="cpu", pin_memory=part.is_cuda).copy_(part, True)
                                 for part in (self.logprob, self.rank, self.top_ids, self.top_logprobs)))

    def host_rows(self) -> list[LogprobRow]:
        """Return the rows on the host, after waiting for the device."""
        return [LogprobRow(*row) for row in zip(self.logprob.tolist(), self.rank.tolist(), self.top_ids.tolist(),
                                                self.top_logprobs.tolist(), strict=True)]


@dataclass(frozen=True)
class Sampled:
    token_ids: Tensor  # [R] int64
    logprobs: SampledLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowState:
    """The host's state of one sequence that is about to sample a token."""

    params: SamplingParams
    seed: int
    step: int  # number of output tokens so far, which is the index of the token being sampled
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()  # all output tokens if params.needs_history
    mask: Tensor | None = None  # [ceil(V/32)] int32 on the host
    stop_ids: Sequence[int] = ()  # eos and stop_token_ids, forbidden while step < params.min_tokens


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Sample a token for each row of logits [R, V], which are not modified."""
    edited = _edit(logits, batch)  # [R, V]
    if edited.is_cuda:
        token_ids = _draw_on_cuda(edited, batch)
    else:
        edited = edited.float()
        token_ids = _argmax(edited)
        if not batch.all_greedy:
            assert batch.temperature is not None
            token_ids = torch.where(batch.temperature > 0, _draw(edited, batch), token_ids)
    if batch.logprobs is None:
        return Sampled(token_ids)
    return Sampled(token_ids, prompt_logprobs(logits, token_ids, batch.logprobs))


def prompt_logprobs(logits: Tensor, next_ids: Tensor, k: int) -> SampledLogprobs:
    """Return log probabilities of next_ids [P], the token that follows each position, from logits [P, V]."""
    logits = logits.float()
    k = min(k, logits.shape[1])
    chosen = next_ids.long().unsqueeze(1)  # [P, 1]
    logprob, top_ids, top_logprobs = [], [], []
    for rows in _chunks(logits):
        every = torch.log_softmax(logits[rows], dim=-1)
        logprob.append(every.gather(1, chosen[rows]).squeeze(1))
        values, ids = every.topk(k, dim=-1)
        top_logprobs.append(values)
        top_ids.append(ids)
    # From the logits, not from log_softmax, whose rounding can make two of them equal.
    rank = 1 + (logits > logits.gather(1, chosen)).sum(dim=-1)
    return SampledLogprobs(_cat(logprob), rank, _cat(top_ids), _cat(top_logprobs))


def to_position_logprobs(row: LogprobRow, token_id: int, k: int,
                         decode: Callable[[int], str] | None = None) -> PositionLogprobs:
    """Return the chosen token first, then the others among the k most probable tokens."""
    position = {token_id: Logprob(row.logprob, row.rank, decode(token_id) if decode else None)}
    for rank, (token, logprob) in enumerate(zip(row.top_ids[:k], row.top_logprobs[:k], strict=True), start=1):
        if token != token_id:
            position[token] = Logprob(logprob, rank, decode(token) if decode else None)
    return position


def uniform(seed: int, step: int) -> float:
    """Return the random number in [0, 1) with which a sequence with this seed samples output token `step`."""
    return float(_uniforms([seed], [step])[0])


def temperature_only(params: SamplingParams) -> bool:
    """Return whether tokens are sampled from the model's unmodified logits with no parameter but the temperature."""
    return not (params.needs_history or params.logit_bias or params.min_tokens or params.logprobs is not None
                or (not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)))


def seed_stream(seed: int) -> int:
    """Return the start of this seed's stream of random numbers."""
    return int(_splitmix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)[0])


def random_numbers(streams: npt.NDArray[np.uint64], steps: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return the random number with index `step` of each stream, in [0, 1)."""
    bits = _splitmix(streams + (steps + np.uint64(1)) * _GOLDEN)  # wraps modulo 2**64
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def build_sampling_batch(rows: Sequence[RowState], vocab_size: int, device: torch.device | str) -> SamplingBatch:
    """Build the batch; copy only the parameters that some row needs to the device, none for plain greedy rows."""
    device = torch.device(device)
    seen = _Collected()
    for i, row in enumerate(rows):
        seen.add(i, row, vocab_size)
    parameters = [row.params for row in rows]
    temperature = uniforms = top_k = top_p = min_p = None
    candidates = None
    if seen.random:
        temperature = _floats([0.0 if p.greedy else p.temperature for p in parameters], device)
        uniforms = _move(torch.from_numpy(_uniforms([row.seed for row in rows], [row.step for row in rows])), device)
        if seen.top_k or seen.top_p:
            limits = [0 if p.greedy or p.top_k >= vocab_size else p.top_k for p in parameters]
            masses = [1.0 if p.greedy else p.top_p for p in parameters]
            top_k = _longs(limits, device)
            top_p = _move(torch.tensor(masses, dtype=torch.float64), device)
            if all(limit or mass == 1.0 for limit, mass in zip(limits, masses, strict=True)):
                candidates = max(1, *limits)
        if seen.min_p:
            min_p = _floats([0.0 if p.greedy else p.min_p for p in parameters], device)
    return SamplingBatch(
        all_greedy=not seen.random, temperature=temperature, uniform=uniforms, top_k=top_k, top_p=top_p, min_p=min_p,
        candidates=candidates, logprobs=seen.logprobs,
        penalties=_penalties(rows, seen.penalised, vocab_size, device) if seen.penalised else None,
        bias=(_longs(seen.bias_rows, device), _longs(seen.bias_ids, device), _floats(seen.bias_values, device))
        if seen.bias_rows else None,
        mask=_masks(rows, vocab_size, device) if seen.masked else None,
        banned=(_longs(seen.banned_rows, device), _longs(seen.banned_ids, device)) if seen.banned_rows else None)


def _edit(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the logits with bias, penalties, masks and banned tokens applied; the given tensor if there are none."""
    if batch.bias is None and batch.penalties is None and batch.mask is None and batch.banned is None:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if batch.bias is not None:
        biased, ids, values = batch.bias
        logits[biased, ids] += values  # (row, id) pairs are unique
    if batch.penalties is not None:
        p = batch.penalties
        for rows in _chunks(p.prompt_mask):
            part = logits[p.rows[rows]]  # [C, V]
            seen_in_output = p.output_counts[rows] > 0
            scaled = torch.where(part > 0, part / p.repetition[rows], part * p.repetition[rows])
            part = torch.where(p.prompt_mask[rows] | seen_in_output, scaled, part)
            part -= p.frequency[rows] * p.output_counts[rows]
            part -= p.presence[rows] * seen_in_output
            logits[p.rows[rows]] = part
    if batch.mask is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        for rows in _chunks(logits):
            allowed = ((batch.mask[rows].unsqueeze(-1) >> bits) & 1).flatten(1)[:, :logits.shape[1]]  # [C, V]
            logits[rows].masked_fill_(allowed == 0, -torch.inf)
    if batch.banned is not None:
        logits.index_put_(batch.banned, logits.new_full((), -torch.inf))  # a Python scalar would sync with the device
    return logits


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return one random token per row, [R]; those of greedy rows are not used."""
    assert batch.temperature is not None
    assert batch.uniform is not None
    drawn = []
    for rows in _chunks(logits):
        temperature = batch.temperature[rows].unsqueeze(1)  # [C, 1]
        scaled = logits[rows] / torch.where(temperature > 0, temperature, 1.0)
        if batch.min_p is not None:
            relative = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
            scaled.masked_fill_(relative < batch.min_p[rows].unsqueeze(1), -torch.inf)
        if batch.top_k is not None and batch.top_p is not None:
            keep = _nucleus(scaled, batch.top_k[rows].unsqueeze(1), batch.top_p[rows].unsqueeze(1), batch.candidates)
            scaled.masked_fill_(~keep, -torch.inf)
        drawn.append(_inverse_cdf(_weights(scaled, scaled.amax(dim=-1, keepdim=True)), batch.uniform[rows]))
    return _cat(drawn)


def _draw_on_cuda(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return one token per row, [R]. The same kernel samples all rows, so that the parameters of one row cannot change
    the last bits of another row's weights."""
    from spillover.kernels.triton.draw import draw
    from spillover.kernels.triton.nucleus import keep_likely

    rows = logits.shape[0]
    temperature, uniform = batch.temperature, batch.uniform
    if temperature is None or uniform is None:
        temperature = torch.zeros(rows, device=logits.device)
        uniform = torch.zeros(rows, dtype=torch.float64, device=logits.device)
    if batch.top_k is not None or batch.top_p is not None or batch.min_p is not None:
        logits = keep_likely(logits, temperature, *_limits(batch, rows, logits.device))
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draw(logits, temperature, uniform, token_ids)
    return token_ids


def _limits(batch: SamplingBatch, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return top_k, top_p and min_p for every row, with neutral values for those that no row has."""
    top_k = batch.top_k if batch.top_k is not None else torch.zeros(rows, dtype=torch.int64, device=device)
    top_p = batch.top_p if batch.top_p is not None else torch.ones(rows, dtype=torch.float64, device=device)
    return top_k, top_p, batch.min_p if batch.min_p is not None else torch.zeros(rows, device=device)


def _weights(logits: Tensor, highest: Tensor) -> Tensor:
    """Return unnormalised probabilities as int64, whose sums are exact in any order; the largest is 2**40."""
    return ((logits - highest).exp() * _WEIGHT_SCALE).long()


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u * total; its weight is therefore above 0."""
    cumulative = weights.cumsum(dim=-1)  # [C, V]
    total = cumulative[:, -1]
    target = torch.minimum((uniforms * total).long(), total - 1)  # u * total may round up to total
    index = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)  # only NaN logits exceed this


def _nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor, candidates: int | None) -> Tensor:
    """Return a mask [C, V] of the tokens kept by top-k and then top-p. top_k, top_p [C, 1].

    The tokens kept are the first of the row's tokens in descending order of logits, ties by ascending id. So exactly
    top_k tokens are kept even if the last of them is tied with others, and top_k=1 is the argmax.
    """
    off = (top_k == 0) & (top_p >= 1.0)
    ordered = logits.topk(candidates, dim=-1).values if candidates is not None else _falling(logits)  # [C, n]
    position = torch.arange(ordered.shape[1], device=logits.device)
    within = position < torch.where(top_k > 0, top_k, logits.shape[1])
    weights = _weights(ordered, ordered[:, :1]).masked_fill_(~within, 0)
    cumulative = weights.cumsum(dim=-1)
    kept = within & (cumulative - weights < top_p * cumulative[:, -1:])  # weight of the tokens before it < top_p
    length = kept.sum(dim=-1, keepdim=True).clamp_(min=1)
    last = ordered.gather(1, length - 1)
    equals_kept = length - (ordered > last).sum(dim=-1, keepdim=True)
    equal = logits == last
    return off | (logits > last) | (equal & (equal.cumsum(dim=-1) <= equals_kept))


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of each row's maximum, [R]; the first of ties. On the CPU numpy is far faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _falling(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(-logits.numpy(), axis=-1)).neg_()
    return logits.sort(dim=-1, descending=True).values


def _chunks(logits: Tensor) -> list[slice]:
    """Divide rows into chunks to process one at a time, which bounds the workspace for any batch size."""
    size = max(1, SAMPLE_ENTRIES[logits.device.type] // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)] or [slice(0, 0)]


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class _Collected:
    """The features that the rows of a batch use, gathered in one pass."""

    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    masked: bool = False
    logprobs: int | None = None
    penalised: list[int] = field(default_factory=list)
    bias_rows: list[int] = field(default_factory=list)
    bias_ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    banned_rows: list[int] = field(default_factory=list)
    banned_ids: list[int] = field(default_factory=list)

    def add(self, i: int, row: RowState, vocab_size: int) -> None:
        params = row.params
        if not params.greedy:
            self.random = True
            self.top_k |= params.top_k > 0
            self.top_p |= params.top_p < 1.0
            self.min_p |= params.min_p > 0.0
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self.penalised.append(i)
        if params.logit_bias:
            self.bias_rows += [i] * len(params.logit_bias)
            self.bias_ids += params.logit_bias.keys()
            self.bias_values += params.logit_bias.values()
        if row.mask is not None:
            self.masked = True
        if row.step < params.min_tokens:
            ids = [token for token in set(row.stop_ids) if 0 <= token < vocab_size]
            self.banned_rows += [i] * len(ids)
            self.banned_ids += ids
        if params.logprobs is not None:
            self.logprobs = max(self.logprobs or 0, params.logprobs)


def _penalties(rows: Sequence[RowState], penalised: list[int], vocab_size: int, device: torch.device) -> Penalties:
    parameters = [rows[i].params for i in penalised]
    prompts = [rows[i].prompt_token_ids if rows[i].params.repetition_penalty != 1.0 else () for i in penalised]
    outputs = [rows[i].output_token_ids for i in penalised]
    return Penalties(
        rows=_longs(penalised, device),
        presence=_floats([p.presence_penalty for p in parameters], device).unsqueeze(1),
        frequency=_floats([p.frequency_penalty for p in parameters], device).unsqueeze(1),
        repetition=_floats([p.repetition_penalty for p in parameters], device).unsqueeze(1),
        prompt_mask=_count(prompts, vocab_size, device) > 0,
        output_counts=_count(outputs, vocab_size, device))


def _count(sequences: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Return how often each token occurs in each sequence, [N, V] int32."""
    flat = [np.asarray(tokens, dtype=np.int64) + i * vocab_size for i, tokens in enumerate(sequences)]
    index = _move(torch.from_numpy(np.concatenate(flat)), device)
    counts = torch.zeros(len(sequences) * vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))
    return counts.view(len(sequences), vocab_size)


def _masks(rows: Sequence[RowState], vocab_size: int, device: torch.device) -> Tensor:
    masks = torch.full((len(rows), (vocab_size + 31) // 32), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        if row.mask is not None:
            masks[i] = row.mask
    return _move(masks, device)


def _uniforms(seeds: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a random number for each (seed, step) by splitmix64, from the stream that starts at a hash of the seed."""
    streams = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    return random_numbers(_splitmix(streams + _GOLDEN), np.array(steps, dtype=np.uint64))


def _splitmix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return _move(torch.tensor(values, dtype=torch.float32), device)


def _longs(values: Sequence[int], device: torch.device) -> Tensor:
    return _move(torch.tensor(values, dtype=torch.int64), device)


def _move(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting, through pinned memory, which torch keeps until the copy has completed."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
