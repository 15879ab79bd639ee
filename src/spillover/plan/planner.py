"""Splits a memory budget between weights, KV blocks and workspace, or raises an error that explains why it cannot.

Nothing is loaded or allocated here: a plan is arithmetic over shapes and the machine's memory; the engine follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.kernels.fields import COMPUTE_TYPES
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.plan.fit import STEPS_IN_FLIGHT as STEPS_IN_FLIGHT
from spillover.plan.fit import (
    Sizes,
    TooFewBlocksError,
    check_flags,
    check_machine,
    fit,
    fixed_blocks,
    least_resident,
    longest_allowed,
    size_flag,
    step_choices,
)
from spillover.plan.hardware import Machine
from spillover.plan.offload import LENGTHS, OffloadProblem, plan_weights
from spillover.plan.placement import WeightPlan
from spillover.plan.predict import predict
from spillover.plan.rates import Rates
from spillover.plan.request import PlanRequest as PlanRequest
from spillover.plan.roofline import Roof, Roofline
from spillover.plan.shapes import ModelShape, kv_layer_bytes, model_shape, scratch_bytes
from spillover.plan.substitutes import SubstitutePlan, check_model, check_streams, substitute_plan
from spillover.plan.tiers import TierPlan, check_host_memory, host_bytes, plan_tiers, slot_stride
from spillover.plan.units import weight_units
from spillover.plan.workspace import Workspace

# Memory of the process that is first touched after planning: code of torch and the native kernels, thread stacks, slack
# of allocators. 12 to 27 MiB were measured on three machines, independent of the model.
RUNTIME_BYTES = 40 << 20


@dataclass(frozen=True)
class Costs:
    """The least time of typical steps on this machine, at measured rates."""

    context: int  # cached tokens of each decoding request
    prefill_tokens: int
    decode_1: Roof
    decode_16: Roof
    prefill: Roof


@dataclass(frozen=True)
class HeadPlan:
    """The device memory of a draft head, in addition to its layer in the KV blocks."""

    name: str
    weight_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Plan:
    model: str
    device: str  # "cpu" | "cuda"
    device_name: str
    dtype: str
    weights: tuple[tuple[str, int], ...]  # bytes by kind
    weight_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int  # number of blocks that requests can use
    kv_bytes: int  # bytes of all blocks and the dummy block
    workspace: Workspace
    workspace_bytes: int
    base_bytes: int  # CPU: resident bytes of the process without a model; CUDA: 0, as they are on the host
    budget_bytes: int | None  # --gpu-memory; None if it was not given
    available_bytes: int  # bytes available on the device when the plan was made
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...]  # window of each layer group
    blocks_per_sequence: int  # blocks of all groups for max_model_len tokens
    kv_cache_dtype: str = "auto"
    spill_dtype: str = "auto"
    slot_bytes: int = 0  # bytes of a block in lower tiers
    tiers: tuple[TierPlan, ...] = ()  # lower tiers, nearest first
    host_bytes: int = 0  # maximum RAM of the lower tiers
    costs: Costs | None = None
    placement: WeightPlan | None = None  # None: every weight is resident
    captured_rows: int = 0  # rows of the largest prefill step captured as a CUDA graph
    draft: Plan | None = None  # plan of the draft model, within the same budget
    substitutes: SubstitutePlan | None = None  # rounded copies of layers, which draft
    head: HeadPlan | None = None  # draft head, within the same budget
    notes: tuple[str, ...] = ()  # one sentence for each given flag that has no effect under this plan

    @property
    def device_weight_bytes(self) -> int:
        """Return the bytes of weights on the device, including copies of non-resident weights and a draft head."""
        head = 0 if self.head is None else self.head.weight_bytes
        if self.placement is not None:
            return self.placement.device_bytes + head
        return self.weight_bytes + (0 if self.substitutes is None else self.substitutes.nbytes) + head

    @property
    def host_weight_bytes(self) -> int:
        return 0 if self.placement is None else self.placement.host_bytes

    @property
    def device_bytes(self) -> int:
        """Return the bytes that count against a --gpu-memory budget."""
        own = self.device_weight_bytes + self.kv_bytes + self.workspace_bytes
        own += 0 if self.head is None else self.head.workspace_bytes
        return own + (0 if self.draft is None else self.draft.device_bytes)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of device memory after loading; on a CPU the process's, including base and host tier."""
        host = self.host_bytes + self.host_weight_bytes if self.device == "cpu" else 0
        return self.device_bytes + self.base_bytes + host

    @property
    def host_blocks(self) -> int:
        """Return the number of blocks of the host tier; 0 without one."""
        return next((tier.blocks or 0 for tier in self.tiers if tier.name == "host"), 0)

    @property
    def offloaded_blocks(self) -> int:
        """Return the number of blocks of a longest sequence that do not fit on the device and are offloaded."""
        return max(0, self.blocks_per_sequence - self.num_blocks)

    def tokens(self, blocks: int) -> int:
        """Return the tokens that n blocks hold, as if no layer freed blocks before its window."""
        return blocks // len(self.windows) * self.block_size

    @property
    def token_capacity(self) -> int:
        return self.tokens(self.num_blocks)

    @property
    def max_concurrency(self) -> float:
        """Return the number of sequences of max_model_len that fit on the device at once."""
        return self.num_blocks / self.blocks_per_sequence


