"""The limits of a step, for the scheduler and for drafting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_groups: int = 1
    chunked_prefill: bool = True
    static_batching: bool = False
    policy: str = "fcfs"
    watermark: float = 0.01
    max_samples: int | None = None  # maximum sampled rows per step, draft rows included; None: no limit
    drafts_in_kv: bool = False  # the drafter writes to the requests' blocks, which are allocated before it drafts
