"""Recorded traffic: arrival times and lengths of requests, read from the files that their publishers provide.

Only Mooncake records which prompts share prefixes (ids of 512-token blocks); in the others no two share anything.
Tokens are drawn as for any other workload.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from spillover.bench.workloads.sharing import Part
from spillover.bench.workloads.workload_stats import Shape
from spillover.errors import SpilloverError

Line = TypeVar("Line")

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    at: float  # seconds, on the trace's own clock
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's 512-token blocks; the same id means the same tokens


@dataclass(frozen=True)
class Replay:
    """The part of a trace that is replayed, and its scaling."""

    limit: int | None = None  # maximum number of requests, from the first; None for all
    speedup: float = 1.0  # factor on the speed: 2 replays in half the time
    length_scale: float = 1.0  # factor on prompt and answer lengths; shared blocks shrink with them
    max_model_len: int | None = None  # longest request to keep, in tokens

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise SpilloverError(f"--trace-limit must be at least 1; got {self.limit}")
        if self.speedup <= 0:
            raise SpilloverError(f"--trace-speedup is above 0, 2 for twice as fast; got {self.speedup}")
        if self.length_scale <= 0:
            raise SpilloverError(f"--trace-length-scale is above 0, 0.5 for half as long; got {self.length_scale}")


def trace_shapes(rows: Sequence[TraceRow], replay: Replay) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Return the requests, and notes on how they were changed. Times start at 0 with the first row replayed."""
    if not rows:
        raise SpilloverError("the trace has no answered request (one with an output length above 0); give another file")
    played = sorted(rows, key=lambda row: row.at)[: replay.limit]
    start = played[0].at
    shapes = [_shape(index, row, start, replay) for index, row in enumerate(played)]
    longest = replay.max_model_len
    fitting = tuple(shape for shape in shapes if longest is None or shape.prompt_len + shape.output_len <= longest)
    if not fitting:
        raise SpilloverError(f"no request of the trace fits the model's {longest} tokens; shorten them with "
                             f"--trace-length-scale, {_fitting_scale(played, longest or 1):.2g} for instance")
    notes = []
    if len(fitting) < len(shapes):
        notes.append(f"Left out: {len(shapes) - len(fitting):,} of {len(shapes):,} requests, longer than the model's "
                     f"{longest:,} tokens")
    if replay.length_scale != 1:
        notes.append(f"Lengths are {replay.length_scale:g} times the trace's")
    if replay.speedup != 1:
        notes.append(f"Times are the trace's, {replay.speedup:g} times as fast")
    return fitting, tuple(notes)


def read_mooncake(path: str) -> list[TraceRow]:
    """Read JSON lines: timestamp in milliseconds, input_length, output_length, hash_ids."""

    def row(line: str) -> TraceRow:
        entry = json.loads(line)
        prompt_len, blocks = int(entry["input_length"]), tuple(int(block) for block in entry["hash_ids"])
        if blocks and not (len(blocks) - 1) * MOONCAKE_BLOCK < prompt_len <= len(blocks) * MOONCAKE_BLOCK:
            raise ValueError(f"{len(blocks)} blocks of {MOONCAKE_BLOCK} do not make {prompt_len} tokens")
        return TraceRow(float(entry["timestamp"]) / 1e3, prompt_len, int(entry["output_length"]), blocks)

    with _opened(path) as lines:
        return _rows(path, "Mooncake", '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}',
                     lines, row)


def read_azure(path: str) -> list[TraceRow]:
    """Read CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens."""
    return _csv(path, "Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
                lambda row: TraceRow(_moment(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def read_burstgpt(path: str, model: str | None = None) -> list[TraceRow]:
    """Read CSV: Timestamp (seconds), Model, Request tokens, Response tokens. Failed requests have no response; vLLM
    replays only those of GPT-4."""
    rows = _csv(path, "BurstGPT", ("Timestamp", "Model", "Request tokens", "Response tokens"),
                lambda row: None if model is not None and row["Model"] != model else TraceRow(
                    float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])))
    if not rows:
        raise SpilloverError(f"'{path}' has no answered request" + (f" of the model {model}" if model else ""))
    return rows


def _shape(index: int, row: TraceRow, start: float, replay: Replay) -> Shape:
    scale = replay.length_scale
    if row.blocks:
        whole = _scaled(MOONCAKE_BLOCK, scale)
        last = _scaled(row.prompt_len - (len(row.blocks) - 1) * MOONCAKE_BLOCK, scale)
        parts = (*(Part((0, block), whole) for block in row.blocks[:-1]), Part((0, row.blocks[-1]), last))
    else:
        parts = (Part((1, index), _scaled(row.prompt_len, scale)),)
    return Shape(parts, _scaled(row.output_len, scale), at=(row.at - start) / replay.speedup)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _fitting_scale(rows: Sequence[TraceRow], longest: int) -> float:
    """Return the scale with which nine of ten requests fit."""
    totals = sorted(row.prompt_len + row.output_len for row in rows)
    return longest / (totals[int(0.9 * (len(totals) - 1))] + 1)


def _moment(text: str) -> float:
    """Parse a time. Azure writes 7 digits of a second; datetime keeps 6."""
    moment = datetime.fromisoformat(text)
    return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def _csv(path: str, kind: str, columns: tuple[str, ...],
         parse: Callable[[Mapping[str, str]], TraceRow | None]) -> list[TraceRow]:
    with _opened(path) as lines:
        reader = csv.DictReader(lines)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise SpilloverError(f"'{path}' is not a trace of {kind}: it has no column {', '.join(missing)}")
        return _rows(path, kind, ",".join(columns), reader, parse)


def _rows(path: str, kind: str, expected: str, lines: Iterable[Line],
          parse: Callable[[Line], TraceRow | None]) -> list[TraceRow]:
    """Read the rows; those without a prompt or an answer are failed requests and are skipped."""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse(line)
        except (ValueError, KeyError, TypeError) as error:
            raise SpilloverError(f"row {number} of '{path}' is not a row of a {kind} trace ({error}); each row "
                                 f"has {expected}") from error
        if row is not None and row.prompt_len > 0 and row.output_len > 0:
            rows.append(row)
    return rows


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Iterator[str]]:
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            yield (line for line in file if line.strip())
    except OSError as error:
        raise SpilloverError(f"cannot read --dataset-path '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpilloverError(f"'{path}' is not a text file; unpack it if it is compressed") from error
