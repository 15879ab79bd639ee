"""IFEval: instructions that a program can check, such as "no commas" or "at least 300 words".

Strict: the answer as it is. Loose: any of eight variants of it may follow an instruction. Each is counted per prompt
(all of its instructions followed) and per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.eval.metrics import Metric
from spillover.eval.target import Target
from spillover.eval.tasks.base import Answer, DataFile, Item, json_lines, read_data
from spillover.eval.tasks.ifeval_checks import CHECKS, follows, looser

FORM = "the hub's JSON lines with key, prompt, instruction_id_list and kwargs"
MAX_TOKENS = 1280  # lm_eval's limit


class IFEval:
    metrics = (
        Metric("prompt_level_strict_acc", "strict"),
        Metric("inst_level_strict_acc", "strict_instructions", "instructions"),
        Metric("prompt_level_loose_acc", "loose"),
        Metric("inst_level_loose_acc", "loose_instructions", "instructions"),
    )

    def __init__(self, name: str, file: DataFile) -> None:
        self.name = name
        self.settings: Mapping[str, Any] = {**file.settings, "max_tokens": MAX_TOKENS}
        self._rows = json_lines(file, ("key", "prompt", "instruction_id_list", "kwargs"), FORM)
        for row in self._rows:
            unknown = next((name for name in row["instruction_id_list"] if name not in CHECKS), None)
            if unknown is not None:
                raise SpilloverError(f"'{file.path}' has an instruction '{unknown}', which is not supported; supported "
                                     f"are {', '.join(CHECKS)}")

    def items(self, target: Target) -> list[Item]:
        return [Item(str(row["key"]), row) for row in self._rows]

    def ask(self, target: Target, item: Item) -> Answer:
        text = target.chat(item.ask["prompt"], MAX_TOKENS)
        strict, loose = judge(text, item.ask)
        return Answer({"strict": float(all(strict)), "loose": float(all(loose)), "strict_instructions": sum(strict),
                       "loose_instructions": sum(loose), "instructions": len(strict)},
                      {"text": text, "strict": strict, "loose": loose})


def judge(text: str, row: Mapping[str, Any]) -> tuple[list[bool], list[bool]]:
    """Return which of a prompt's instructions an answer follows, strictly and loosely."""
    instructions = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    return ([follows(name, arguments, text) for name, arguments in instructions],
            [any(follows(name, arguments, variant) for variant in looser(text)) for name, arguments in instructions])


def ifeval(name: str, folder: Path, given: str | None) -> IFEval:
    return IFEval(name, read_data(name, folder, given, ("ifeval.jsonl",), FORM))
