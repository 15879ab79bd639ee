"""What passes between the front and the engine process: msgpack messages, one struct each. No behaviour.

Times are seconds of the monotonic clock, which both processes share. A sequence is known by a number that the front
gives out and never reuses, so that whatever clients call their requests, two of them cannot be mistaken.
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
    """The first line on the engine process's standard input; its end of file says that the front has gone."""

    endpoint: str
    config: EngineConfig
    parent: int  # the front's process id
    pulse: int  # file descriptor that the engine's heartbeat is written to


# To the engine


class WireRequest(msgspec.Struct, array_like=True):
    """One sequence, checked by the front."""

    id: int
    prompt: TokenIds
    params: SamplingParams
    stop_ids: list[int]
    seed: int
    priority: int
    cache_salt: str | None
    arrived: float
    parent: int | None  # id of the first of the siblings


class Add(msgspec.Struct, array_like=True, tag="add"):
    """The sequences of one request, the parent first."""

    requests: list[WireRequest]


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """A message: end sequences now; nothing more is heard of them."""

    ids: list[int]
    reason: str = "abort"


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A message answered by a Reply with the same id."""

    id: int
    method: Method
    argument: str = ""  # start_profile: the folder for the trace


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """A message: leave the loop and exit."""


ToEngine = Add | Abort | Call | Stop


# From the engine


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """A sign of life while starting."""

    stage: str
    done: int = 0  # bytes, or pieces
    total: int = 0


class Planned(msgspec.Struct, array_like=True, tag="planned"):
    """The split of memory, before anything is loaded."""

    plan: Plan


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    pid: int
    config: EngineConfig  # as planned: nothing left to choose
    model_path: str
    model_config: ModelConfig
    plan: Plan
    load_seconds: float
    identity: bytes = b""  # what KV depends on besides tokens: the root of block digests


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The last message of an engine that cannot start or go on."""

    message: str
    expected: bool  # True: a sentence for the person; False: a traceback for the log


class Update(msgspec.Struct, array_like=True, gc=False):
    """What is new of one sequence since its last update."""

    id: int
    token_ids: list[int]
    num_preemptions: int = 0  # so far
    logprobs: list[dict[int, Logprob]] | None = None  # parallel to token_ids, where asked for
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # all of them, with the first token
    sources: TokenSources | None = None  # with the first token and the last
    # scheduled, first_token, finished, restore_started, restore_ended (0: not yet, or never); as sources
    times: tuple[float, float, float, float, float] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_reason: int | str | None = None
    drafts: DraftCounts | None = None  # with the last token
    error: str | None = None  # why a request cannot be served; with finish_reason "error"


class TierUse(msgspec.Struct, array_like=True, frozen=True):
    """One tier of memory, in bytes."""

    name: str  # "device" | "host" | "pool" | "disk" | "remote"
    weight_bytes: int
    kv_bytes: int  # all blocks; 0: none, or no limit
    kv_used_bytes: int  # blocks that sequences hold
    kv_cached_bytes: int  # blocks that only the prefix cache holds


class LiveStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine as it stands; counters count from the start of the engine process."""

    time: float = 0.0
    sleeping: bool = False
    num_running: int = 0
    num_waiting: int = 0  # also those whose grammar is being compiled
    # Blocks of the device tier; free + evictable + protected + in_flight == total.
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_evictable: int = 0  # held by the prefix cache alone
    blocks_protected: int = 0  # held by sequences
    blocks_in_flight: int = 0
    block_size: int = 0
    # Counters.
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found, of those looked up
    evictions: int = 0  # blocks
    prompt_tokens: int = 0  # prompt tokens of sequences that have begun
    output_tokens: int = 0
    sources: TokenSources = msgspec.field(default_factory=TokenSources)  # where the prompt tokens came from
    slots_held: int = 0  # token slots in blocks of running sequences, summed over steps ...
    slots_wasted: int = 0  # ... and of those the slots without a token
    # Of weights that are not resident.
    weight_bytes_moved: int = 0  # to the device
    weight_disk_bytes: int = 0  # read from disk for it
    expert_hits: int = 0  # experts that a step asked for: on the device,
    expert_misses: int = 0  # brought there,
    expert_hosted: int = 0  # or computed by the host
    weight_bytes_back: int = 0  # of managed memory, sent back to the host
    weight_faults: int = 0  # its pages that came by being touched, where they are counted
    # Speculation.
    drafts: DraftCounts = NO_DRAFTS
    simulated_drafts: bool = False  # acceptance is made up
    draft_seconds: float = 0.0  # that drafters took
    draft_proposed: int = 0  # tokens that drafters offered, also those that were not verified
    verify_seconds: float = 0.0  # of steps that verified drafts
    # Grammars of structured output.
    grammars_compiled: int = 0
    grammars_reused: int = 0  # requests whose grammar was there already
    grammars_refused: dict[str, int] = {}  # by reason
    grammar_bytes: int = 0  # bytes of compiled grammars that are kept
    tiers: tuple[TierUse, ...] = ()
    kv_tiers: tuple[TierReport, ...] = ()  # below the device, one a name
    link: LinkReport = LinkReport()  # between the device and host memory
    host_pool: dict[str, int] = {}  # bytes of host memory by use
    ranks: RanksReport = ONE
    prefill_token_seconds: float = 0.0  # lately measured; 0: not yet

    @property
    def kv_usage(self) -> float:
        """Return the share of blocks that sequences hold, 0 to 1."""
        return (self.blocks_protected + self.blocks_in_flight) / self.blocks_total if self.blocks_total else 0.0


class Step(msgspec.Struct, array_like=True, tag="step"):
    """All that one step brought; now and then with the engine's state."""

    updates: list[Update]
    stats: LiveStats | None = None


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    id: int
    value: Any = None
    error: str | None = None  # a sentence for the person


FromEngine = Progress | Planned | Ready | Failed | Step | Reply
