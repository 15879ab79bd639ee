"""What passes between scheduler and runner: one step's work, and what came of it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from spillover.engine.outputs import PositionLogprobs
from spillover.engine.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """Rows [start, start + count) of the request's tokens run in this step."""

    request: Request
    start: int
    count: int
    samples: bool  # the rows reach the request's last token, so the step draws the next one
    tables: tuple[list[int], ...]  # one block table a layer group; entry i holds positions [i*bs, (i+1)*bs)
    step: int  # index of the output token that this step draws
    pending: bool  # the last row's token id is still on the device, drawn by the step before
    cold: tuple[memoryview, ...] = ()  # host memory of the first blocks, whose table entries are 0; then it runs alone


@dataclass(frozen=True)
class Batch:
    items: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class StepResult:
    """Parallel to the batch's items: the token drawn by each, None where the item draws none."""

    token_ids: list[int | None]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[list[PositionLogprobs] | None]  # for prompt positions start+1 .. start+count
