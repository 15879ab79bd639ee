"""What to ask of a model: prompts of token ids with exact lengths, the same for the same seed.

`requests(repeat)` keeps the lengths and changes the tokens, so that no repeat is answered from the prefix cache of the
one before; repeat -1 is the warm-up's. A workload whose prompts are fixed (sharegpt) needs the cache reset instead.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spillover.bench.target import BenchRequest
from spillover.errors import SpilloverError

WARMUP = -1


class Workload(Protocol):
    @property
    def name(self) -> str: ...

    def requests(self, repeat: int) -> list[BenchRequest]: ...


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Vocabulary:
    """Ids that a random prompt may hold: all but the special ones."""

    size: int
    special_ids: frozenset[int] = frozenset()

    def draw(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(rng.choice(self._plain, size=count).tolist())

    @functools.cached_property
    def _plain(self) -> npt.NDArray[np.object_]:
        """Objects, so that the tokens of a long trace are references to these and not millions of ints."""
        plain = np.setdiff1d(np.arange(self.size), np.fromiter(self.special_ids, dtype=np.int64))
        return plain.astype(object)


@dataclass(frozen=True)
class RandomWorkload:
    """vLLM's `random`: lengths uniform in [length * (1 - ratio), length * (1 + ratio)], after a prefix all share."""

    vocabulary: Vocabulary
    num_prompts: int
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0
    name: str = "random"

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise SpilloverError(f"--random-range-ratio is a share from 0 up to 1; got {self.range_ratio}")
        check_positive(num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len)

    def requests(self, repeat: int) -> list[BenchRequest]:
        lengths = np.random.default_rng(self.seed)
        inputs, outputs = (uniform_lengths(lengths, length, self.range_ratio, self.num_prompts)
                           for length in (self.input_len, self.output_len))
        tokens = _token_rng(self.seed, repeat)
        prefix = self.vocabulary.draw(tokens, self.prefix_len)
        return [BenchRequest(prefix + self.vocabulary.draw(tokens, length), output)
                for length, output in zip(inputs, outputs, strict=True)]


@dataclass(frozen=True)
class MixedWorkload:
    """Lengths log-uniform over a range, as in real traffic: many short ones and a few long. The prefix, if any, is
    shared by every second request."""

    vocabulary: Vocabulary
    num_prompts: int
    input_range: tuple[int, int] = (16, 512)
    output_range: tuple[int, int] = (8, 128)
    prefix_len: int = 0
    seed: int = 0
    name: str = "mixed"

    def __post_init__(self) -> None:
        check_positive(num_prompts=self.num_prompts)
        for option, (low, high) in (("--mixed-input-range", self.input_range),
                                    ("--mixed-output-range", self.output_range)):
            if not 1 <= low <= high:
                raise SpilloverError(f"{option} takes LOW,HIGH with 1 <= LOW <= HIGH; got {low},{high}")

    def requests(self, repeat: int) -> list[BenchRequest]:
        lengths = np.random.default_rng(self.seed)
        inputs, outputs = (log_uniform_lengths(lengths, bounds, self.num_prompts)
                           for bounds in (self.input_range, self.output_range))
        tokens = _token_rng(self.seed, repeat)
        prefix = self.vocabulary.draw(tokens, self.prefix_len)
        return [BenchRequest((prefix if index % 2 else ()) + self.vocabulary.draw(tokens, length), output)
                for index, (length, output) in enumerate(zip(inputs, outputs, strict=True))]


@dataclass(frozen=True)
class ShareGPTWorkload:
    """First question and first answer of each conversation, filtered as vLLM filters them."""

    vocabulary: Vocabulary
    pairs: tuple[BenchRequest, ...]
    seed: int = 0
    name: str = "sharegpt"

    def requests(self, repeat: int) -> list[BenchRequest]:
        if repeat != WARMUP:
            return list(self.pairs)
        tokens = _token_rng(self.seed, repeat)
        return [BenchRequest(self.vocabulary.draw(tokens, len(pair.prompt_token_ids)), pair.output_len)
                for pair in self.pairs]


