"""The messages between the front and the engine process, in msgpack, one struct each. No behaviour.

Times are seconds of the monotonic clock, which both processes share. A sequence is identified by a number that the
front assigns and never reuses, so that two sequences cannot be confused whatever ids the clients use.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from spillover.engine.config import EngineConfig
from spillover.engine.output.outputs import NO_DRAFTS, DraftCounts, Logprob, TokenSources
from spillover.engine.parallel.report import ONE, RanksReport
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import TokenIds
from spillover.memory.spill.report import TierReport
from spillover.memory.transfer.link_queue import LinkReport
from spillover.models.config import ModelConfig
from spillover.plan.planner import Plan

Method = Literal["stats", "reset_prefix_cache", "sleep", "wake_up", "start_profile", "stop_profile"]


class Launch(msgspec.Struct):
    """The first line on the engine process's standard input; its end of file means that the front has gone."""

    endpoint: str
    config: EngineConfig
    parent: int  # process id of the front
    pulse: int  # file descriptor that the engine writes its heartbeat to


# To the engine


class WireRequest(msgspec.Struct, array_like=True):
    """One sequence, already checked by the front."""

    id: int
    prompt: TokenIds
    params: SamplingParams
    stop_ids: list[int]
    seed: int
    priority: int
    cache_salt: str | None
    arrived: float
    parent: int | None  # id of the request's first sequence; None for that one itself


class Add(msgspec.Struct, array_like=True, tag="add"):
    """The sequences of one request, the parent first."""

    requests: list[WireRequest]


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """A message that aborts sequences; no more updates of them are sent."""

    ids: list[int]
    reason: str = "abort"


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A message that is answered by a Reply with the same id."""

    id: int
    method: Method
    argument: str = ""  # for start_profile: the folder for the trace


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """A message to leave the loop and exit."""


ToEngine = Add | Abort | Call | Stop


# From the engine


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """A sign of life during the start."""

    stage: str
    done: int = 0  # number of bytes or pieces
    total: int = 0


class Planned(msgspec.Struct, array_like=True, tag="planned"):
    """The split of memory, sent before anything is loaded."""

    plan: Plan


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    pid: int
    config: EngineConfig  # the configuration as planned, with all choices made
    model_path: str
    model_config: ModelConfig
    plan: Plan
    load_seconds: float
    identity: bytes = b""  # the root of block digests: what KV depends on besides tokens


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The last message of an engine that cannot start or continue."""

    message: str
    expected: bool  # True: message is a sentence for the user; False: a traceback for the log


class Update(msgspec.Struct, array_like=True, gc=False):
    """The changes of one sequence since its last update."""

    id: int
    token_ids: list[int]
    num_preemptions: int = 0  # number of preemptions so far
    logprobs: list[dict[int, Logprob]] | None = None  # parallel to token_ids; None if not requested
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of all prompt tokens, with the first token
    sources: TokenSources | None = None  # sent with the first token and the last
    # scheduled, first_token, finished, restore_started, restore_ended (0: not yet, or never); sent like sources
    times: tuple[float, float, float, float, float] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_reason: int | str | None = None
    drafts: DraftCounts | None = None  # sent with the last token
    error: str | None = None  # why the request cannot be served; with finish_reason "error"


class TierUse(msgspec.Struct, array_like=True, frozen=True):
    """The use of one memory tier, in bytes."""

    name: str  # "device" | "host" | "pool" | "disk" | "remote"
    weight_bytes: int
    kv_bytes: int  # bytes of all blocks; 0 if there are none or no limit is set
    kv_used_bytes: int  # bytes of blocks that sequences hold
    kv_cached_bytes: int  # bytes of blocks that only the prefix cache holds


class LiveStats(msgspec.Struct, array_like=True, frozen=True):
    """The current state of the engine; counters count from the start of the engine process."""

    time: float = 0.0
    sleeping: bool = False
    num_running: int = 0
    num_waiting: int = 0  # includes sequences whose grammar is being compiled
    # KV blocks of the device; free + evictable + protected + in_flight == total.
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_evictable: int = 0  # blocks held only by the prefix cache
    blocks_protected: int = 0  # blocks held by sequences
    blocks_in_flight: int = 0
    block_size: int = 0
    # Counters.
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in the lookups
    evictions: int = 0  # blocks evicted
    prompt_tokens: int = 0  # prompt tokens of sequences that have begun
    output_tokens: int = 0
    sources: TokenSources = msgspec.field(default_factory=TokenSources)  # where the prompt tokens' KV came from
    slots_held: int = 0  # token slots in blocks of running sequences, summed over steps
    slots_wasted: int = 0  # slots of slots_held that have no token
    # Weights that are not resident.
    weight_bytes_moved: int = 0  # bytes copied to the device
    weight_disk_bytes: int = 0  # bytes read from disk for those copies
    expert_hits: int = 0  # experts needed by steps that were on the device
    expert_misses: int = 0  # experts needed by steps that were copied to the device
    expert_hosted: int = 0  # experts needed by steps that the host computed
    weight_bytes_back: int = 0  # bytes of managed memory moved back to the host
    weight_faults: int = 0  # pages of managed memory moved by page faults, where these are counted
    # Speculation.
    drafts: DraftCounts = NO_DRAFTS
    simulated_drafts: bool = False  # True if acceptance is simulated
    draft_seconds: float = 0.0  # seconds that drafters took
    draft_proposed: int = 0  # draft tokens proposed, including those that were not verified
    verify_seconds: float = 0.0  # seconds of steps that verified draft tokens
    branches: int = 0  # branches of drafts that were verified
    branches_accepted: int = 0  # branches that replaced the rest of their draft
    # Grammars of structured output.
    grammars_compiled: int = 0
    grammars_reused: int = 0  # requests whose grammar was compiled already
    grammars_refused: dict[str, int] = {}  # number of refused grammars by reason
    grammar_bytes: int = 0  # bytes of compiled grammars that are kept
    tiers: tuple[TierUse, ...] = ()
    kv_tiers: tuple[TierReport, ...] = ()  # tiers below the device, one report per name
    link: LinkReport = LinkReport()  # the link between the device and host memory
    host_pool: dict[str, int] = {}  # bytes of host memory by use
    ranks: RanksReport = ONE
    prefill_token_seconds: float = 0.0  # recently measured prefill seconds per token; 0 if not measured yet

    @property
    def kv_usage(self) -> float:
        """Return the share of blocks that sequences hold, 0 to 1."""
        return (self.blocks_protected + self.blocks_in_flight) / self.blocks_total if self.blocks_total else 0.0


class Step(msgspec.Struct, array_like=True, tag="step"):
    """The result of one step, at times with the engine's state."""

    updates: list[Update]
    stats: LiveStats | None = None


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    id: int
    value: Any = None
    error: str | None = None  # error message for the user


FromEngine = Progress | Planned | Ready | Failed | Step | Reply
