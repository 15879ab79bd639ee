"""Splits a memory budget between weights, KV blocks and workspace, or says in one sentence why it cannot be done.

Nothing is loaded or allocated here: a plan is arithmetic over shapes and what the machine has; the engine keeps to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.kernels.attention import split_blocks
from spillover.memory.budgets import DiskBudget
from spillover.models.config import ModelConfig
from spillover.models.weights import WeightSpecs
from spillover.plan.hardware import Machine
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roof, Roofline
from spillover.plan.shapes import ITEMSIZE, ModelShape, kv_layer_bytes, model_shape
from spillover.plan.tiers import TierPlan, check_host_memory, host_bytes, plan_tiers
from spillover.plan.workspace import Workspace, staging_bytes, workspace
from spillover.units import format_bytes

CPU_KV_BYTES = 1 << 30  # KV cache of a CPU plan that was given no budget, where memory allows
CUDA_SHARE = 0.9  # of the free memory, for a CUDA plan that was given no budget
MIN_MODEL_LEN = 256  # a shorter context is planned only for who asks for it
PANEL_ROWS = 32  # native kernels pack matrices in panels of up to this many rows
STEPS_IN_FLIGHT = 2  # a step is scheduled while the one before it runs, whose window blocks are not dropped yet


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
    host_memory: int | None = None  # bytes
    disks: tuple[DiskBudget, ...] = ()
    remote: str | None = None  # URL


@dataclass(frozen=True)
class Costs:
    """The least time of typical steps on this machine, by measured rates."""

    context: int  # tokens in the cache of each decoding request
    prefill_tokens: int
    decode_1: Roof
    decode_16: Roof
    prefill: Roof


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
    num_blocks: int  # that requests can use
    kv_bytes: int  # all blocks and the dummy block, which padding points at
    workspace: Workspace
    workspace_bytes: int
    base_bytes: int  # CPU: resident in the process before anything is loaded; CUDA: 0, it lies on the host
    budget_bytes: int | None  # --gpu-memory, if it was given
    available_bytes: int  # on the device when the plan was made
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...]  # one a group of layers
    blocks_per_sequence: int  # of max_model_len tokens, all groups
    kv_cache_dtype: str = "auto"
    spill_dtype: str = "auto"
    slot_bytes: int = 0  # of a block that has left the device
    tiers: tuple[TierPlan, ...] = ()  # below the device, nearest first
    host_bytes: int = 0  # RAM that they take at most
    costs: Costs | None = None

    @property
    def device_bytes(self) -> int:
        """What a --gpu-memory budget is held against."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """Device memory once loaded; on the CPU that is the process, so its base and its host tier count."""
        return self.device_bytes + self.base_bytes + (self.host_bytes if self.device == "cpu" else 0)

    @property
    def host_blocks(self) -> int:
        """Of the host tier; 0 without one."""
        return next((tier.blocks or 0 for tier in self.tiers if tier.name == "host"), 0)

    @property
    def cold_blocks(self) -> int:
        """Of a longest sequence, those that the device has no room for and that wait in host memory."""
        return max(0, self.blocks_per_sequence - self.num_blocks)

    def tokens(self, blocks: int) -> int:
        """That so many blocks hold, if no layer forgot what lies behind its window."""
        return blocks // len(self.windows) * self.block_size

    @property
    def token_capacity(self) -> int:
        return self.tokens(self.num_blocks)

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len that fit on the device at once."""
        return self.num_blocks / self.blocks_per_sequence


def make_plan(
    request: PlanRequest,
    config: ModelConfig,
    specs: WeightSpecs,
    machine: Machine,
    rates: Rates | None = None,
    native: bool = True,
) -> Plan:
    """`native`: whether the CPU kernels serve float32; without them attention needs room for its scores."""
    device = _device(request, machine)
    dtype = _dtype(request, config, device)
    native = native and device == "cpu" and dtype == "float32"
    shape = model_shape(config, specs, dtype, PANEL_ROWS if native else 1, request.kv_cache_dtype)
    slot_bytes = _slot_bytes(request, config, shape, dtype)
    check_host_memory(request.host_memory, machine, device, size_flag(request.host_memory or 0),
                      size_flag(machine.memory_available, up=False))
    tiers = plan_tiers(request.host_memory, request.disks, request.remote, slot_bytes, device)
    sizes = _Sizes(request, config, shape, device, native, tiers, host_bytes(tiers, slot_bytes))
    # On the CPU the device tier and the host tier are the same RAM.
    available = machine.memory_available - sizes.host_bytes if device == "cpu" else machine.cuda[0].free
    _check_flags(request, config, sizes)
    _check_machine(request, machine, sizes, available)
    if request.num_gpu_blocks_override is not None:
        max_model_len, num_blocks = _fixed_blocks(request, sizes, request.num_gpu_blocks_override, available)
    else:
        max_model_len, num_blocks = _fit(request, sizes, machine, available)
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
        base_bytes=machine.process_bytes if device == "cpu" else 0,
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
    )
    return plan if rates is None else with_costs(plan, config, specs, rates)