@dataclass(frozen=True)
class Conversations:
    """Chats that go on in turn, a question each a round. Each begins with a long text of its own, and every prompt
    holds all that was said before in its chat."""

    vocabulary: Vocabulary
    count: int = 12
    rounds: int = 8
    prefix_len: int = 1024
    question_len: int = 16
    answer_len: int = 4
    seed: int = 0
    name: str = "multi-turn"

    def __post_init__(self) -> None:
        check_positive(conversations=self.count, rounds=self.rounds, prefix_len=self.prefix_len,
                        question_len=self.question_len, answer_len=self.answer_len)

    @property
    def longest(self) -> int:
        """Tokens of a chat at its end."""
        return self.prefix_len + self.rounds * (self.question_len + self.answer_len)

    def question(self, chat: int, turn: int) -> tuple[int, ...]:
        """What is added to a chat for its turn; the first time also the text it begins with."""
        length = self.question_len + (self.prefix_len if turn == 0 else 0)
        return self.vocabulary.draw(np.random.default_rng([self.seed, chat + 1, turn + 1]), length)

    def order(self, turn: int) -> list[int]:
        """The chats in the order of one round. Nobody speaks twice in a row, so that no chat is found where it was."""
        chats: list[int] = np.random.default_rng([self.seed, turn + 1]).permutation(self.count).tolist()
        if turn and self.count > 1 and chats[0] == self.order(turn - 1)[-1]:
            chats[0], chats[1] = chats[1], chats[0]
        return chats


def load_sharegpt(path: str, tokenizer: Encodes, vocabulary: Vocabulary, num_prompts: int,
                  output_len: int | None = None, seed: int = 0, max_model_len: int | None = None) -> ShareGPTWorkload:
    check_positive(num_prompts=num_prompts)
    conversations = read_talks(path)
    np.random.default_rng(seed).shuffle(conversations)
    pairs: list[BenchRequest] = []
    for prompt, answer, *_ in conversations:
        if len(pairs) == num_prompts:
            break
        ids = tokenizer.encode(prompt)
        length = len(tokenizer.encode(answer)) if output_len is None else output_len
        fits = max_model_len is None or len(ids) + length <= max_model_len
        if fits and is_usable(len(ids), length, check_output=output_len is None):
            pairs.append(BenchRequest(tuple(ids), length))
    if not pairs:
        raise SpilloverError(f"no conversation in '{path}' passes the length filter (prompt 4 to 1024 tokens, prompt "
                             f"and answer together up to 2048)")
    return ShareGPTWorkload(vocabulary, tuple(pairs), seed)


def is_usable(prompt_len: int, output_len: int, check_output: bool = True) -> bool:
    """vLLM's pruning of sampled conversations: nothing tiny, nothing that dominates the run."""
    return (prompt_len >= 4 and (output_len >= 4 or not check_output) and prompt_len <= 1024
            and prompt_len + output_len <= 2048)


def read_talks(path: str) -> list[list[str]]:
    """What was said in each conversation of at least a question and an answer."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        talks = [entry.get("conversations", entry.get("conversation", [])) for entry in entries]
        return [[turn["value"] for turn in talk] for talk in talks if len(talk) >= 2]
    except OSError as error:
        raise SpilloverError(f"cannot read --dataset-path '{path}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpilloverError(f"'{path}' is not in the ShareGPT format: a JSON list of "
                             f'{{"conversations": [{{"from": ..., "value": ...}}, ...]}}') from error


def uniform_lengths(rng: np.random.Generator, length: int, range_ratio: float, count: int) -> list[int]:
    low = max(1, math.floor(length * (1 - range_ratio)))
    drawn: list[int] = rng.integers(low, math.ceil(length * (1 + range_ratio)), size=count, endpoint=True).tolist()
    return drawn


def log_uniform_lengths(rng: np.random.Generator, bounds: tuple[int, int], count: int) -> list[int]:
    low, high = np.log(bounds[0]), np.log(bounds[1] + 1)
    drawn: list[int] = np.exp(rng.uniform(low, high, size=count)).astype(int).clip(*bounds).tolist()
    return drawn


def _token_rng(seed: int, repeat: int) -> np.random.Generator:
    return np.random.default_rng([seed, repeat + 1])


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise SpilloverError(f"--{name.replace('_', '-')} must be at least 1; got {value}")


def longest(requests: Sequence[BenchRequest]) -> int:
    """Tokens of the longest request, prompt and output together."""
    return max(request.num_tokens for request in requests)
