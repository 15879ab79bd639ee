"""Workloads with recorded prompts: conversations of a ShareGPT file, lines of a JSONL file.

The texts are the same in every repeat, so a prefix cache could serve the second repeat from the first. From repeat 1
on, the first tokens of every prompt are therefore replaced by others, the same for all prompts of a repeat: lengths and
sharing stay, and no block of an earlier repeat matches. A warm-up has random tokens of the same lengths, so that a
drafter that learns from earlier answers has not seen those that are measured.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.served_model import TextTokenizer
from spillover.bench.workloads.sharing import Part, token_parts
from spillover.bench.workloads.workload_stats import Shape, WorkloadStats, measure
from spillover.bench.workloads.workloads import WARMUP, Vocabulary, check_positive, is_usable, read_talks
from spillover.errors import SpilloverError

OPENING = 2  # number of tokens replaced per repeat; the shortest prompt has 4
CHARACTERS_A_TOKEN = 4  # an estimate for English, used without a tokenizer
DEFAULT_OUTPUT_LEN = 256  # vLLM's --custom-output-len


@dataclass(frozen=True)
class Recorded:
    """A request as recorded in the file; `prompt` is text if there is no tokenizer."""

    prompt: tuple[int, ...] | str
    output_len: int
    session: int | None = None
    turn: int = 0
    text: str = ""  # the text from which the prompt's tokens were made

    @property
    def prompt_len(self) -> int:
        return estimate_tokens(self.prompt) if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True)
class RecordedWorkload:
    name: str
    records: tuple[Recorded, ...]
    vocabulary: Vocabulary | None = None  # None if the prompts are text
    seed: int = 0
    notes: tuple[str, ...] = ()
    templated: bool = False  # whether the tokens include the chat template's

    def in_words(self) -> RecordedWorkload:
        """Return the file's own texts, without a template, for an endpoint that tokenises."""
        return replace(self, records=tuple(replace(record, prompt=record.text) if record.text else record
                                           for record in self.records))

    def requests(self, repeat: int) -> list[ServeRequest]:
        return [ServeRequest(self._varied(record, repeat), record.prompt_len, record.output_len,
                             session=record.session, turn=record.turn) for record in self.records]

    def stats(self) -> WorkloadStats:
        return self._stats

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(Shape(_parts(record.prompt), record.output_len, session=record.session, turn=record.turn)
                     for record in self.records)

    @functools.cached_property
    def _stats(self) -> WorkloadStats:
        return measure(self.name, self.shapes, estimated=self.vocabulary is None, notes=self.notes)

    def _varied(self, record: Recorded, repeat: int) -> tuple[int, ...] | str:
        first = record.turn == 0  # replacing tokens of the first turn changes the prefix of the whole session
        if repeat == 0 or not (first or repeat == WARMUP):
            return record.prompt
        if isinstance(record.prompt, str):
            return f"({repeat}) {record.prompt}" if first else record.prompt
        assert self.vocabulary is not None
        # A token that begins every text of the model stays in place.
        start = 1 if record.prompt[0] in self.vocabulary.special_ids and len(record.prompt) > 1 else 0
        if repeat == WARMUP:
            own = np.random.default_rng([self.seed, zlib.crc32(repr(record.prompt).encode())])
            return record.prompt[:start] + self.vocabulary.draw(own, len(record.prompt) - start)
        opening = self.vocabulary.draw(np.random.default_rng([self.seed, repeat + 1]), OPENING)
        return (record.prompt[:start] + opening + record.prompt[start + OPENING :])[: len(record.prompt)]


def sharegpt(path: str, tokenizer: TextTokenizer | None, num_prompts: int, output_len: int | None = None,
             turns: int = 1, shuffle: bool = True, seed: int = 0,
             max_model_len: int | None = None) -> RecordedWorkload:
    """Return the first question of each conversation and the length of its answer, filtered as vLLM filters them; with
    more turns, conversations as sessions, as far as they fit the model."""
    check_positive(num_prompts=num_prompts, sharegpt_turns=turns)
    talks = read_talks(path)
    if shuffle:
        np.random.default_rng(seed).shuffle(talks)
    records: list[Recorded] = []
    for number, talk in enumerate(talks):
        if len(records) >= num_prompts:
            break
        said = _turns(talk[: 2 * turns], tokenizer, output_len, max_model_len)
        records += [Recorded(prompt, length, number if turns > 1 else None, turn, text=talk[2 * turn])
                    for turn, (prompt, length) in enumerate(said)]
    if not records:
        raise SpilloverError(f"no conversation in '{path}' passes the length filter (prompt 4 to 1024 tokens, prompt "
                             f"and answer together up to 2048{_and_model(max_model_len)})")
    records = sorted(records[:num_prompts], key=lambda record: record.turn)
    return RecordedWorkload("sharegpt", tuple(records), _vocabulary(tokenizer), seed,
                            _short_of(num_prompts, len(records), "that pass the length filter"))


