"""The outputs that callers get, shaped like vLLM's, plus the sources of prompt tokens and the timings of a request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Log probabilities at one position, by token id; the sampled (or prompt) token is first.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class TokenSources:
    """The number of prompt tokens whose KV came from each source; the six add up to the prompt's length."""

    computed: int = 0
    device: int = 0
    host: int = 0
    pool: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def cached(self) -> int:
        return self.device + self.host + self.pool + self.disk + self.remote

    @property
    def total(self) -> int:
        return self.computed + self.cached

    def restored(self, tokens: Mapping[str, int]) -> TokenSources:
        """Return the sources with these numbers of tokens, by tier, counted as loaded instead of computed."""
        return replace(self, computed=self.computed - sum(tokens.values()),
                       **{tier: getattr(self, tier) + count for tier, count in tokens.items()})


@dataclass(frozen=True)
class RequestTimings:
    """Times of a request in monotonic seconds; queue + restore + prefill + decode is its latency."""

    arrived: float
    scheduled: float
    first_token: float
    finished: float
    restore: float = 0.0

    @property
    def queue(self) -> float:
        return self.scheduled - self.arrived

    @property
    def prefill(self) -> float:
        return self.first_token - self.scheduled - self.restore

    @property
    def decode(self) -> float:
        return self.finished - self.first_token


@dataclass(frozen=True)
class DraftCounts:
    """Counts of verified drafts, of one request or of all."""

    drafts: int = 0  # number of drafts verified, one per pass
    tokens: int = 0  # number of draft tokens verified
    accepted: int = 0  # number of draft tokens accepted, as the model sampled them too
    by_position: tuple[int, ...] = ()  # number of draft tokens accepted at each position of drafts

    @property
    def tokens_per_pass(self) -> float:
        """Return the mean number of tokens from a pass with a draft; 0 if there was no draft."""
        return (self.drafts + self.accepted) / self.drafts if self.drafts else 0.0

    @property
    def wasted(self) -> int:
        """Return the number of draft tokens rejected."""
        return self.tokens - self.accepted

    def acceptance(self) -> tuple[float, ...]:
        """Return the share of drafts accepted up to each position, as counted by vLLM."""
        return tuple(count / self.drafts for count in self.by_position)

    def plus(self, drafted: int, accepted: int, drafts: int = 1) -> DraftCounts:
        """Return the counts with more drafts of `drafted` tokens each, of which `accepted` were accepted."""
        before = self.by_position + (0,) * (accepted - len(self.by_position))
        counted = (*[count + drafts for count in before[:accepted]], *before[accepted:])
        return DraftCounts(self.drafts + drafts, self.tokens + drafts * drafted, self.accepted + drafts * accepted,
                           counted)

    def __add__(self, other: DraftCounts) -> DraftCounts:
        pairs = itertools.zip_longest(self.by_position, other.by_position, fillvalue=0)
        return DraftCounts(self.drafts + other.drafts, self.tokens + other.tokens, self.accepted + other.accepted,
                           tuple(one + another for one, another in pairs))


NO_DRAFTS = DraftCounts()


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or string; after an error, its message

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    sources: TokenSources = field(default_factory=TokenSources)
    timings: RequestTimings | None = None
    num_preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS  # summed over all its sequences

    @property
    def num_cached_tokens(self) -> int:
        return self.sources.cached