def make_plan(
    request: PlanRequest,
    config: ModelConfig,
    specs: WeightSpecs,
    machine: Machine,
    rates: Rates | None = None,
    measure: Callable[[str], Rates] | None = None,
    substitutes: WeightSpecs | None = None,
) -> Plan:
    """Make a plan. `measure`: measures the device; called only for a model that does not fit, without given rates.
    `substitutes`: specs of the rounded copies of layers, if the request has substitutes."""
    device, dtype = device_and_dtype(request, config, machine)
    from spillover.kernels.native import panel_width  # imported here, as reading a plan does not need torch

    # Without the native kernels, which are for float32 on a CPU, attention needs memory for scores.
    native = device == "cpu" and dtype == "float32" and panel_width() > 0
    kept = kept_on(specs, device, dtype)
    shape = model_shape(config, kept, dtype, request.kv_cache_dtype)
    slot_bytes = _slot_bytes(request, config, shape, dtype)
    check_host_memory(request.host_memory, machine, device, size_flag(request.host_memory or 0),
                      size_flag(machine.memory_available, up=False))
    tiers = plan_tiers(request.host_memory, request.host_pool, request.disks, request.remote, slot_bytes, device)
    copies = None if substitutes is None else kept_on(substitutes, device, dtype)
    units = weight_units(config, kept, dtype, copies)
    check_model(request, units)
    draft_scratch = None if copies is None else scratch_bytes(copies, dtype)
    sizes = Sizes(request, config, shape, device, native, tiers, host_bytes(tiers, slot_bytes, request.spill),
                  draft_scratch)
    if device == "cpu":  # resident layers have substitutes too
        sizes.weight_bytes += sum(units.substitutes.values())
    # On the CPU the device tier and the host tier are the same RAM.
    available = machine.memory_available - sizes.host_bytes if device == "cpu" else machine.cuda[0].free
    check_flags(request, config, sizes)
    check_machine(request, machine, sizes, available)
    resident = _resident(request, sizes, machine, available)
    placement = None
    if resident is None:
        measured = functools.cache(lambda: rates if rates is not None or measure is None else measure(device))
        length = request.max_model_len or min(longest_allowed(request, sizes), LENGTHS[-1])
        problem = OffloadProblem(request, config, shape, units, machine, device, native,
                                 measured, least_resident(request, sizes, length), draft_scratch)
        placement, sizes = plan_weights(problem)
        tiers = plan_tiers(_left_for_kv(request, placement, slot_bytes), request.host_pool, request.disks,
                           request.remote, slot_bytes, device)
        sizes.host_bytes = host_bytes(tiers, slot_bytes, request.spill)
        if device == "cpu":
            available = machine.memory_available - sizes.host_bytes - placement.host_bytes
        max_model_len, num_blocks = _blocks(replace(request, gpu_memory=problem.budget), sizes, machine, available)
    else:
        sizes, max_model_len, num_blocks = resident
    check_streams(request, placement, device)
    space = sizes.workspace(max_model_len, sizes.blocks_needed(max_model_len) > num_blocks)
    plan = Plan(
        model=request.model,
        device=device,
        device_name=machine.cpu if device == "cpu" else machine.cuda[0].name,
        dtype=dtype,
        weights=shape.weights,
        weight_bytes=shape.weight_bytes,
        block_size=request.block_size,
        block_bytes=sizes.block_bytes,
        num_blocks=num_blocks,
        kv_bytes=(num_blocks + 1) * sizes.block_bytes,
        workspace=space,
        workspace_bytes=space.total,
        base_bytes=machine.process_bytes + RUNTIME_BYTES if device == "cpu" else 0,
        budget_bytes=request.gpu_memory,
        available_bytes=available,
        max_model_len=max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.batched_tokens(max_model_len),
        windows=shape.group_windows,
        blocks_per_sequence=sizes.blocks_needed(max_model_len),
        kv_cache_dtype=request.kv_cache_dtype,
        spill_dtype=request.spill_dtype,
        slot_bytes=slot_bytes,
        tiers=tiers,
        host_bytes=sizes.host_bytes,
        placement=None if placement is None or placement.is_resident else placement,
        captured_rows=sizes.captured_rows(max_model_len),
    )
    found = rates if rates is not None or resident is not None else measured()
    plan = replace(plan, substitutes=substitute_plan(request, plan.placement, units, shape, found, max_model_len))
    if rates is not None:
        return with_costs(plan, config, specs, rates)
    return plan if found is None else _with_predicted(plan, config, specs, found)


