"""What the scheduler and those who draft for it may put into a step."""

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
    max_samples: int | None = None  # rows of a step that are sampled from, those of drafts included; None: any
    drafts_in_kv: bool = False  # the drafter writes into the request's blocks: they are taken before it is asked
