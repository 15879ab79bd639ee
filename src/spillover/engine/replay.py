"""Records a run as the steps that its runner was given, and replays them on another runner, without a scheduler.

    with LLM(model) as llm:
        with recorded(llm.engine, llm.config, llm.plan, "run.steps"):
            llm.generate(...)

    python -m spillover.engine.replay run.steps   # in another process: prints one line of JSON per step, its tokens

Steps do not contain KV restored from other tiers: record without tiers, or with --restore never.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from spillover.engine.assemble import make_runner
from spillover.engine.config import EngineConfig
from spillover.engine.loop import Engine, LaunchedStep, StepRunner
from spillover.engine.planned import plan_model
from spillover.engine.step import Step, StepResult, decode_step, encode_step
from spillover.errors import SpilloverError
from spillover.plan.planner import Plan

_LENGTH_BYTES = 4


@contextmanager
def recorded(engine: Engine, config: EngineConfig, plan: Plan, path: Path | str) -> Iterator[None]:
    """Record all steps that are launched in this context. No request may be running when it is entered."""
    if plan.placement is not None:
        raise SpilloverError("cannot record this run: its weights do not all fit on the device; raise "
                             "--gpu-memory or leave it out")
    runner: Any = engine.runner
    launch, draft = runner.launch, getattr(runner, "draft", None)
    with Path(path).open("wb") as log:
        # Replayed by one rank, however many computed the run: the steps are the same.
        kept = replace(config, num_gpu_blocks_override=plan.num_blocks, gpu_memory=None, tensor_parallel_size=1,
                       enable_expert_parallel=False)
        _write(log, msgspec.json.encode(kept))

        def recording(step: Step) -> LaunchedStep:
            _write(log, encode_step(step))
            launched: LaunchedStep = launch(step)
            return launched

        runner.launch = recording
        if draft is not None:  # steps must contain the draft tokens that they verify
            runner.draft = lambda items, wait=True: draft(items, wait=True)
        try:
            yield
        finally:
            runner.launch = launch
            if draft is not None:
                runner.draft = draft


def read(path: Path | str) -> tuple[EngineConfig, list[Step]]:
    """Return a log's configuration and its steps."""
    content, frames = Path(path).read_bytes(), []
    while content:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        frames.append(content[_LENGTH_BYTES:end])
        content = content[end:]
    return msgspec.json.decode(frames[0], type=EngineConfig), [decode_step(frame) for frame in frames[1:]]


def play(runner: StepRunner, steps: Iterable[Step]) -> Iterator[StepResult]:
    """Run steps one after the other. Each is launched before the previous one's result is read, unless it was made from
    that result."""
    launched: LaunchedStep | None = None
    waiting: set[int] = set()  # requests whose steps were made from the result of their previous step
    for step in steps:
        waiting.update(request.id for request in step.new if request.params.needs_history)
        ended = launched is not None and any(item.id in step.ended for item in launched.step.items)
        if launched is not None and (ended or any(item.draft or item.id in waiting for item in step.items)):
            yield launched.result()
            launched = None
        before, launched = launched, runner.launch(step)
        if before is not None:
            yield before.result()
    if launched is not None:
        yield launched.result()


def _write(log: BinaryIO, frame: bytes) -> None:
    log.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def main(path: str) -> None:
    config, steps = read(path)
    runner = make_runner(plan_model(config))
    try:
        for result in play(runner, steps):
            print(json.dumps(result.token_ids), flush=True)
    finally:
        runner.close()


if __name__ == "__main__":
    main(sys.argv[1])
