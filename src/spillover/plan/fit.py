"""The maximum sequence length and the number of KV blocks that fit next to the weights, or the reason why none do."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from spillover.errors import PlanError
from spillover.kernels.extents import split_blocks
from spillover.models.config import ModelConfig
from spillover.plan.hardware import Machine
from spillover.plan.request import PlanRequest
from spillover.plan.shapes import ModelShape
from spillover.plan.strategies import largest
from spillover.plan.tiers import TierPlan
from spillover.plan.workspace import (
    CAPTURED_MOVING_ROWS,
    CAPTURED_ROWS,
    RANK_CALL_BYTES,
    Workspace,
    draft_rows,
    max_samples,
    staging_bytes,
    workspace,
)
from spillover.units import format_bytes

CPU_KV_BYTES = 1 << 30  # KV cache of a CPU plan without a given budget, if memory allows
CUDA_SHARE = 0.9  # share of the free memory used by a CUDA plan without a given budget
MIN_MODEL_LEN = 256  # minimum default of max_model_len; shorter ones must be requested
# Default (requests, tokens) of a step: the first for a model that fits, the others if memory is scarce.
STEPS = {"cpu": ((64, 512), (16, 512), (8, 512), (4, 256), (4, 64)),
         "cuda": ((256, 8192), (64, 8192), (64, 4096), (32, 2048), (16, 2048), (16, 512))}
STEPS_IN_FLIGHT = 2  # a step is scheduled while the previous one, whose window blocks are still held, runs


class TooFewBlocksError(PlanError):
    """The given number of blocks is too small for the given length; moving weights does not help."""


class Sizes:
    """The device memory needed for sequences of up to n tokens. All sizes grow with n."""

    def __init__(self, request: PlanRequest, config: ModelConfig, shape: ModelShape, device: str, native: bool,
                 tiers: tuple[TierPlan, ...] = (), host_bytes: int = 0, draft_scratch: int | None = None) -> None:
        """Make the sizes. `draft_scratch`: scratch bytes of products with the substitutes that draft; None: there are
        no substitutes."""
        self.request = request
        self.config = config
        self.shape = shape
        self.device = device
        self.native = native
        self.host_bytes = host_bytes
        self.draft_scratch = draft_scratch
        self.weight_bytes = shape.weight_bytes  # bytes of weights on the device
        self.resident = True  # whether all weights are resident
        # Blocks of a sequence that may be offloaded to host memory: attention can stream them only if every layer has
        # full attention, they are stored as on the device, and there is one rank.
        host_blocks = next((tier.blocks or 0 for tier in tiers if tier.name == "host"), 0)
        as_is = request.spill_dtype in ("auto", request.kv_cache_dtype) and request.ranks == 1
        unit = split_blocks(request.block_size)  # blocks that are offloaded together
        self.offloaded_blocks = host_blocks // unit * unit if shape.group_windows == (None,) and as_is else 0
        self.block_bytes = shape.block_bytes(request.block_size)
        self.steps = STEPS[device][0]  # default (requests, tokens) of a step

    def changed(self, steps: tuple[int, int] | None = None, weight_bytes: int | None = None) -> Sizes:
        """Return a copy with other default steps, or with `weight_bytes` on the device and the other weights moving."""
        other = copy.copy(self)
        other.resident = self.resident and weight_bytes is None
        other.steps = steps or self.steps
        other.weight_bytes = self.weight_bytes if weight_bytes is None else weight_bytes
        return other

    @property
    def max_num_seqs(self) -> int:
        return self.request.max_num_seqs or self.steps[0]

    def batched_tokens(self, length: int) -> int:
        given = self.request.max_num_batched_tokens
        if given is not None:
            return given
        tokens = min(self.steps[1], self.max_num_seqs * length)  # more tokens can never be scheduled at once
        return tokens if self.request.enable_chunked_prefill else max(tokens, length)

    def captured_rows(self, length: int) -> int:
        """Return the rows of the largest prefill step captured as a CUDA graph; 0 if weights are not resident, unless
        drafts are verified."""
        if self.device != "cuda":
            return 0
        tokens = self.batched_tokens(length)
        if self.resident:
            return min(CAPTURED_ROWS, tokens)
        drafted = self.request.draft_tokens
        return min(CAPTURED_MOVING_ROWS, max_samples(self.max_num_seqs, tokens, drafted)) if drafted else 0

    def workspace(self, length: int, long: bool = False) -> Workspace:
        """Return the workspace. `long`: whether some blocks of a sequence of that length are offloaded to the host."""
        tokens = self.batched_tokens(length)
        space = workspace(self.config, self.shape.dtype, self.device, self.native, tokens, self.max_num_seqs, length,
                          self.captured_rows(length),
                          max_samples(self.max_num_seqs, tokens, self.request.draft_tokens))
        ranks = 2 * RANK_CALL_BYTES if self.request.ranks > 1 and self.device == "cuda" else 0
        experts = self.shape.expert_scratch_bytes if self.device == "cpu" else 0
        space = replace(space, kernels=space.kernels + self.shape.scratch_bytes + experts + ranks,
                        drafting=self._drafting(length))
        if not long:
            return space
        request = self.request
        return replace(space, staging=staging_bytes(
            self.config, self.shape.dtype, self.device, self.native, tokens, request.block_size,
            request.kv_cache_dtype, request.spill_dtype))

    def _drafting(self, length: int) -> int:
        """Return the workspace of steps that draft: on a CPU they share that of other steps, plus the excess of their
        scratch; on a GPU they have separate scratch memory and graphs."""
        if self.draft_scratch is None:
            return 0
        if self.device == "cpu":
            return max(0, self.draft_scratch - self.shape.scratch_bytes)
        requests = self.max_num_seqs
        space = workspace(self.config, self.shape.dtype, self.device, True,
                          draft_rows(requests, self.batched_tokens(length)), requests, length)
        return space.total - space.rope + self.draft_scratch

    def least_long_blocks(self, length: int) -> int:
        """Return the minimum device blocks of an offloaded sequence: those that move together, and those of a step."""
        size = self.request.block_size
        return split_blocks(size) + math.ceil(self.batched_tokens(length) / size) + 1

    def blocks_needed(self, length: int) -> int:
        """Return the blocks of a sequence; a window group holds its window and the chunks of steps in flight."""
        size = self.request.block_size
        chunks = STEPS_IN_FLIGHT * self.batched_tokens(length)
        full = math.ceil(length / size)
        return sum(
            full if window is None else min(full, math.ceil((window + chunks - 2) / size) + 1)
            for window in self.shape.group_windows
        )

    def fixed(self, length: int, long: bool = False) -> int:
        """Return the bytes of weights and workspace."""
        return self.weight_bytes + self.workspace(length, long).total

    def kv(self, length: int) -> int:
        """Return the bytes of the blocks of one sequence of that length and of the dummy block."""
        return (self.blocks_needed(length) + 1) * self.block_bytes

    @property
    def beside_note(self) -> str:
        """Return the other use of a CPU plan's RAM, for messages: " beside --host-memory ...", or ""."""
        host = self.request.host_memory
        return f" beside --host-memory {size_flag(host)}" if self.device == "cpu" and host is not None else ""

    def advice(self, lacking: int) -> str:
        """Return advice for a message when the machine lacks `lacking` bytes."""
        host = self.request.host_memory
        if self.device == "cpu" and host is not None and lacking < host:
            return f"lower --host-memory to at most {size_flag(host - lacking, up=False)}"
        return "choose a smaller model"

    def least(self, length: int) -> int:
        """Return the minimum bytes to serve one sequence of that length."""
        return self.fixed(length) + self.kv(length)


