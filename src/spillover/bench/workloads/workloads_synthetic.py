"""Workloads of random tokens: each is a list of shapes (lengths and shared parts) drawn from the seed.

Every function returns shapes; `SyntheticWorkload` fills them with tokens, different ones for each repeat. A part's key
is a tuple of small ints, the first of which is the role of the part in its workload.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.workloads.sharing import Part
from spillover.bench.workloads.workload_stats import Shape, WorkloadStats, measure
from spillover.bench.workloads.workloads import Vocabulary, check_positive, log_uniform_lengths, uniform_lengths
from spillover.errors import SpilloverError

SHARED, OWN = 0, 1


@dataclass(frozen=True)
class SyntheticWorkload:
    name: str
    shapes: tuple[Shape, ...]
    vocabulary: Vocabulary | None = None  # None if only statistics are needed
    seed: int = 0
    notes: tuple[str, ...] = ()

    def requests(self, repeat: int) -> list[ServeRequest]:
        if self.vocabulary is None:
            raise SpilloverError(f"the workload {self.name} has no vocabulary to sample tokens from: give --tokenizer, "
                                 "a model folder or GGUF file, or a server that answers /tokenize")
        tokens = _Tokens(self.vocabulary, [self.seed, repeat + 1, self._salt], self.shapes)
        return [ServeRequest(tokens.prompt(shape.parts), shape.prompt_len, shape.output_len, at=shape.at,
                             session=shape.session, turn=shape.turn, think=shape.think) for shape in self.shapes]

    def stats(self) -> WorkloadStats:
        return self._stats

    @property
    def _salt(self) -> int:
        """Return a salt, so that different workloads of the same seed have different tokens."""
        lengths = sum(shape.prompt_len for shape in self.shapes), sum(shape.output_len for shape in self.shapes)
        return zlib.crc32(f"{self.name} {len(self.shapes)} {lengths}".encode())

    @functools.cached_property
    def _stats(self) -> WorkloadStats:
        return measure(self.name, self.shapes, notes=self.notes)


class _Tokens:
    """The tokens of one repeat, drawn part by part from its seeds and the part's key."""

    def __init__(self, vocabulary: Vocabulary, seeds: Sequence[int], shapes: Sequence[Shape]) -> None:
        self._vocabulary, self._seeds = vocabulary, seeds
        self._longest: dict[object, int] = {}
        self._drawn: dict[object, tuple[int, ...]] = {}
        for shape in shapes:
            for part in shape.parts:
                self._longest[part.key] = max(part.length, self._longest.get(part.key, 0))

    def prompt(self, parts: Sequence[Part]) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(map(self._part, parts)))

    def _part(self, part: Part) -> tuple[int, ...]:
        tokens = self._drawn.get(part.key)
        if tokens is None:
            assert isinstance(part.key, tuple)
            # The length is included because numpy treats seeds that differ only in trailing zeros as equal.
            rng = np.random.default_rng([*self._seeds, len(part.key), *part.key])
            tokens = self._drawn[part.key] = self._vocabulary.draw(rng, self._longest[part.key])
        return tokens[: part.length]


def random_shapes(count: int, input_len: int = 1024, output_len: int = 128, range_ratio: float = 0.0,
                  prefix_len: int = 0, seed: int = 0) -> tuple[Shape, ...]:
    """Make vLLM's `random`: lengths uniform within the ratio either way, after a prefix that all requests share."""
    check_positive(num_prompts=count, random_input_len=input_len, random_output_len=output_len)
    _check_share("random-range-ratio", range_ratio)
    rng = np.random.default_rng(seed)
    inputs, outputs = (uniform_lengths(rng, length, range_ratio, count) for length in (input_len, output_len))
    return tuple(Shape(_parts(Part((SHARED,), prefix_len), Part((OWN, index), length)), output)
                 for index, (length, output) in enumerate(zip(inputs, outputs, strict=True)))


