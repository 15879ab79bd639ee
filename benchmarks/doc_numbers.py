"""Checks that numbers in README and docs are those in the measurements' JSON files, or writes them.

    python benchmarks/doc_numbers.py --check    # print what differs or has no file; exit code 1 if anything does
    python benchmarks/doc_numbers.py --write    # replace numbers by those of the files (`make tables`)

A number followed by a comment `<!--FILE WHERE FORMAT-->` is checked: FILE is in benchmarks/results, FORMAT is Python's
(`,.0f`), and WHERE is a path such as `results[way=head].tokens_per_second`. In a path

    [KEY=TEXT]              selects elements of a list; KEY may be `setting.backend`, and several may follow each other
    [TEXT]                  an element by its index, or a value whose name has characters besides letters, digits, _, -
    .min .max .sum .median  of a list of numbers, or of the values of several elements; a plain list means its median

and paths and numbers can be divided and multiplied: `runs[0].seconds*1000`, `8192/seconds`, `a.value/b.json:value`.

All rows of a regular table are generated from a comment on the line above it: `<!--rows FILE OF: CELL | CELL-->`. OF is
the path of a list, with one row per element, or `n=8,16,32`, with one row per n. In a CELL `{WHERE FORMAT}` is a
number, its path starting at the element, and `{WHERE}` a word; `{WHERE FORMAT?}` leaves the cell empty if it is absent.

All measurements in tables must be marked: a number with a unit, or a cell that consists of numbers, needs such a
comment outside the first column, or a comment `<!--no file: WHY-->` that says where it is from. The latter applies to a
whole table on the line above it, to a column in its head, to a row in its first cell, or to one cell. Columns headed
"default" or "number" hold settings and need none.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"(?:(?<![\w.])[-+])?(?<![\w.])[0-9][0-9,]*(?:\.[0-9]+)?"
MARKED = re.compile(rf"(?P<number>{NUMBER})<!--(?P<file>[\w.-]+\.json) (?P<where>.+?) (?P<format>[-+,.\dfdeg%]+)-->")
MARKER = re.compile(r"<!--[\w.-]+\.json ")
STEP = re.compile(r"\.?(?P<name>[\w-]+)|\[(?P<key>[\w.-]+)=(?P<text>[^\]]*)\]|\[(?P<item>[^\]]+)\]")
TERM = re.compile(r"(?P<factor>[0-9.]+(?:e[+-]?[0-9]+)?)(?=$|[*/])"
                  r"|(?:(?P<file>[\w.-]+\.json):)?(?P<path>(?:\[[^\]]*\]|[^\[*/])+)")
ROWS = re.compile(r"<!--rows (?P<file>[\w.-]+\.json) (?P<of>.+?): (?P<cells>.+?)-->")
HOLE = re.compile(r"\{(?P<where>[^{}]+?)(?: (?P<format>[-+,.\dfdeg%]+)(?P<maybe>\?)?)?\}")
REDUCED: dict[str, Callable[[list[Any]], Any]] = {"min": min, "max": max, "sum": sum, "median": statistics.median}
EXEMPT = re.compile(r"<!--no file: [^>]+-->")
SETTINGS = ("default", "number")  # heads of columns that hold no measurements
UNITS = r"(?:[mun]?s|%|[GM]i?B)"
RATES = r"(?:tok/s|[GMT]?B/s|[TG]FLOP/s|x)"
MEASURED = re.compile(rf"^{NUMBER} ?{UNITS}(?![\w/-])|{NUMBER} ?{RATES}(?![\w/-])(?! [0-9])")
BARE = re.compile(rf"(?=.*[0-9])(?:{NUMBER}|[ ,;()%/.+-]|to)+")


class Wrong(NamedTuple):
    line: int
    written: str
    found: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.written}, {self.found}"


class Several(list[Any]):
    """The values of several elements of a list; `.sum` or another of `REDUCED` makes one number of them."""


def pages() -> Iterator[Path]:
    """Yield README and the docs."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


@lru_cache
def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def value(data: Any, where: str, results: Path = RESULTS) -> float:
    """Return the number at a path; raise ValueError with a full sentence if there is none."""
    result, at, operator = 1.0, 0, "*"
    while at < len(where):
        term = TERM.match(where, at)
        if term is None:
            raise ValueError(f"'{where}' cannot be read from '{where[at:]}' on")
        seen = data if term["file"] is None else _read(results / term["file"])
        number = float(term["factor"]) if term["factor"] is not None else _at(seen, term["path"])
        result = result * number if operator == "*" else result / number
        operator, at = where[term.end() : term.end() + 1], term.end() + 1
    return result


def _found(data: Any, path: str) -> Any:
    found, at = data, 0
    while at < len(path):
        step = STEP.match(path, at)
        if step is None:
            raise ValueError(f"'{path}' cannot be read from '{path[at:]}' on")
        at = step.end()
        try:
            found = _stepped(found, step)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"there is no one '{step[0]}' for '{path}'") from None
    return found


def _at(data: Any, path: str) -> float:
    found = _found(data, path)
    if _numbers(found) and not isinstance(found, Several):
        found = statistics.median(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"'{path}' is no number")
    return float(found)


def _stepped(found: Any, step: re.Match[str]) -> Any:
    if step["key"] is not None:
        kept = Several(each for each in found if str(_field(each, step["key"])) == step["text"])
        if not kept:
            raise KeyError(step["text"])
        return kept[0] if len(kept) == 1 else kept
    name = step["name"] if step["name"] is not None else step["item"]
    if name in REDUCED and _numbers(found):
        return REDUCED[name](found)
    if isinstance(found, Several):
        return Several(each[name] for each in found)
    return found[int(name)] if isinstance(found, list) else found[name]


