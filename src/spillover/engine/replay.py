"""Records a run as the steps that its runner was given, and replays them on another runner, without a scheduler.

    with LLM(model) as llm:
        with recorded(llm.engine, llm.config, llm.plan, "run.steps"):
            llm.generate(...)

    python -m spillover.engine.replay run.steps   # in another process: prints one line of JSON per step, its tokens

Steps do not contain KV restored from other tiers: record without tiers, or with --restore never. Blocks of a sequence
longer than the pool are offloaded to the host memory of the process that replays (`HostMemory`).
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

from spillover.engine.assemble import make_backend, make_runner
from spillover.engine.backend import Backend
from spillover.engine.config import EngineConfig
from spillover.engine.loop import Engine, LaunchedStep, ModelRunner, StepRunner
from spillover.engine.planned import PlannedModel, plan_model
from spillover.engine.step import Step, StepItem, StepResult, decode_step, encode_step
from spillover.engine.tiers import make_link
from spillover.errors import SpilloverError
from spillover.memory.spill.host import Slots
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


class HostMemory:
    """The offloaded blocks of a replay, in the slots that its steps name."""

    def __init__(self, planned: PlannedModel, runner: ModelRunner, backend: Backend) -> None:
        """Allocate all slots of the plan, for a runner of this backend."""
        plan = planned.plan
        self._link = make_link(planned.config, plan, planned.model_config, runner.kv.pool, backend)
        self._slots = backend.slots = Slots(self._link.allocate, self._link.slot_bytes, plan.host_blocks)
        while self._slots.acquire() is not None:
            pass
        self._tables: dict[int, list[int]] = {}  # block table of each request in the last step
        self._offloaded: dict[int, int] = {}  # number of offloaded blocks of requests that have some

    def waits(self, step: Step) -> bool:
        """Return whether the step needs blocks moved to host memory, once all steps before it have completed."""
        return any(len(item.host_blocks) > self._offloaded.get(item.id, 0) for item in step.items)

    def offload(self, step: Step) -> None:
        """Copy the blocks that are in host memory from this step on. They still are where the step before had them:
        only later steps overwrite that."""
        for id in step.ended:
            self._tables.pop(id, None)
            self._offloaded.pop(id, None)
        for item in step.items:
            table = self._tables.setdefault(item.id, [])
            self._copy(item, table)
            table[item.first_block :] = item.new_blocks[0]

    def close(self) -> None:
        self._link.close()

    def _copy(self, item: StepItem, table: list[int]) -> None:
        first, end = self._offloaded.get(item.id, 0), len(item.host_blocks)
        if end > first:
            self._link.copy_out(table[first:end], self._slots.views(list(item.host_blocks[first:end])))
            self._offloaded[item.id] = end


def play(runner: StepRunner, steps: Iterable[Step], host: HostMemory | None = None) -> Iterator[StepResult]:
    """Run steps one after the other. Each is launched before the previous one's result is read, unless it was made from
    that result. `host`: the host memory of steps with offloaded blocks."""
    launched: LaunchedStep | None = None
    waiting: set[int] = set()  # requests whose steps were made from the result of their previous step
    for step in steps:
        waiting.update(request.id for request in step.new if request.params.needs_history)
        ended = launched is not None and any(item.id in step.ended for item in launched.step.items)
        late = any(item.draft or item.id in waiting for item in step.items) or (host is not None and host.waits(step))
        if launched is not None and (ended or late):
            yield launched.result()
            launched = None
        if host is not None:
            host.offload(step)
        before, launched = launched, runner.launch(step)
        if before is not None:
            yield before.result()
    if launched is not None:
        yield launched.result()


def _write(log: BinaryIO, frame: bytes) -> None:
    log.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def main(path: str) -> None:
    config, steps = read(path)
    planned = plan_model(config)
    backend = make_backend(planned.config, planned.plan)
    runner = make_runner(planned, backend=backend)
    host = HostMemory(planned, runner, backend) if planned.plan.offloaded_blocks else None
    try:
        for result in play(runner, steps, host):
            print(json.dumps(result.token_ids), flush=True)
    finally:
        runner.close()
        if host is not None:
            host.close()


if __name__ == "__main__":
    main(sys.argv[1])
