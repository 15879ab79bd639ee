"""Accuracy of an arm's model: `spill eval` on its server, once, before anything is timed.

The baseline is evaluated first: KL divergence and top-1 agreement of all arms are relative to its answers. A server
returns only its 20 likeliest tokens, so that the divergence is a lower bound (docs/eval.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.lab.engines.spillover import spill

KL = "kl_divergence_at_least"
TEXT = "eval-text.txt"  # ships with the experiments, for those that specify no text


@dataclass(frozen=True)
class EvalSpec:
    """The `eval:` section of an experiment."""

    tasks: tuple[str, ...]  # NAME or NAME=FILE, as for spill eval
    data: str = "."
    limit: int | None = None
    window: int = 256

    def to_json(self) -> dict[str, Any]:
        return {"tasks": list(self.tasks), "data": self.data, "limit": self.limit, "window": self.window}

    def command(self, url: str, reference: str, folder: Path) -> list[str]:
        """Return the arguments of spill eval. `reference`: the baseline's URL, used for what `folder` does not have."""
        shipped = resources.files("spillover.lab.seeds").joinpath(TEXT)
        tasks = [f"perplexity={shipped}" if task == "perplexity" else task for task in self.tasks]
        scored = any(task.startswith("perplexity") for task in tasks)
        return ["eval", url, *(part for task in tasks for part in ("--task", task)), "--data", self.data,
                "--window", str(self.window), *(["--limit", str(self.limit)] if self.limit else []),
                *(["--reference", reference, "--reference-dir", str(folder)] if scored else []), "--json"]


# Evaluates one server: (spec, its URL, the baseline's URL, a folder for the baseline's answers) -> value by metric.
Evaluate = Callable[[EvalSpec, str, str, Path], Mapping[str, float]]


def evaluate(spec: EvalSpec, url: str, reference: str, folder: Path) -> dict[str, float]:
    done = subprocess.run([*spill(sys.executable), *spec.command(url, reference, folder)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines()
        raise SpilloverError(f"spill eval failed: {message[-1] if message else f'exit status {done.returncode}'}")
    return {f"{row['task']} {row['metric']}": row["value"] for row in json.loads(done.stdout)["scores"]}