def _field(element: Any, key: str) -> Any:
    for name in key.split("."):
        element = (element or {}).get(name)
    return element


def _numbers(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(each, int | float) for each in found)


def checked(text: str, results: Path = RESULTS) -> tuple[str, list[Wrong]]:
    """Return the text with every marked number replaced by that of its file, and the numbers that differed."""
    wrong: list[Wrong] = []

    def as_found(marked: re.Match[str]) -> str:
        line = text.count("\n", 0, marked.start()) + 1
        try:
            data = _read(results / marked["file"])
            found = format(value(data, marked["where"], results), marked["format"])
        except (OSError, ValueError) as error:
            wrong.append(Wrong(line, marked["number"], f"but the file has no such value: {error}"))
            return marked[0]
        if found != marked["number"]:
            wrong.append(Wrong(line, marked["number"], f"but the file has {found}"))
        return marked[0].replace(marked["number"], found, 1)

    made = _with_rows(MARKED.sub(as_found, text), results, wrong)
    for each in MARKER.finditer(text):
        if not any(marked.start() <= each.start() < marked.end() for marked in MARKED.finditer(text)):
            wrong.append(Wrong(text.count("\n", 0, each.start()) + 1, each[0], "no number before it, or no format"))
    return made, wrong


def _with_rows(text: str, results: Path, wrong: list[Wrong]) -> str:
    """Return the text with every table of `ROWS` generated from its file; append the rows that differed to `wrong`."""
    lines = text.split("\n")
    for first, rows in reversed(list(_tables(lines))):
        marked = ROWS.search(lines[first - 1]) if first else None
        if marked is None:
            continue
        try:
            made = [f"| {row} |" for row in _rows(marked, results)]
        except (OSError, ValueError) as error:
            wrong.append(Wrong(first, marked[0], f"but the file has no such value: {error}"))
            continue
        there = lines[first + 2 : first + len(rows)]
        wrong += [Wrong(first + 3 + at, old, f"but the file has {new}")
                  for at, (old, new) in enumerate(zip_longest(there, made, fillvalue="no row")) if old != new]
        lines[first + 2 : first + len(rows)] = made
    return "\n".join(lines)


def _rows(marked: re.Match[str], results: Path) -> Iterator[str]:
    data = _read(results / marked["file"])
    values = re.fullmatch(r"n=([\w.,-]+)", marked["of"])
    elements = [(data, each) for each in values[1].split(",")] if values else \
        [(each, "") for each in _found(data, marked["of"])]
    for element, n in elements:
        cells = marked["cells"].replace("{n}", n).split(" |")
        yield " | ".join(_cell(cell.strip(), element, results) for cell in cells)


def _cell(cell: str, element: Any, results: Path) -> str:
    missing = False

    def filled(hole: re.Match[str]) -> str:
        nonlocal missing
        if hole["format"] is None:
            return str(_found(element, hole["where"]))
        try:
            return format(value(element, hole["where"], results), hole["format"])
        except ValueError:
            if not hole["maybe"]:
                raise
            missing = True
            return ""

    made = HOLE.sub(filled, cell)
    return "" if missing else made


def unmarked(text: str) -> list[Wrong]:
    """Return the cells of tables that hold a measured number without naming a file."""
    found: list[Wrong] = []
    lines = text.splitlines()
    for first, rows in _tables(lines):
        above = [line for line in lines[max(0, first - 2) : first] if line.strip()][-1:]
        if above and (EXEMPT.search(above[0]) or ROWS.search(above[0])):
            continue
        free = {column for column, cell in enumerate(rows[0]) if EXEMPT.search(cell) or cell.strip() in SETTINGS}
        for index, cells in enumerate(rows[2:], first + 3):
            if EXEMPT.search(cells[0]):
                continue
            found += [Wrong(index, cell.strip(), "but no file is named for it")
                      for column, cell in enumerate(cells) if column and column not in free and _measured(cell)]
    return found


def _measured(cell: str) -> bool:
    if EXEMPT.search(cell):
        return False
    left = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "`", MARKED.sub("", cell)).replace("**", "").strip()
    return MEASURED.search(left) is not None or BARE.fullmatch(left) is not None


def _tables(lines: list[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield the tables outside code blocks: the index of the first line, and cells by row."""
    code, table = False, list[str]()
    for index, line in enumerate([*lines, ""]):
        code ^= line.startswith("```")
        if line.startswith("|") and not code:
            table.append(line)
        elif table:
            yield index - len(table), [re.split(r"(?<!\\)\|", row.strip()[1:-1]) for row in table]
            table = []


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write the numbers of the files into the pages.")
@click.option("--check", is_flag=True, help="Print what differs, and exit with 1 if anything does; the default.")
def main(write: bool, check: bool) -> None:
    if write and check:
        raise click.UsageError("--check writes nothing; give it or --write")
    count = 0
    for page in pages():
        text, wrong = checked(page.read_text())
        for each in [*wrong, *unmarked(text)]:
            print(f"{page.relative_to(ROOT)}, {each}")
        if write:
            page.write_text(text)
            wrong = checked(text)[1]  # only errors that --write cannot fix
        count += len(wrong) + len(unmarked(text))
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
