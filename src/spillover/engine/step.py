"""The messages between scheduler and runner: the work of one step, and its result.

A `Step` is frozen and self-contained: it can be written to a file, sent to another process, and run there without a
scheduler (`encode_step`, `decode_step`). A request's prompt and parameters are sent once, in the first step that runs
it; later steps refer to it by id and contain only what is new. The runner keeps the requests in its own table. Blocks
and slots of host memory are numbers; each process knows where its own are.

One exception: the tokens that the runner's head drafted last may stay on the device (`ON_DEVICE`). When steps are
recorded, the head's drafts are waited for, so that steps contain the tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from spillover.engine.output.outputs import PositionLogprobs
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import TokenIds, from_bytes, to_bytes

ON_DEVICE = -1  # placeholder for a draft token of the head whose value is known only to the device


class Phase(enum.IntEnum):
    PREFILL = 0  # rows of the prompt, or of tokens whose KV was lost; the last row may be sampled from
    DECODE = 1  # one row, the newest token, which is sampled from
    VERIFY = 2  # the newest token and the draft tokens after it, all sampled from; in branches also rows before these


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that runs for the first time, or for the first time since it was preempted."""

    id: int  # number of this admission; never reused
    token_ids: TokenIds  # the prompt, and the output so far
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    masked: bool = False  # structured output: whether its step items have masks


class StepItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows [start, start + count) of a request's tokens, to be computed in this step."""

    id: int
    phase: Phase
    start: int
    count: int
    num_samples: int  # number of rows, at the end, that a token is sampled from
    first_block: int  # index of the first new entry of the block tables; entry i holds positions [i*bs, (i+1)*bs)
    new_blocks: tuple[tuple[int, ...], ...]  # new entries of the block tables, one tuple per layer group
    draft: tuple[int, ...] = ()  # VERIFY: the tokens of the last rows, after the newest token, or ON_DEVICE for all
    mask: bytes = b""  # structured output: one bit per token, set if allowed; 32-bit words, one row per sample
    score_prompt: bool = False  # whether log probabilities of the prompt's tokens are wanted for these rows
    host_blocks: tuple[int, ...] = ()  # host tier's slots of the leading blocks, whose table entries are 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def draft_on_device(self) -> bool:
        return bool(self.draft) and self.draft[0] == ON_DEVICE


class DraftItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request for a draft by the head: up to `count` tokens after a request's newest token, at position `start`."""

    id: int
    start: int
    count: int
    first_block: int  # index in the first layer group's block table of the first entry of `blocks`
    blocks: tuple[int, ...]  # entries of that table, with slots for the draft tokens


class HeadDrafts(NamedTuple):
    """The head's drafts, one for each `DraftItem`."""

    tokens: list[tuple[int, ...]]  # ON_DEVICE if not waited for; () if the last step did not compute position start - 1
    seconds: Callable[[], float] | None = None  # device time of drafting, once a later step has completed; None: done


def scored_positions(item: StepItem, request: NewRequest) -> slice:
    """Return the prompt positions whose tokens an item with `score_prompt` scores; row p - 1 predicts position p."""
    return slice(max(item.start + 1, request.params.prompt_logprobs_start), min(item.end + 1, request.num_prompt))


class Step(msgspec.Struct, frozen=True, array_like=True):
    items: tuple[StepItem, ...]
    new: tuple[NewRequest, ...] = ()
    ended: tuple[int, ...] = ()  # ids that will not run again; removed before `new` is added, which may need the slots

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)

    @property
    def prefill_tokens(self) -> int:
        prefill = Phase.PREFILL  # looked up once: several callers ask at every step
        return sum([item.count for item in self.items if item.phase is prefill])

    @property
    def has_prefill(self) -> bool:
        return self.prefill_tokens > 0

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class StepResult:
    """The result of a step; each list is parallel to the step's items."""

    token_ids: list[tuple[int, ...]]  # sampled tokens; for VERIFY the accepted draft tokens and one more; () for none
    logprobs: list[tuple[PositionLogprobs, ...]]  # log probabilities of these tokens; () if not requested
    prompt_logprobs: list[list[PositionLogprobs] | None]  # of the item's `scored_positions`; None if not requested


def encode_step(step: Step) -> bytes:
    return msgspec.msgpack.encode(step, enc_hook=to_bytes)


def decode_step(message: bytes) -> Step:
    return msgspec.msgpack.decode(message, type=Step, dec_hook=from_bytes)
