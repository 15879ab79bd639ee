"""The interface of tasks, and functions that read their data files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spillover.errors import SpilloverError
from spillover.eval.metrics import Metric
from spillover.eval.target import Target


@dataclass(frozen=True)
class Item:
    id: str  # the same in every run over the same file
    ask: Any  # input of the task's `ask`


@dataclass(frozen=True)
class Answer:
    values: Mapping[str, float]  # values that metrics sum up
    detail: Mapping[str, Any] = field(default_factory=dict)  # details for people who read the file


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...  # everything the answers depend on besides the model

    def items(self, target: Target) -> Sequence[Item]: ...

    def ask(self, target: Target, item: Item) -> Answer: ...


@dataclass(frozen=True)
class DataFile:
    path: Path
    content: bytes

    @property
    def settings(self) -> dict[str, str]:
        return {"data": self.path.name, "sha256": hashlib.sha256(self.content).hexdigest()}


def read_data(task: str, folder: Path, given: str | None, names: Sequence[str], expected: str) -> DataFile:
    """Read a task's file: the given one, as a path or in the folder; otherwise the first of `names` in the folder."""
    places = [Path(given), folder / given] if given is not None else [folder / name for name in names]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = " and ".join(dict.fromkeys(str(place) for place in places))
        raise SpilloverError(f"there is no data for {task}: looked for {looked}; it must be {expected} "
                             f"(--data FOLDER, or --task {task}=FILE)")
    try:
        return DataFile(found, found.read_bytes())
    except OSError as error:
        raise SpilloverError(f"cannot read '{found}': {error.strerror or error}") from error


def json_lines(file: DataFile, fields: Sequence[str], expected: str) -> list[dict[str, Any]]:
    """Return the objects of the file, one per line, and check that each has the fields."""
    rows = []
    for number, line in enumerate(text_of(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SpilloverError(f"'{file.path}', line {number}, is not JSON ({error}); the file must be "
                                 f"{expected}") from error
        absent = next((name for name in fields if not isinstance(row, dict) or name not in row), None)
        if absent is not None:
            raise SpilloverError(f"'{file.path}', line {number}, has no '{absent}'; the file must be {expected}")
        rows.append(row)
    if not rows:
        raise SpilloverError(f"'{file.path}' is empty; the file must be {expected}")
    return rows


def text_of(file: DataFile) -> str:
    try:
        return file.content.decode()
    except UnicodeDecodeError as error:
        raise SpilloverError(f"'{file.path}' is not UTF-8 text ({error})") from error