def with_costs(plan: Plan, config: ModelConfig, specs: WeightSpecs, rates: Rates) -> Plan:
    """The plan, and what its steps cost at least at these rates."""
    roofline = Roofline(model_shape(config, specs, plan.dtype, kv_dtype=plan.kv_cache_dtype), rates)
    context, tokens = min(512, plan.max_model_len - 1), min(512, plan.max_model_len, plan.max_num_batched_tokens)
    costs = Costs(
        context=context,
        prefill_tokens=tokens,
        decode_1=roofline.decode(1, context),
        decode_16=roofline.decode(16, context),
        prefill=roofline.prefill(tokens),
    )
    return replace(plan, costs=costs)


class _Sizes:
    """What a longest sequence of n tokens asks of the device. Everything here grows with n."""

    def __init__(self, request: PlanRequest, config: ModelConfig, shape: ModelShape, device: str, native: bool,
                 tiers: tuple[TierPlan, ...], host_bytes: int) -> None:
        self.request = request
        self.config = config
        self.shape = shape
        self.device = device
        self.native = native
        self.host_bytes = host_bytes
        # Blocks of a sequence that may wait in host memory: attention streams them only where every layer sees all,
        # and only as they lay on the device.
        cold = next((tier.blocks or 0 for tier in tiers if tier.name == "host"), 0)
        as_is = request.spill_dtype == "auto" or request.kv_cache_dtype != "auto"
        self.cold_blocks = cold if shape.group_windows == (None,) and as_is else 0
        self.block_bytes = shape.block_bytes(request.block_size)
        self.max_num_seqs = request.max_num_seqs or (64 if device == "cpu" else 256)

    def batched_tokens(self, length: int) -> int:
        given = self.request.max_num_batched_tokens
        if given is not None:
            return given
        default = 512 if self.device == "cpu" else 8192
        return default if self.request.enable_chunked_prefill else max(default, length)

    def workspace(self, length: int, long: bool = False) -> Workspace:
        """`long`: some of that length's blocks wait in host memory."""
        tokens = self.batched_tokens(length)
        space = workspace(self.config, self.shape.dtype, self.device, self.native, tokens, self.max_num_seqs, length)
        if not long:
            return space
        request = self.request
        return replace(space, staging=staging_bytes(
            self.config, self.shape.dtype, self.device, self.native, tokens, request.block_size,
            request.kv_cache_dtype, request.spill_dtype))

    def least_long_blocks(self, length: int) -> int:
        """Device blocks of a sequence whose others wait in host memory: what moves there at a time, and a step's."""
        size = self.request.block_size
        return split_blocks(size) + math.ceil(self.batched_tokens(length) / size) + 1

    def blocks_needed(self, length: int) -> int:
        """A window group keeps its window and the chunks of the steps in flight, which may begin inside a block."""
        size = self.request.block_size
        chunks = STEPS_IN_FLIGHT * self.batched_tokens(length)
        full = math.ceil(length / size)
        return sum(
            full if window is None else min(full, math.ceil((window + chunks - 2) / size) + 1)
            for window in self.shape.group_windows
        )

    def fixed(self, length: int, long: bool = False) -> int:
        """Bytes of weights and workspace."""
        return self.shape.weight_bytes + self.workspace(length, long).total

    def kv(self, length: int) -> int:
        """Bytes of blocks for one sequence of that length, and of the dummy block."""
        return (self.blocks_needed(length) + 1) * self.block_bytes

    @property
    def beside(self) -> str:
        """What else takes the RAM that a CPU plan is made in, for sentences."""
        host = self.request.host_memory
        return f" beside --host-memory {size_flag(host)}" if self.device == "cpu" and host is not None else ""

    def cure(self, lacking: int) -> str:
        """What helps where `lacking` bytes of the machine are missing."""
        host = self.request.host_memory
        if self.device == "cpu" and host is not None and lacking < host:
            return f"lower --host-memory to at most {size_flag(host - lacking, up=False)}"
        return "choose a smaller model"

    def least(self, length: int) -> int:
        """Bytes to serve one sequence of that length."""
        return self.fixed(length) + self.kv(length)