def step_choices(request: PlanRequest, device: str) -> tuple[tuple[int, int], ...]:
    """Return the default steps to try, the largest first; only one if both values were given by the user."""
    both_given = request.max_num_seqs is not None and request.max_num_batched_tokens is not None
    return STEPS[device][:1] if both_given else STEPS[device]


def fit(request: PlanRequest, sizes: Sizes, machine: Machine, available: int) -> tuple[int, int]:
    """Return (max_model_len, blocks) within the given budget, or the device's default budget."""
    longest = longest_allowed(request, sizes)
    shortest = request.max_model_len or min(longest, MIN_MODEL_LEN)

    def room(length: int, long: bool = False) -> int:
        """Return the bytes left for KV after everything else that the length needs."""
        if request.gpu_memory is not None:
            return request.gpu_memory - sizes.fixed(length, long)
        left = available - sizes.fixed(length, long)
        if sizes.device == "cuda":
            return left - int((1 - CUDA_SHARE) * available)
        # A given length may take more than the default if the machine has it.
        return min(left, max(min(CPU_KV_BYTES, left // 2), sizes.kv(shortest)))

    def blocks(length: int, long: bool = False) -> int:
        return room(length, long) // sizes.block_bytes - 1

    def fits(length: int) -> bool:
        return sizes.blocks_needed(length) <= blocks(length)

    def fits_with_host(length: int) -> bool:
        on_device = blocks(length, long=True)
        return fits(length) or (on_device >= sizes.least_long_blocks(length)
                                and sizes.blocks_needed(length) <= on_device + sizes.offloaded_blocks)

    # A default length is bounded by the device's pool; for a given length, blocks may be offloaded to host memory.
    length = request.max_model_len or largest(fits, longest)
    if fits(length) and length >= shortest:
        return length, blocks(length)
    if request.max_model_len is not None and sizes.offloaded_blocks and fits_with_host(length):
        return length, blocks(length, long=True)
    reach = fits_with_host if sizes.offloaded_blocks else fits
    raise PlanError(_too_small(request, sizes, machine, available, shortest, largest(reach, longest),
                               max(0, blocks(shortest))))


def least_resident(request: PlanRequest, sizes: Sizes, length: int) -> int | None:
    """Return the smallest budget that serves one sequence of that length with all weights resident; None if the
    request offloads weights, or gives the number of blocks."""
    if request.num_gpu_blocks_override is not None or request.cpu_offload or ":" in request.weights:
        return None
    found = []
    for steps in step_choices(request, sizes.device):
        tried = sizes.changed(steps)
        found.append(tried.least(length))
        if request.max_model_len is not None and tried.offloaded_blocks:
            blocks = max(tried.least_long_blocks(length), tried.blocks_needed(length) - tried.offloaded_blocks)
            found.append(tried.fixed(length, long=True) + (blocks + 1) * tried.block_bytes)
    return min(found)


def fixed_blocks(request: PlanRequest, sizes: Sizes, blocks: int, available: int) -> tuple[int, int]:
    """Return (max_model_len, blocks) for a given number of blocks."""
    longest = longest_allowed(request, sizes)
    resident = largest(lambda n: sizes.blocks_needed(n) <= blocks, longest)
    offloaded = sizes.offloaded_blocks if blocks >= sizes.least_long_blocks(longest) else 0
    fits = largest(lambda n: sizes.blocks_needed(n) <= blocks + offloaded, longest)
    length = request.max_model_len or resident
    if length > fits or fits == 0:
        length = max(length, 1)
        most = f"at most {fits:,} tokens fit: lower --max-model-len or raise" if fits else "raise"
        host_note = f" beside {offloaded:,} in host memory" if offloaded else ""
        raise TooFewBlocksError(
            f"--num-gpu-blocks-override {blocks}{host_note} is too few for a sequence of {length:,} tokens; "
            f"{most} --num-gpu-blocks-override to at least {sizes.blocks_needed(length) - offloaded:,}"
        )
    fixed = sizes.fixed(length, length > resident)
    need = fixed + (blocks + 1) * sizes.block_bytes
    if need > available:
        room = (available - fixed) // sizes.block_bytes - 1
        hint = f"lower it to at most {room:,}" if room > 0 else sizes.advice(need - available)
        raise PlanError(
            f"--num-gpu-blocks-override {blocks} makes {format_bytes(need)} with weights and workspace but "
            f"{format_bytes(available)} of device memory is available{sizes.beside_note}; {hint}"
        )
    return length, blocks


def longest_allowed(request: PlanRequest, sizes: Sizes) -> int:
    """Return the maximum length of sequences, which must fit in one step if chunked prefill is off."""
    longest = sizes.config.max_position
    if not request.enable_chunked_prefill and request.max_num_batched_tokens is not None:
        longest = min(longest, request.max_num_batched_tokens)
    return longest


def check_flags(request: PlanRequest, config: ModelConfig, sizes: Sizes) -> None:
    length = request.max_model_len
    if length is not None and length > config.max_position:
        raise PlanError(
            f"{request.model} supports at most {config.max_position:,} tokens but --max-model-len is {length:,}; "
            f"lower it to at most {config.max_position}"
        )
    if length is not None and length > longest_allowed(request, sizes):
        raise PlanError(
            f"--no-enable-chunked-prefill needs a whole prompt in one step but --max-num-batched-tokens "
            f"{request.max_num_batched_tokens} is less than --max-model-len {length}; raise the one or lower the other"
        )


def check_machine(request: PlanRequest, machine: Machine, sizes: Sizes, available: int) -> None:
    budget = request.gpu_memory
    if budget is not None and budget > available:
        raise PlanError(
            f"--gpu-memory is {size_flag(budget)} but {describe_available(machine, sizes, available)}; "
            f"lower it to at most {size_flag(max(0, available), up=False)}"
        )


def _too_small(
    request: PlanRequest, sizes: Sizes, machine: Machine, available: int, shortest: int, most: int, room: int
) -> str:
    """Return the error for a sequence of `shortest` tokens that does not fit; `most` tokens or `room` blocks do."""
    need = sizes.least(shortest)
    advice = "" if need > available else f"raise --gpu-memory to at least {size_flag(need)}"
    if request.gpu_memory is not None:
        against = f"--gpu-memory is {size_flag(request.gpu_memory)}"
    else:
        against = describe_available(machine, sizes, available)
        against += f", of which {CUDA_SHARE:.0%} are planned with" if sizes.device == "cuda" else ""
    if request.max_model_len is not None and most > 0:
        blocks = sizes.blocks_needed(shortest)
        host = f" beside {sizes.offloaded_blocks:,} in host memory" if sizes.offloaded_blocks else ""
        return (
            f"--max-model-len {shortest:,} needs {blocks:,} KV blocks ({format_bytes(blocks * sizes.block_bytes)}) and "
            f"{room:,} fit{host}, as {against}; at most {most:,} tokens fit: lower --max-model-len"
            f"{' or ' + advice if advice else ''}"
        )
    return (
        f"{request.model} needs {format_bytes(sizes.weight_bytes)} of weights + "
        f"{format_bytes(sizes.workspace(shortest).total)} of workspace + {format_bytes(sizes.kv(shortest))} of KV "
        f"cache for {shortest:,} tokens = {format_bytes(need)} but {against}; "
        f"{advice or sizes.advice(need - available)}"
    )


def describe_available(machine: Machine, sizes: Sizes, available: int) -> str:
    if sizes.device == "cuda":
        card = machine.cuda[0]
        return f"{format_bytes(available)} of the {format_bytes(card.total)} on {card.name} are free"
    limit = " allowed by the cgroup" if machine.memory_limit is not None else ""
    return (f"{format_bytes(available)} of the {format_bytes(machine.memory)} of RAM{limit} are available"
            f"{sizes.beside_note}")


def size_flag(count: int, up: bool = True) -> str:
    """Format a size as a flag's value: 960MiB, 12.4GiB; rounded up for a minimum and down for a maximum. Uses binary
    units, like all other sizes in messages."""
    unit, name, digits = (1 << 30, "GiB", 1) if count >= 10 << 30 else (1 << 20, "MiB", 0)
    if count < unit:
        return f"{count}B"
    scaled = count * 10**digits / unit
    rounded = (math.ceil(scaled) if up else math.floor(scaled)) / 10**digits
    return f"{rounded:.{digits}f}{name}"
