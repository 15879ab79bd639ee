"""HellaSwag by log likelihood: the engine and Hugging Face transformers on the same file must agree.

    python benchmarks/hellaswag.py ../shared/data/eval/hellaswag_val_full.txt.bz2 --tasks 200 --output-json results.json

A task is six lines: context, index of the right ending, four endings. An ending's score is the sum of its tokens' log
probabilities after the context (acc), or that sum a character (acc_norm).
"""

from __future__ import annotations

import argparse
import bz2
import dataclasses
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    context: str
    right: int
    endings: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Which ending has the highest score, by sum and by sum a character."""

    plain: int
    normalised: int


def read_tasks(path: Path, count: int) -> list[Task]:
    lines = bz2.decompress(path.read_bytes()).decode().splitlines()
    tasks = []
    for start in range(0, 6 * count, 6):
        context, right, *endings = lines[start:start + 6]
        tasks.append(Task(context, int(right), tuple(endings)))
    return tasks


def encode(tokenizer: Any, task: Task) -> list[tuple[list[int], int]]:
    """Token ids of context and ending, and how many of them are the context."""
    context = len(tokenizer.encode(task.context))
    return [(tokenizer.encode(f"{task.context} {ending}"), context) for ending in task.endings]


def choose(task: Task, sums: list[float]) -> Choice:
    by_character = [total / len(ending) for total, ending in zip(sums, task.endings, strict=True)]
    return Choice(max(range(4), key=sums.__getitem__), max(range(4), key=by_character.__getitem__))


def score_with_engine(llm: Any, tasks: list[Task]) -> list[Choice]:
    from spillover import SamplingParams

    encoded = [pair for task in tasks for pair in encode(llm.tokenizer, task)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([ids for ids, _ in encoded], params)
    sums = [
        sum(output.prompt_logprobs[position][ids[position]].logprob for position in range(context, len(ids)))
        for output, (ids, context) in zip(outputs, encoded, strict=True)
    ]
    return [choose(task, sums[4 * index:4 * index + 4]) for index, task in enumerate(tasks)]


@torch.no_grad()
def score_with_transformers(model: Any, tokenizer: Any, tasks: list[Task]) -> list[Choice]:
    choices = []
    for task in tasks:
        sums = []
        for ids, context in encode(tokenizer, task):
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
            sums.append(sum(logprobs[position - 1, ids[position]].item() for position in range(context, len(ids))))
        choices.append(choose(task, sums))
    return choices


def accuracy(tasks: list[Task], choices: list[Choice]) -> dict[str, float]:
    return {
        "acc": sum(c.plain == t.right for t, c in zip(tasks, choices, strict=True)) / len(tasks),
        "acc_norm": sum(c.normalised == t.right for t, c in zip(tasks, choices, strict=True)) / len(tasks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from spillover import LLM
    from spillover.bench.provenance import provenance
    from spillover.models.hub.store import resolve
    from spillover.plan.hardware import probe

    tasks = read_tasks(options.data, options.tasks)
    with LLM() as llm:
        start = time.perf_counter()
        ours = score_with_engine(llm, tasks)
        seconds = {"spillover": time.perf_counter() - start}
        tokenizer = llm.tokenizer
    path = resolve(None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    start = time.perf_counter()
    theirs = score_with_transformers(model, tokenizer, tasks)
    seconds["transformers"] = time.perf_counter() - start
    result = {
        "tasks": len(tasks),
        "spillover": accuracy(tasks, ours),
        "transformers": accuracy(tasks, theirs),
        "same_choice": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "seconds": seconds,
        **provenance(dataclasses.asdict(probe())),
        "command": shlex.join(["python", *sys.argv]),
    }
    print(json.dumps(result, indent=2))
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
