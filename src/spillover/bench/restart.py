"""A benchmark of KV that outlives its engine: the same prompts cold, again in the same process, and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spillover.bench.target import SOURCES, BenchRequest, Generates

STAGES = ("cold", "warm", "restart")


@dataclass(frozen=True)
class Stage:
    """One pass over all prompts, one after the other."""

    name: str  # one of STAGES
    elapsed: float  # seconds from each request to its last token, summed; time between requests not counted
    prompt_tokens: int
    output_tokens: int
    first_tokens: tuple[float, ...]
    sources: dict[str, int]
    outputs: tuple[tuple[int, ...], ...]
    ready: float | None = None  # seconds until the engine that ran this stage was open; None if it already was

    @property
    def token_rate(self) -> float:
        """Return the prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.elapsed

    def as_dict(self) -> dict[str, Any]:
        return {"stage": self.name, "mean_ttft_ms": 1e3 * float(np.mean(self.first_tokens)),
                "total_tokens_per_second": self.token_rate, "tokens_by_source": self.sources,
                "ready_seconds": self.ready, "elapsed": self.elapsed, "ttft": list(self.first_tokens)}


@dataclass(frozen=True)
class RestartResult:
    block_size: int
    stages: tuple[Stage, ...]
    blocks: int  # number of blocks found on disk after the restart
    disk_bytes: int  # bytes that the folder occupies on disk

    @property
    def bytes_per_block(self) -> float:
        return self.disk_bytes / self.blocks if self.blocks else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "blocks_on_disk": self.blocks, "bytes_on_disk": self.disk_bytes,
                "bytes_per_block": self.bytes_per_block, "stages": [stage.as_dict() for stage in self.stages]}


def run_stage(name: str, target: Generates, requests: Sequence[BenchRequest], ready: float | None = None) -> Stage:
    completions = [target.generate([request])[0] for request in requests]
    return Stage(
        name=name,
        elapsed=sum(done.first_token + done.decode for done in completions),
        prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        output_tokens=sum(done.output_tokens for done in completions),
        first_tokens=tuple(done.first_token for done in completions),
        sources={source: sum(done.sources.get(source, 0) for done in completions) for source in SOURCES},
        outputs=tuple(done.token_ids for done in completions),
        ready=ready,
    )


def folder_bytes(folder: Path) -> int:
    """Return the bytes a folder occupies on its disk: allocated blocks, not the length of sparse files."""
    return sum(512 * file.stat().st_blocks for file in folder.rglob("*") if file.is_file())
