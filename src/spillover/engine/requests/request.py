"""The state of one sequence in the engine. It is mutable; only the scheduler changes it."""

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
    PREEMPTED = "preempted"  # no longer in the running set; waits again once its last step has completed
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: InitVar[Sequence[int]]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # stop_token_ids, and end-of-sequence tokens unless they are ignored
    seed: int = 0
    priority: int = 0  # lower numbers are scheduled first
    cache_salt: str | None = None
    parent: Request | None = None  # with n > 1, the first sibling, whose prompt blocks this one shares
    grammar: Grammar | None = None
    arrived: float = field(default_factory=time.monotonic)

    status: Status = Status.WAITING
    token_ids: TokenIds = field(init=False)  # prompt and output, as far as the host knows it
    num_prompt: int = field(init=False)
    pending: int = 0  # 1 while the newest token is known only to the device
    num_computed: int = 0  # number of tokens whose KV is in the cache once every launched step has completed
    in_flight: int = 0  # number of launched steps that have not completed
    verifying: bool = False  # whether a launched step verifies a draft, so that its number of tokens is not known yet
    run_id: int = 0  # id of this admission in steps; 0 if no step has included the request since it was admitted
    blocks_sent: int = 0  # number of entries of its block tables that steps have sent to the runner
    sources: TokenSources | None = None
    num_preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS
    restoring: bool = False  # whether blocks of its prefix are being loaded from other tiers
    computes_all: bool = False  # whether it computes its whole prefix because a restore of it failed
    offloaded: bool = False  # whether its oldest blocks are in host memory because it is larger than the pool
    restore_started: float = 0.0
    restore_ended: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # message for the user if finish_reason is "error"
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
        """Reset prompt_logprobs to its state before prefill: None for each position that is not scored."""
        self.prompt_logprobs = [None] * (self.first_scored - 1)

    @property
    def first_scored(self) -> int:
        """Return the first prompt position whose log probability is wanted; at least 1, as nothing predicts token 0."""
        return max(1, min(self.params.prompt_logprobs_start, self.num_prompt))

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt as a list, made at the first use."""
        return self.token_ids[:self.num_prompt].tolist()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, including one that only the device knows."""
        return len(self.token_ids) + self.pending

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt:].tolist()

    @property
    def needs_previous_token(self) -> bool:
        """Return whether its next step can be prepared only once the host knows the previous step's token."""
        return self.params.needs_history

    def cut(self, num_tokens: int) -> None:
        """Drop the tokens sampled after the first `num_tokens`: a stop string ended there, within a verified draft."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens - self.num_prompt:]
        if self.finish_reason is not None:  # it was set by a token that is now dropped
            self.finish_reason, self.stop_reason, self.error = "stop", None, None

    @property
    def timings(self) -> RequestTimings:
        restore = max(0.0, min(self.restore_ended, self.first_token) - self.restore_started)
        return RequestTimings(self.arrived, self.scheduled, self.first_token, self.finished, restore)