def custom(path: str, tokenizer: TextTokenizer | None, num_prompts: int | None = None, output_len: int | None = None,
           chat: bool = True, shuffle: bool = True, seed: int = 0,
           max_model_len: int | None = None) -> RecordedWorkload:
    """Read vLLM's `custom` format: lines of {"prompt": text, "output_tokens": n}. The file's lengths take precedence
    over the default; `prompt` may also be a list of token ids. With `chat` a text goes through the chat template."""
    entries = list(_jsonl(path))
    if shuffle:
        np.random.default_rng(seed).shuffle(entries)
    records: list[Recorded] = []
    for entry in entries:
        if len(records) == num_prompts:
            break
        given = entry["prompt"]
        text = given if isinstance(given, str) else ""
        prompt: tuple[int, ...] | str = text or tuple(given)
        if text and tokenizer is not None:
            prompt = tuple(tokenizer.chat(text) if chat else tokenizer.encode(text))
        length = output_len if output_len is not None else entry.get("output_tokens", DEFAULT_OUTPUT_LEN)
        record = Recorded(prompt, length, text=text)
        if max_model_len is None or record.prompt_len + length <= max_model_len:
            records.append(record)
    if not records:
        raise SpilloverError(f"no line of '{path}' fits the model's {max_model_len} tokens")
    if tokenizer is None and any(not isinstance(record.prompt, str) for record in records):
        raise SpilloverError(f"'{path}' holds token ids: give --tokenizer, or a server that answers /tokenize, so that "
                             "the warm-up can use other prompts")
    return RecordedWorkload("custom", tuple(records), _vocabulary(tokenizer), seed,
                            _short_of(num_prompts, len(records), "that fit"), templated=chat)


def estimate_tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_A_TOKEN))


def _turns(talk: Sequence[str], tokenizer: TextTokenizer | None, output_len: int | None,
           max_model_len: int | None) -> list[tuple[tuple[int, ...] | str, int]]:
    """Return (what the turn adds, tokens of its answer) of the turns that fit; empty if the first is filtered out."""
    turns: list[tuple[tuple[int, ...] | str, int]] = []
    total = 0
    for question, answer in zip(talk[::2], talk[1::2], strict=False):
        prompt: tuple[int, ...] | str = question if tokenizer is None else tuple(tokenizer.encode(question))
        size = estimate_tokens(question) if tokenizer is None else len(prompt)
        length = output_len if output_len is not None else (
            estimate_tokens(answer) if tokenizer is None else len(tokenizer.encode(answer)))
        total += size + length
        fits = max_model_len is None or total <= max_model_len
        if not fits or not is_usable(size, length, check_output=output_len is None):
            break
        turns.append((prompt, length))
    return turns


def _jsonl(path: str) -> Iterator[dict[str, Any]]:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SpilloverError(f"cannot read --dataset-path '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpilloverError(f"--dataset-path '{path}' is not UTF-8: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also split at U+2028, valid in JSON
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not _is_prompt(entry.get("prompt")) or not _is_length(entry):
            raise SpilloverError(f"line {number} of '{path}' is not in the custom format: "
                                 '{"prompt": text or token ids, "output_tokens": a number above 0}')
        yield entry


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(isinstance(token, int) and token >= 0 for token in prompt)
    return isinstance(prompt, str) and bool(prompt.strip())


def _is_length(entry: Mapping[str, Any]) -> bool:
    length = entry.get("output_tokens", 1)
    return isinstance(length, int) and length >= 1


def _parts(prompt: tuple[int, ...] | str) -> tuple[Part, ...]:
    if not isinstance(prompt, str):
        return token_parts(prompt)
    size = 16 * CHARACTERS_A_TOKEN
    return tuple(Part(prompt[start : start + size], estimate_tokens(prompt[start : start + size]))
                 for start in range(0, len(prompt), size))


def _vocabulary(tokenizer: TextTokenizer | None) -> Vocabulary | None:
    return None if tokenizer is None else tokenizer.vocabulary


def _short_of(asked: int | None, found: int, which: str) -> tuple[str, ...]:
    """Return a note if the file has too few prompts: repeating some would measure the prefix cache."""
    if asked is None or found >= asked:
        return ()
    return (f"{asked:,} were requested; the file has {found:,} {which}",)


def _and_model(max_model_len: int | None) -> str:
    return f", within the model's {max_model_len}" if max_model_len is not None else ""
