"""The inputs of a plan that the user chooses, in bytes and counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spillover.memory.budgets import DiskBudget


@dataclass(frozen=True)
class PlanRequest:
    """The user's settings for a plan. None: chosen by the planner."""

    model: str = "The model"  # name of the model for messages
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    dtype: str = "auto"  # "auto" | "float32" | "bfloat16" | "float16"
    gpu_memory: int | None = None  # bytes of the device tier: weights, KV cache and workspace
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    kv_cache_dtype: str = "auto"  # "auto" | "fp8" | "int8"
    spill_dtype: str = "auto"  # type of spilled blocks, with the same values and "int4"
    spill: str = "evict"  # when blocks are spilled
    host_memory: int | None = None  # bytes of the host tier
    host_pool: Path | None = None  # socket of a shared pool's owner
    disks: tuple[DiskBudget, ...] = ()
    remote: str | None = None  # URL
    weights: str = "resident"  # "resident", "auto", a strategy of plan.placement, or "host-experts:N"
    cpu_offload: int = 0  # minimum bytes of weights to keep off the device
    paged_tokens: int | None = None
    uvm_oversubscribe: bool = False  # whether managed memory may exceed the card's free memory
    draft_tokens: int = 0  # maximum draft tokens of a request that a step verifies; 0: no drafts
    substitutes: str | None = None  # type of copies of streamed layers that draft: "int4" | "int8"; None: no copies
    ranks: int = 1  # number of ranks that share the model; the plan is that of one rank
