"""Building blocks of workloads: tokens and lengths drawn from a seed, conversations of a file or of random tokens."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillover.errors import SpilloverError

WARMUP = -1


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a random prompt may contain: all but the special ones."""

    size: int
    special_ids: frozenset[int] = frozenset()

    def draw(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(rng.choice(self._plain, size=count).tolist())

    @functools.cached_property
    def _plain(self) -> npt.NDArray[np.object_]:
        """Return the plain tokens as objects, so that a long trace has references to them, not millions of ints."""
        plain = np.setdiff1d(np.arange(self.size), np.fromiter(self.special_ids, dtype=np.int64))
        return plain.astype(object)


@dataclass(frozen=True)
class Conversations:
    """Chats that take turns, with one question per round. Each begins with a long text of its own, and every prompt
    contains all earlier turns of its chat."""

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
        """Return the number of tokens of a chat at its end."""
        return self.prefix_len + self.rounds * (self.question_len + self.answer_len)

    def question(self, chat: int, turn: int) -> tuple[int, ...]:
        """Return the tokens that a turn adds to a chat; the first turn includes the long text it begins with."""
        length = self.question_len + (self.prefix_len if turn == 0 else 0)
        return self.vocabulary.draw(np.random.default_rng([self.seed, chat + 1, turn + 1]), length)

    def order(self, turn: int) -> list[int]:
        """Return the chats in the order of one round. No chat has two turns in a row, so that none finds its KV
        untouched."""
        chats: list[int] = np.random.default_rng([self.seed, turn + 1]).permutation(self.count).tolist()
        if turn and self.count > 1 and chats[0] == self.order(turn - 1)[-1]:
            chats[0], chats[1] = chats[1], chats[0]
        return chats


def is_usable(prompt_len: int, output_len: int, check_output: bool = True) -> bool:
    """Return whether vLLM would keep a sampled conversation: neither tiny nor so long that it dominates the run."""
    return (prompt_len >= 4 and (output_len >= 4 or not check_output) and prompt_len <= 1024
            and prompt_len + output_len <= 2048)


def read_talks(path: str) -> list[list[str]]:
    """Return the turns of each conversation that has at least a question and an answer."""
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


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise SpilloverError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
