"""What passes between scheduler and runner: one step's work, and what came of it.

A `Step` is frozen and self-contained: it can be written down, sent to another process, and run there without a
scheduler (`encode_step`, `decode_step`). A request's prompt and parameters travel once, in the first step that runs it;
afterwards a step names it by its id and says what is new. The runner keeps what it was told in a table of its own.

One thing may stay with the runner: what its head drafted last (`ON_DEVICE`). Who records steps has the head wait, so
that they name the tokens.
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

ON_DEVICE = -1  # a draft token that a head has drafted and only the device knows


class Phase(enum.IntEnum):
    PREFILL = 0  # rows of the prompt, or of tokens whose KV was lost; the last of them may be sampled from
    DECODE = 1  # one row: the newest token, sampled from
    VERIFY = 2  # the newest token and draft tokens behind it, each sampled from


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that runs for the first time, or for the first time since it was preempted."""

    id: int  # number of this admission; never used again
    token_ids: TokenIds  # the prompt, and the output that is known already
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    masked: bool = False  # structured output: its steps carry masks


class StepItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows [start, start + count) of a request's tokens, to be computed in this step."""

    id: int
    phase: Phase
    start: int
    count: int
    num_samples: int  # the last rows, each of which a token is sampled from
    first_block: int  # the block table's entries from this one on are new ...
    new_blocks: tuple[tuple[int, ...], ...]  # ... one tuple per layer group; entry i holds positions [i*bs, (i+1)*bs)
    draft: tuple[int, ...] = ()  # VERIFY: the tokens of the rows behind the first, or ON_DEVICE for all of them
    mask: bytes = b""  # structured output: a bit per token, set where it is allowed; 32-bit words, a row per sample
    score_prompt: bool = False  # log probabilities of the prompt's tokens are wanted for these rows
    host_blocks: tuple[int, ...] = ()  # addresses of the first blocks in host memory, whose table entries are 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def draft_on_device(self) -> bool:
        return bool(self.draft) and self.draft[0] == ON_DEVICE


class DraftItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a head is asked for: up to `count` tokens behind the newest one of a request, at position `start`."""

    id: int
    start: int
    count: int
    first_block: int  # the first layer group's table from this entry on ...
    blocks: tuple[int, ...]  # ... with room for the draft


class HeadDrafts(NamedTuple):
    """What a head has drafted for each `DraftItem`."""

    tokens: list[tuple[int, ...]]  # ON_DEVICE where nobody has waited for them; () for items of nothing computed yet
    seconds: Callable[[], float] | None = None  # that the device took, once a later step has ended; None: it has ended


def scored_positions(item: StepItem, request: NewRequest) -> slice:
    """Return the prompt positions whose tokens an item with `score_prompt` scores; row p - 1 predicts position p."""
    return slice(max(item.start + 1, request.params.prompt_logprobs_start), min(item.end + 1, request.num_prompt))


class Step(msgspec.Struct, frozen=True, array_like=True):
    items: tuple[StepItem, ...]
    new: tuple[NewRequest, ...] = ()
    ended: tuple[int, ...] = ()  # requests that will not run again under this id; told before `new` takes their place

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)

    @property
    def has_prefill(self) -> bool:
        return any(item.phase is Phase.PREFILL for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, parallel to its items."""

    token_ids: list[tuple[int, ...]]  # sampled, after a verify those accepted and one more; () where none are
    logprobs: list[tuple[PositionLogprobs, ...]]  # log probabilities of the tokens; () where none were asked for
    prompt_logprobs: list[list[PositionLogprobs] | None]  # for the item's `scored_positions`


def encode_step(step: Step) -> bytes:
    return msgspec.msgpack.encode(step, enc_hook=to_bytes)


def decode_step(message: bytes) -> Step:
    return msgspec.msgpack.decode(message, type=Step, dec_hook=from_bytes)
