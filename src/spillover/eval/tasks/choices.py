"""Multiple choice by log likelihood: HellaSwag, ARC and MMLU, with the prompts of lm_eval.

A choice's score is the sum of its tokens' log probabilities after the question (acc), or that sum divided by its number
of characters (acc_norm); the highest score wins, the first of equals.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.eval.metrics import Metric
from spillover.eval.target import Prompt, Target, fitted
from spillover.eval.tasks.base import Answer, DataFile, Item, json_lines, read_data

ACC, ACC_NORM = Metric("acc", "acc"), Metric("acc_norm", "acc_norm")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HELLASWAG = ("six lines a task in text, plain or .bz2 (context, index of the right ending, four endings), or the hub's "
             "JSON lines with activity_label, ctx_a, ctx_b, endings and label")
ARC = "the hub's JSON lines with question, choices ({text, label}, a list each) and answerKey"
MMLU = "the hub's JSON lines with question, subject, choices (a list) and answer (its index, or a letter)"


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]
    right: int


class ChoiceTask:
    def __init__(self, name: str, file: DataFile, questions: Sequence[Question], metrics: tuple[Metric, ...]) -> None:
        self.name = name
        self.metrics = metrics
        self.settings: Mapping[str, Any] = file.settings
        self._questions = questions

    def items(self, target: Target) -> list[Item]:
        return [Item(str(index), question) for index, question in enumerate(self._questions)]

    def ask(self, target: Target, item: Item) -> Answer:
        question: Question = item.ask
        prompts = [fitted(target, prompt) for prompt in encode(target.encode, question)]
        sums = [sum(logprobs) for logprobs in target.score(prompts)]
        plain, normalised = choose(question, sums)
        return Answer({"acc": float(plain == question.right), "acc_norm": float(normalised == question.right)},
                      {"choice": plain, "choice_norm": normalised, "right": question.right, "logprobs": sums})


def encode(tokenize: Callable[[str], list[int]], question: Question) -> list[Prompt]:
    """Return the question with each choice after a space, and where the choice begins.

    A choice's tokens are those of the whole text after as many as the question has. Spaces at the question's end count
    to the choice, as tokens begin with one."""
    text = question.text.rstrip()
    start = len(tokenize(text))
    spaces = question.text[len(text):]
    return [Prompt(tokenize(f"{text}{spaces} {choice}"), max(1, start)) for choice in question.choices]


def choose(question: Question, sums: Sequence[float]) -> tuple[int, int]:
    """Return the choice with the highest sum, and the one with the highest sum per character."""
    by_character = [total / max(1, len(choice)) for total, choice in zip(sums, question.choices, strict=True)]
    places = range(len(sums))
    return max(places, key=sums.__getitem__), max(places, key=by_character.__getitem__)


def hellaswag(name: str, folder: Path, given: str | None) -> ChoiceTask:
    file = read_data(name, folder, given, ("hellaswag_val_full.txt.bz2", "hellaswag.jsonl"), HELLASWAG)
    return ChoiceTask(name, file, read_hellaswag(file), (ACC, ACC_NORM))


def read_hellaswag(file: DataFile) -> list[Question]:
    if file.path.suffix == ".jsonl":
        rows = json_lines(file, ("activity_label", "ctx_a", "ctx_b", "endings", "label"), HELLASWAG)
        return [_question(file, lambda row=row: Question(  # type: ignore[misc]
            _cleaned(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
            tuple(_cleaned(ending) for ending in row["endings"]), int(row["label"])), HELLASWAG) for row in rows]
    try:
        content = bz2.decompress(file.content) if file.path.suffix == ".bz2" else file.content
        lines = content.decode().rstrip("\n").split("\n")
    except (OSError, ValueError) as error:
        raise SpilloverError(f"'{file.path}' cannot be read ({error}); the file must be {HELLASWAG}") from error
    tasks = [lines[start:start + 6] for start in range(0, len(lines), 6)]
    return [_question(file, lambda task=task: Question(  # type: ignore[misc]
        task[0], tuple(task[2:6]), int(task[1])), HELLASWAG) for task in tasks]


def arc(name: str, folder: Path, given: str | None) -> ChoiceTask:
    file = read_data(name, folder, given, (f"{name.replace('-', '_')}.jsonl",), ARC)
    rows = json_lines(file, ("question", "choices", "answerKey"), ARC)
    return ChoiceTask(name, file, [_question(file, lambda row=row: Question(  # type: ignore[misc]
        f"Question: {row['question']}\nAnswer:", tuple(row["choices"]["text"]),
        row["choices"]["label"].index(row["answerKey"])), ARC) for row in rows], (ACC, ACC_NORM))


def mmlu(name: str, folder: Path, given: str | None) -> ChoiceTask:
    file = read_data(name, folder, given, ("mmlu.jsonl",), MMLU)
    rows = json_lines(file, ("question", "subject", "choices", "answer"), MMLU)
    return ChoiceTask(name, file, [_question(file, lambda row=row: _mmlu(row), MMLU)  # type: ignore[misc]
                                   for row in rows], (ACC,))


def _mmlu(row: Mapping[str, Any]) -> Question:
    letters, answer = LETTERS[:len(row["choices"])], row["answer"]
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, row["choices"], strict=True))
    return Question("The following are multiple choice questions (with answers) about "
                    f"{row['subject'].replace('_', ' ')}.\n\n{row['question'].strip()}\n{listed}Answer:",
                    tuple(letters), letters.index(answer) if isinstance(answer, str) else int(answer))


def _question(file: DataFile, make: Callable[[], Question], expected: str) -> Question:
    try:
        made = make()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise SpilloverError(f"'{file.path}' has a task that cannot be read ({error}); the file must be "
                             f"{expected}") from error
    if not 0 <= made.right < len(made.choices):
        raise SpilloverError(f"'{file.path}' has a task whose right answer is number {made.right} of "
                             f"{len(made.choices)}; the file must be {expected}")
    return made


def _cleaned(text: str) -> str:
    """Return WikiHow's text without its markup, as lm_eval cleans it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