def _fit(request: PlanRequest, sizes: _Sizes, machine: Machine, available: int) -> tuple[int, int]:
    """(max_model_len, blocks) within the budget: the one given, or the default of the device."""
    longest = _longest_allowed(request, sizes)
    shortest = request.max_model_len or min(longest, MIN_MODEL_LEN)

    def room(length: int, long: bool = False) -> int:
        """Bytes for KV beside what that length takes otherwise."""
        if request.gpu_memory is not None:
            return request.gpu_memory - sizes.fixed(length, long)
        left = available - sizes.fixed(length, long)
        if sizes.device == "cuda":
            return left - int((1 - CUDA_SHARE) * available)
        # A length that was asked for is given more than the default where the machine has it.
        return min(left, max(min(CPU_KV_BYTES, left // 2), sizes.kv(shortest)))

    def blocks(length: int, long: bool = False) -> int:
        return room(length, long) // sizes.block_bytes - 1

    def fits(length: int) -> bool:
        return sizes.blocks_needed(length) <= blocks(length)

    def fits_with_host(length: int) -> bool:
        on_device = blocks(length, long=True)
        return fits(length) or (on_device >= sizes.least_long_blocks(length)
                                and sizes.blocks_needed(length) <= on_device + sizes.cold_blocks)

    # The device's pool alone bounds a length that is chosen here; one that was asked for may reach into host memory.
    length = request.max_model_len or _largest(fits, longest)
    if fits(length) and length >= shortest:
        return length, blocks(length)
    if request.max_model_len is not None and sizes.cold_blocks and fits_with_host(length):
        return length, blocks(length, long=True)
    reach = fits_with_host if sizes.cold_blocks else fits
    raise PlanError(_too_small(request, sizes, machine, available, shortest, _largest(reach, longest),
                               max(0, blocks(shortest))))


def _fixed_blocks(request: PlanRequest, sizes: _Sizes, blocks: int, available: int) -> tuple[int, int]:
    """(max_model_len, blocks) for a count of blocks that was given."""
    longest = _longest_allowed(request, sizes)
    resident = _largest(lambda n: sizes.blocks_needed(n) <= blocks, longest)
    cold = sizes.cold_blocks if blocks >= sizes.least_long_blocks(longest) else 0
    fits = _largest(lambda n: sizes.blocks_needed(n) <= blocks + cold, longest)
    length = request.max_model_len or resident
    if length > fits or fits == 0:
        length = max(length, 1)
        most = f"at most {fits:,} tokens fit: lower --max-model-len or raise" if fits else "raise"
        beside = f" beside {cold:,} in host memory" if cold else ""
        raise PlanError(
            f"--num-gpu-blocks-override {blocks}{beside} is too few for a sequence of {length:,} tokens; "
            f"{most} --num-gpu-blocks-override to at least {sizes.blocks_needed(length) - cold:,}"
        )
    fixed = sizes.fixed(length, length > resident)
    need = fixed + (blocks + 1) * sizes.block_bytes
    if need > available:
        room = (available - fixed) // sizes.block_bytes - 1
        hint = f"lower it to at most {room:,}" if room > 0 else sizes.cure(need - available)
        raise PlanError(
            f"--num-gpu-blocks-override {blocks} makes {format_bytes(need)} with weights and workspace but "
            f"{format_bytes(available)} of device memory is available{sizes.beside}; {hint}"
        )
    return length, blocks


def _longest_allowed(request: PlanRequest, sizes: _Sizes) -> int:
    """A prompt that may not be split must fit into one step."""
    longest = sizes.config.max_position
    if not request.enable_chunked_prefill and request.max_num_batched_tokens is not None:
        longest = min(longest, request.max_num_batched_tokens)
    return longest


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n up to `limit` that fits, where every smaller one fits too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _device(request: PlanRequest, machine: Machine) -> str:
    if request.device == "cuda" and not machine.cuda:
        raise PlanError("--device cuda was asked for but torch sees no CUDA device; use --device cpu")
    return ("cuda" if machine.cuda else "cpu") if request.device == "auto" else request.device


def _dtype(request: PlanRequest, config: ModelConfig, device: str) -> str:
    if request.dtype != "auto":
        return request.dtype
    return config.dtype if device == "cuda" and config.dtype in ITEMSIZE else "float32"


def _check_flags(request: PlanRequest, config: ModelConfig, sizes: _Sizes) -> None:
    length = request.max_model_len
    if length is not None and length > config.max_position:
        raise PlanError(
            f"{request.model} knows {config.max_position:,} positions but --max-model-len is {length:,}; "
            f"lower it to at most {config.max_position}"
        )
    if length is not None and length > _longest_allowed(request, sizes):
        raise PlanError(
            f"--no-enable-chunked-prefill needs a whole prompt in one step but --max-num-batched-tokens "
            f"{request.max_num_batched_tokens} is less than --max-model-len {length}; raise the one or lower the other"
        )


def _check_machine(request: PlanRequest, machine: Machine, sizes: _Sizes, available: int) -> None:
    budget = request.gpu_memory
    if budget is not None and budget > available:
        raise PlanError(
            f"--gpu-memory is {size_flag(budget)} but {_supply(machine, sizes, available)}; "
            f"lower it to at most {size_flag(max(0, available), up=False)}"
        )


def _too_small(
    request: PlanRequest, sizes: _Sizes, machine: Machine, available: int, shortest: int, most: int, room: int
) -> str:
    """Why not even one sequence of `shortest` tokens fits, and what would: `most` tokens, `room` blocks."""
    need = sizes.least(shortest)
    cure = "" if need > available else f"raise --gpu-memory to at least {size_flag(need)}"
    if request.gpu_memory is not None:
        against = f"--gpu-memory is {size_flag(request.gpu_memory)}"
    else:
        against = _supply(machine, sizes, available)
        against += f", of which {CUDA_SHARE:.0%} are planned with" if sizes.device == "cuda" else ""
    if request.max_model_len is not None and most > 0:
        blocks = sizes.blocks_needed(shortest)
        host = f" beside {sizes.cold_blocks:,} in host memory" if sizes.cold_blocks else ""
        return (
            f"--max-model-len {shortest:,} needs {blocks:,} KV blocks ({format_bytes(blocks * sizes.block_bytes)}) and "
            f"{room:,} fit{host}, as {against}; at most {most:,} tokens fit: lower --max-model-len"
            f"{' or ' + cure if cure else ''}"
        )
    return (
        f"{request.model} needs {format_bytes(sizes.shape.weight_bytes)} of weights + "
        f"{format_bytes(sizes.workspace(shortest).total)} of workspace + {format_bytes(sizes.kv(shortest))} of KV "
        f"cache for {shortest:,} tokens = {format_bytes(need)} but {against}; {cure or sizes.cure(need - available)}"
    )


def _supply(machine: Machine, sizes: _Sizes, available: int) -> str:
    if sizes.device == "cuda":
        card = machine.cuda[0]
        return f"{format_bytes(available)} of the {format_bytes(card.total)} on {card.name} are free"
    limit = " allowed by the cgroup" if machine.memory_limit is not None else ""
    return (f"{format_bytes(available)} of the {format_bytes(machine.memory)} of RAM{limit} are available"
            f"{sizes.beside}")


def _slot_bytes(request: PlanRequest, config: ModelConfig, shape: ModelShape, dtype: str) -> int:
    if request.spill_dtype == "auto" or request.kv_cache_dtype != "auto":
        return shape.block_bytes(request.block_size)
    return shape.group_layers * kv_layer_bytes(config, dtype, request.spill_dtype) * request.block_size


def size_flag(count: int, up: bool = True) -> str:
    """A size as one would type it: 960MB, 12.4GB; rounded up for a least and down for a most."""
    unit, name, digits = (10**9, "GB", 1) if count >= 10 * 10**9 else (10**6, "MB", 0)
    scaled = count * 10**digits / unit
    rounded = (math.ceil(scaled) if up else math.floor(scaled)) / 10**digits
    return f"{rounded:.{digits}f}{name}"
