"""Every word of the command line (sub-commands, values of options) is in the glossary, or needs no explanation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from spillover.cli.main import main
from spillover.engine.config import ADMISSIONS, POLICIES, WEIGHTS

DOCS = Path(__file__).parents[1] / "docs"
# Words that mean the same everywhere, names of types, and names of other software.
PLAIN = """
    badge cache chat check compare demo export generate latency list ls prune publish report restart run show
    throughput tiers train verify warm
    off on cpu cuda json text linear exponential no-reuse
    float32 float16 bfloat16 fp8_e4m3
    spillover hf llama.cpp openai openai-chat sglang sglang-oai vllm
    """


def rows(name: str) -> list[list[str]]:
    lines = [line for line in (DOCS / name).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def explained() -> set[str]:
    """Return the terms of the glossary, and the words in code of its explanations and of the table of datasets."""
    found = set()
    for term, meaning, *_ in rows("glossary.md") + rows("workloads.md"):
        found |= {re.sub(r" \(.*\)", "", word).lower().replace(" ", "-") for word in term.split(", ")}
        for code in re.findall(r"`([^`]+)`", f"{term} {meaning}"):
            found |= set(re.split(r"[\s,:|]+", code))
    return found


def words(command: click.Command) -> Iterator[str]:
    """Return the command line's words below a command. Of `host+disk` each part is a word."""
    for option in command.params:
        listed = "|" in (option.metavar or "")
        choices = (option.type.choices if isinstance(option.type, click.Choice)
                   else re.findall(r"[a-z][\w.+-]*", option.metavar or "") if listed else [])
        yield from (word for choice in choices for word in choice.split("+"))
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield name
            yield from words(below)


def unexplained(found: Iterable[str]) -> list[str]:
    return sorted(set(found) - explained() - set(PLAIN.split()))


def test_words_of_the_command_line_are_explained() -> None:
    assert unexplained([*words(main), *WEIGHTS, *POLICIES, *ADMISSIONS]) == []


def test_a_word_without_an_entry_is_found() -> None:
    @click.command()
    @click.option("--batching", type=click.Choice(["static", "wavelike"]))
    @click.option("--tiers", metavar="[host|host+tape],...")
    def guess() -> None: ...

    assert unexplained([*words(click.Group("spill", {"guess": guess})), *WEIGHTS, "teleport"]) == [
        "guess", "tape", "teleport", "wavelike"]


def test_plain_words_are_in_use_and_terms_have_one_entry() -> None:
    assert set(PLAIN.split()) - set(words(main)) == set()
    assert [term for term, count in Counter(row[0] for row in rows("glossary.md")).items() if count > 1] == []
