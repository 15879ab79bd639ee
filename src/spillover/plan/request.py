"""What a plan is asked for, in bytes and counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spillover.memory.budgets import DiskBudget


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for. None: chosen here."""

    model: str = "The model"  # its name, for sentences
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
    spill_dtype: str = "auto"  # likewise, of blocks that leave the device
    spill: str = "evict"  # when they leave
    host_memory: int | None = None  # bytes
    host_pool: Path | None = None  # socket of a shared pool's owner
    disks: tuple[DiskBudget, ...] = ()
    remote: str | None = None  # URL
    weights: str = "resident"  # or "auto", or a strategy of plan.placement, or "host-experts:N"
    cpu_offload: int = 0  # bytes of weights to keep off the device at least
    paged_tokens: int | None = None
    uvm_oversubscribe: bool = False  # managed memory may be more than the card has free
    draft_tokens: int = 0  # of one request, verified in a step; 0: none
    substitutes: str | None = None  # "int4" | "int8": of layers that stream, copies on the device that draft
    ranks: int = 1  # that hold a part of the model each; this is the plan of one of them
