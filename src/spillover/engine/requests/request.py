"""One sequence on its way through the engine. Mutable state; the scheduler is its only writer."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from spillover.engine.output.outputs import NO_DRAFTS, DraftCounts, PositionLogprobs, RequestTimings, TokenSources
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import TokenIds

if TYPE_CHECKING:
    from spillover.engine.structured.structured import Grammar


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # out of the running set; goes back to waiting once its last step has ended
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: InitVar[Sequence[int]]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop_token_ids, empty where they are ignored
    seed: int = 0
    priority: int = 0  # lower is served first
    cache_salt: str | None = None
    parent: Request | None = None  # n > 1: the first of the siblings, whose prompt blocks this one shares
    grammar: Grammar | None = None
    arrived: float = field(default_factory=time.monotonic)

    status: Status = Status.WAITING
    token_ids: TokenIds = field(init=False)  # prompt and known output
    num_prompt: int = field(init=False)
    pending: int = 0  # 1 while the newest token is known only to the device
    num_computed: int = 0  # tokens whose KV is in the cache once every launched step has ended
    in_flight: int = 0  # launched steps that have not ended
    verifying: bool = False  # a launched step verifies a draft: how many tokens it brings is not known yet
    run_id: int = 0  # what steps name it by from its admission on; 0: no step has been told of it
    blocks_sent: int = 0  # entries of its block tables that steps have been told of
    sources: TokenSources | None = None
    num_preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS
    restoring: bool = False  # blocks of its prefix are on their way from other tiers
    computes_all: bool = False  # a restore of it did not end: it computes its prefix
    long: bool = False  # its first blocks wait in host memory, as the device has no room for all
    restore_started: float = 0.0
    restore_ended: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # a sentence for the person, where finish_reason is "error"
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.token_ids = array("i", prompt)
        self.num_prompt = len(self.token_ids)
        self.forget_prompt_logprobs()

    def forget_prompt_logprobs(self) -> None:
        """Set back to what is known before a prefill: nothing of the positions that nobody asked for."""
        self.prompt_logprobs = [None] * (self.first_scored - 1)

    @property
    def first_scored(self) -> int:
        """Return the first prompt position whose log probability is told; 1 or more, as nothing predicts the first."""
        return max(1, min(self.params.prompt_logprobs_start, self.num_prompt))

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt as a list, made when somebody wants to read it."""
        return self.token_ids[:self.num_prompt].tolist()

    @property
    def num_tokens(self) -> int:
        """Return the tokens there are, the one still on the device included."""
        return len(self.token_ids) + self.pending

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt:].tolist()

    @property
    def needs_previous_token(self) -> bool:
        """Return whether its next step can be prepared only once the last one's token is known."""
        return self.params.needs_history

    def cut(self, num_tokens: int) -> None:
        """Forget what was sampled behind these tokens: a stop string ended there, in the middle of a verified draft."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens - self.num_prompt:]
        if self.finish_reason is not None:  # by a token that is no more
            self.finish_reason, self.stop_reason, self.error = "stop", None, None

    @property
    def timings(self) -> RequestTimings:
        restore = max(0.0, min(self.restore_ended, self.first_token) - self.restore_started)
        return RequestTimings(self.arrived, self.scheduled, self.first_token, self.finished, restore)