def random_workload(vocabulary: Vocabulary, count: int, input_len: int, output_len: int, prefix_len: int = 0,
                    seed: int = 0) -> SyntheticWorkload:
    """Make vLLM's `random` with exact lengths."""
    shapes = random_shapes(count, input_len, output_len, prefix_len=prefix_len, seed=seed)
    return SyntheticWorkload("random", shapes, vocabulary, seed)


def mixed_shapes(count: int, input_range: tuple[int, int] = (16, 512), output_range: tuple[int, int] = (8, 128),
                 prefix_len: int = 0, seed: int = 0) -> tuple[Shape, ...]:
    """Make log-uniform lengths: many short ones and a few long ones. Every second request has the prefix."""
    check_positive(num_prompts=count)
    rng = np.random.default_rng(seed)
    inputs, outputs = (log_uniform_lengths(rng, bounds, count) for bounds in (input_range, output_range))
    return tuple(Shape(_parts(Part((SHARED,), prefix_len if index % 2 else 0), Part((OWN, index), length)), output)
                 for index, (length, output) in enumerate(zip(inputs, outputs, strict=True)))


def generated_shared_prefix_shapes(groups: int = 64, per_group: int = 16, system_prompt_len: int = 2048,
                                   question_len: int = 128, output_len: int = 256, range_ratio: float = 1.0,
                                   turns: int = 1, ordered: bool = False, limit: int | None = None,
                                   seed: int = 0) -> tuple[Shape, ...]:
    """Make SGLang's groups of questions after a system prompt that the group shares, shuffled unless `ordered`.

    As in SGLang, lengths are uniform from `range_ratio` times the length up to it. With several turns each question
    starts a session.
    """
    check_positive(gsp_num_groups=groups, gsp_prompts_per_group=per_group, gsp_question_len=question_len,
                   gsp_output_len=output_len, gsp_num_turns=turns)
    if not 0 <= range_ratio <= 1:
        raise SpilloverError(f"--gsp-range-ratio is the least share of a length, from 0 to 1; got {range_ratio}")
    rng = np.random.default_rng(seed)
    count = groups * per_group
    if limit is not None and not 1 <= limit <= count:
        raise SpilloverError(f"--num-prompts {limit} must be from 1 to {count}, the requests of --gsp-num-groups "
                             f"{groups} and --gsp-prompts-per-group {per_group}; lower it or raise one of these")
    systems = _from_share(rng, system_prompt_len, range_ratio, groups)
    questions = [_from_share(rng, question_len, range_ratio, count) for _ in range(turns)]
    outputs = [_from_share(rng, output_len, range_ratio, count) for _ in range(turns)]
    order = list(range(count)) if ordered else rng.permutation(count).tolist()
    order = order[:limit]
    shapes = []
    for turn in range(turns):
        for session, index in enumerate(order):
            group = index // per_group
            parts = _parts(Part((SHARED, group), systems[group] if turn == 0 else 0),
                           Part((OWN, index, turn), questions[turn][index]))
            shapes.append(Shape(parts, outputs[turn][index], session=session if turns > 1 else None, turn=turn))
    return tuple(shapes)


