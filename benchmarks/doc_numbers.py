"""Numbers in README and docs are those of the JSON that the benchmarks gave: check them, or write them anew.

    python benchmarks/doc_numbers.py            # tell those that differ; exit code 1 if any does
    python benchmarks/doc_numbers.py --write    # put what the files say in their place

A number that is followed by a comment `<!--FILE WHERE FORMAT-->` is checked: FILE lies in benchmarks/results, FORMAT is
Python's (`,.0f`), and WHERE is a path such as `results[way=head].tokens_per_second` or `[bytes=8192].value`, where
[KEY=TEXT] chooses the element of a list and a list of numbers counts as its median. `N/WHERE` divides a number by what
is found, `WHERE*N` multiplies it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(?P<number>-?[0-9][0-9,]*(?:\.[0-9]+)?)"
                    r"<!--(?P<file>[\w.-]+\.json) (?P<where>.+?) (?P<format>[,.\dfd]+)-->")
MARKER = re.compile(r"<!--[\w.-]+\.json ")
STEP = re.compile(r"(?P<name>[\w-]+)|\[(?P<key>[\w-]+)=(?P<text>[^\]]*)\]|\[(?P<index>\d+)\]|\.")
WHERE = re.compile(r"(?:(?P<above>[0-9.e+-]+)/)?(?P<path>.+?)(?:\*(?P<factor>[0-9.e+-]+))?$")


class Wrong(NamedTuple):
    line: int
    written: str
    found: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.written}, and the file says {self.found}"


def pages() -> Iterator[Path]:
    """List README and the docs."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def value(data: Any, where: str) -> float:
    """Return the number at a place; ValueError, in a sentence, where there is none."""
    parts = WHERE.match(where)
    assert parts is not None
    found, at = data, 0
    path = parts["path"]
    while at < len(path):
        step = STEP.match(path, at)
        if step is None:
            raise ValueError(f"'{path}' cannot be read from '{path[at:]}' on")
        at = step.end()
        try:
            if step["name"] is not None:
                found = found[step["name"]]
            elif step["index"] is not None:
                found = found[int(step["index"])]
            elif step["key"] is not None:
                (found,) = [each for each in found if str(each.get(step["key"])) == step["text"]]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"there is no one '{step[0]}' for '{path}'") from None
    if isinstance(found, list) and found and all(isinstance(each, int | float) for each in found):
        found = statistics.median(found)
    if not isinstance(found, int | float):
        raise ValueError(f"'{path}' is no number")
    if parts["above"] is not None:
        found = float(parts["above"]) / found
    return float(found) * float(parts["factor"] or 1)


def checked(text: str, results: Path = RESULTS) -> tuple[str, list[Wrong]]:
    """Return the text with every marked number as its file has it, and those that were others."""
    wrong: list[Wrong] = []

    def as_found(marked: re.Match[str]) -> str:
        line = text.count("\n", 0, marked.start()) + 1
        try:
            data = json.loads((results / marked["file"]).read_text())
            found = format(value(data, marked["where"]), marked["format"])
        except (OSError, ValueError) as error:
            wrong.append(Wrong(line, marked["number"], f"nothing: {error}"))
            return marked[0]
        if found != marked["number"]:
            wrong.append(Wrong(line, marked["number"], found))
        return marked[0].replace(marked["number"], found, 1)

    made = MARKED.sub(as_found, text)
    for each in MARKER.finditer(text):
        if not any(marked.start() <= each.start() < marked.end() for marked in MARKED.finditer(text)):
            wrong.append(Wrong(text.count("\n", 0, each.start()) + 1, each[0], "no number before it, or no format"))
    return made, wrong


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write what the files say.")
def main(write: bool) -> None:
    count = 0
    for page in pages():
        text, wrong = checked(page.read_text())
        count += len(wrong)
        for each in wrong:
            print(f"{page.relative_to(ROOT)}, {each}")
        if write and text != page.read_text():
            page.write_text(text)
    sys.exit(1 if count and not write else 0)


if __name__ == "__main__":
    main()