def device_and_dtype(request: PlanRequest, config: ModelConfig, machine: Machine) -> tuple[str, str]:
    """Return (device, compute type)."""
    device = _device(request, machine)
    return device, _dtype(request, config, device)


def with_costs(plan: Plan, config: ModelConfig, specs: WeightSpecs, rates: Rates) -> Plan:
    """Return the plan with the least time of typical steps at these rates."""
    roofline = Roofline(model_shape(config, specs, plan.dtype, kv_dtype=plan.kv_cache_dtype), rates)
    context, tokens = min(512, plan.max_model_len - 1), min(512, plan.max_model_len, plan.max_num_batched_tokens)
    costs = Costs(
        context=context,
        prefill_tokens=tokens,
        decode_1=roofline.decode(1, context),
        decode_16=roofline.decode(16, context),
        prefill=roofline.prefill(tokens),
    )
    return _with_predicted(replace(plan, costs=costs), config, specs, rates)


def _with_predicted(plan: Plan, config: ModelConfig, specs: WeightSpecs, rates: Rates) -> Plan:
    """Return the plan with the predicted speed if not all weights are on the device."""
    if plan.placement is None:
        return plan
    predicted = predict(plan.placement, weight_units(config, specs, plan.dtype),
                        model_shape(config, specs, plan.dtype, kv_dtype=plan.kv_cache_dtype), rates,
                        plan.max_model_len, plan.max_num_batched_tokens)
    return replace(plan, placement=replace(plan.placement, predicted=predicted))


def _resident(request: PlanRequest, sizes: Sizes, machine: Machine, available: int) -> tuple[Sizes, int, int] | None:
    """Plan with all weights resident: (sizes, max_model_len, blocks). None if some must be, or are to be, offloaded."""
    strategy, _, count = request.weights.partition(":")
    if request.cpu_offload or count:
        return None
    if strategy == "resident":
        return sizes, *_blocks(request, sizes, machine, available)
    # A requested length or number of blocks decides. Without a budget on a CPU there is no separate host memory, so
    # that offloading weights for a longer sequence would move them to disk.
    chosen = request.max_model_len is not None or request.num_gpu_blocks_override is not None
    no_home = sizes.device == "cpu" and request.gpu_memory is None
    shortest = 1 if chosen or no_home else min(LENGTHS[-1], longest_allowed(request, sizes))
    refusal = None
    for steps in step_choices(request, sizes.device):
        smaller = sizes.changed(steps)
        try:
            length, blocks = _blocks(request, smaller, machine, available)
        except TooFewBlocksError as error:
            refusal = error
            continue
        except PlanError:
            continue
        if length >= shortest:
            return smaller, length, blocks
    if refusal is not None:
        raise refusal
    return None


def _blocks(request: PlanRequest, sizes: Sizes, machine: Machine, available: int) -> tuple[int, int]:
    """Return (max_model_len, blocks) that fit next to the weights on the device."""
    if request.num_gpu_blocks_override is not None:
        return fixed_blocks(request, sizes, request.num_gpu_blocks_override, available)
    return fit(request, sizes, machine, available)


def _left_for_kv(request: PlanRequest, placement: WeightPlan, slot_bytes: int) -> int | None:
    """Return the bytes of --host-memory that weights leave for KV; None if they are less than a block."""
    left = (request.host_memory or 0) - placement.host_bytes
    return left if left >= slot_stride(slot_bytes) else None


def _device(request: PlanRequest, machine: Machine) -> str:
    if request.device == "cuda" and not machine.cuda:
        raise PlanError("--device cuda was requested but torch sees no CUDA device; use --device cpu")
    return ("cuda" if machine.cuda else "cpu") if request.device == "auto" else request.device


def _dtype(request: PlanRequest, config: ModelConfig, device: str) -> str:
    if request.dtype != "auto":
        return request.dtype
    return config.dtype if device == "cuda" and config.dtype in COMPUTE_TYPES else "float32"


def _slot_bytes(request: PlanRequest, config: ModelConfig, shape: ModelShape, dtype: str) -> int:
    if request.spill_dtype in ("auto", request.kv_cache_dtype):
        return shape.block_bytes(request.block_size)
    return shape.group_layers * kv_layer_bytes(config, dtype, request.spill_dtype) * request.block_size