def prefix_repetition_shapes(count: int, prefix_len: int = 256, suffix_len: int = 256, num_prefixes: int = 10,
                             output_len: int = 128, shuffle: bool = True, seed: int = 0) -> tuple[Shape, ...]:
    """Make vLLM's `prefix_repetition`: each of a few prefixes is followed by many suffixes."""
    check_positive(num_prompts=count, prefix_repetition_prefix_len=prefix_len, prefix_repetition_suffix_len=suffix_len,
                   prefix_repetition_num_prefixes=num_prefixes, prefix_repetition_output_len=output_len)
    if count < num_prefixes:
        raise SpilloverError(f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {num_prefixes}: no "
                             f"prefix would be used twice; raise it, for instance to {10 * num_prefixes}")
    shapes = [Shape((Part((SHARED, index * num_prefixes // count), prefix_len), Part((OWN, index), suffix_len)),
                    output_len) for index in range(count)]
    order = np.random.default_rng(seed).permutation(count).tolist() if shuffle else range(count)
    return tuple(shapes[index] for index in order)


def multi_turn_shapes(sessions: int = 32, turns: int = 4, shared_len: int = 0, prefix_len: int = 512,
                      input_len: int = 64, output_len: int = 64, range_ratio: float = 0.0, think_time: float = 0.0,
                      seed: int = 0) -> tuple[Shape, ...]:
    """Make sessions of several turns: a system prompt that all share, an opening per session, then one question per
    turn. Each prompt contains all earlier turns. Pauses are exponential with the think time as mean."""
    check_positive(multi_turn_num_sessions=sessions, multi_turn_num_turns=turns, multi_turn_input_len=input_len,
                   multi_turn_output_len=output_len)
    _check_share("multi-turn-range-ratio", range_ratio)
    if think_time < 0:
        raise SpilloverError(f"--multi-turn-think-time is in seconds, 0 or more; got {think_time}")
    rng = np.random.default_rng(seed)
    shapes = []
    for turn in range(turns):
        inputs, outputs = (uniform_lengths(rng, length, range_ratio, sessions) for length in (input_len, output_len))
        pauses = rng.exponential(think_time, sessions).tolist() if think_time and turn else [0.0] * sessions
        for session in range(sessions):
            opening = (Part((SHARED,), shared_len), Part((OWN, session), prefix_len)) if turn == 0 else ()
            parts = _parts(*opening, Part((OWN, session, turn + 1), inputs[session]))
            shapes.append(Shape(parts, outputs[session], session=session, turn=turn, think=pauses[session]))
    return tuple(shapes)


def prefill_mix_shapes(count: int, long_share: float = 0.1, long_input_len: int = 2048, long_output_len: int = 16,
                       short_input_len: int = 64, short_output_len: int = 128) -> tuple[Shape, ...]:
    """Make long prompts with short answers among short prompts that stream: the case for chunked prefill. The long ones
    are spread evenly, so that each arrives while others decode."""
    check_positive(num_prompts=count, prefill_mix_long_input_len=long_input_len,
                   prefill_mix_long_output_len=long_output_len, prefill_mix_short_input_len=short_input_len,
                   prefill_mix_short_output_len=short_output_len)
    if not 0 <= long_share <= 1:
        raise SpilloverError(f"--prefill-mix-long-share is a share from 0 to 1; got {long_share}")
    long_count = round(count * long_share)
    longs = {(2 * rank + 1) * count // (2 * long_count) for rank in range(long_count)}
    return tuple(Shape((Part((OWN, index), long_input_len if index in longs else short_input_len),),
                       long_output_len if index in longs else short_output_len) for index in range(count))


def variable_output_shapes(count: int, output_lens: Sequence[int] = (16, 32, 64, 256, 512), input_len: int = 256,
                           seed: int = 0) -> tuple[Shape, ...]:
    """Make answers of very different lengths, each equally often: static batching pads them to the longest."""
    check_positive(num_prompts=count, variable_output_input_len=input_len)
    if not output_lens or min(output_lens) < 1:
        raise SpilloverError(f"--variable-output-lens takes lengths of at least 1; got {list(output_lens)}")
    outputs = [output_lens[index % len(output_lens)] for index in range(count)]
    order = np.random.default_rng(seed).permutation(count).tolist()
    return tuple(Shape((Part((OWN, index), input_len),), outputs[order[index]]) for index in range(count))


def _parts(*parts: Part) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.length > 0)


def _from_share(rng: np.random.Generator, length: int, share: float, count: int) -> list[int]:
    if length <= 0:
        return [0] * count
    drawn: list[int] = rng.integers(max(1, int(length * share)), length, size=count, endpoint=True).tolist()
    return drawn


def _check_share(option: str, value: float) -> None:
    if not 0 <= value < 1:
        raise SpilloverError(f"--{option} is a share from 0 up to 1; got {value}")
