"""Chooses which weights to offload when a model does not fit on the device, and how; or names a sufficient budget.

Memory is allocated, in this order, to the workspace of a step, the KV of one longest sequence, rings and stream
buffers, and weights. Then KV grows to 1/KV_SHARE of the budget less the workspace, or to the KV of max_num_seqs longest
sequences if that is less; weights get the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.models.config import ModelConfig
from spillover.plan.fit import CUDA_SHARE, Sizes, describe_available, longest_allowed, size_flag, step_choices
from spillover.plan.hardware import Machine
from spillover.plan.placement import MANAGED, WeightPlan
from spillover.plan.predict import predict
from spillover.plan.rates import Rates
from spillover.plan.request import PlanRequest
from spillover.plan.shapes import ModelShape
from spillover.plan.strategies import Choice, Strategies, largest
from spillover.plan.units import Units
from spillover.units import format_bytes, parse_bytes

LENGTHS = (8192, 4096, 2048)  # default lengths of a longest sequence, tried in this order
KV_SHARE = 16  # KV, unless it is that of one longest sequence, is at most 1/n of the budget less the workspace
# By default, the workspace is at most 1/n of the budget, or little more than the minimum. A step that streams takes
# the same time for any number of tokens, so that a prompt in twice as many steps takes twice as long.
STEP_SHARE = 8
STREAMED_STEP = {"cuda": (256, 16384)}  # (requests, tokens) tried before the steps of a model that fits
RESERVE = 2 << 30  # bytes of host memory that weights leave free; a tenth of the available memory if that is more
AUTO = ("experts", "sequential", "host-experts")
LAST = "demand"  # fallback, which needs the least room and is slower than the others
# Rates for the choice of a strategy if none were measured; printed rates are always measured ones.
TYPICAL = {
    "cpu": Rates("cpu", memory_read=20e9, float32=200e9),
    "cuda": Rates("cuda", memory_read=1e12, float32=30e12, bfloat16=150e12, host_to_device=25e9, kernel_read=23e9,
                  host_read=40e9),
}


@dataclass(frozen=True)
class OffloadProblem:
    """The inputs to the choice of a strategy for a model that does not fit on the device."""

    request: PlanRequest
    config: ModelConfig
    shape: ModelShape
    units: Units
    machine: Machine
    device: str
    native: bool
    rates: Callable[[], Rates | None]  # called only if strategies are compared or shown
    resident_least: int | None = None  # smallest budget with all weights resident; None if that is not allowed
    draft_scratch: int | None = None  # as in Sizes

    @property
    def budget(self) -> int:
        """Return the bytes of the device tier."""
        if self.request.gpu_memory is not None:
            return self.request.gpu_memory
        if self.device == "cuda":
            return int(CUDA_SHARE * self.machine.cuda[0].free)
        # The host is the same RAM: other weights are read from disk, unless host memory or an offload was requested.
        reserved = self.request.host_memory or (self.shape.weight_bytes if self.request.cpu_offload else 0)
        return max(0, self.machine.memory_available - reserved - self._reserve)

    @property
    def host_budget(self) -> int:
        """Return the bytes of host memory for weights."""
        if self.request.host_memory is not None:
            return self.request.host_memory
        free = self.machine.memory_available - self._reserve
        if self.device == "cpu":
            return max(0, free - self.budget)
        return max(0, free if self.machine.pinnable is None else min(free, self.machine.pinnable))

    @property
    def available(self) -> int:
        """Return the largest budget that could be given."""
        if self.device == "cuda":
            return self.machine.cuda[0].free
        return self.machine.memory_available - (self.request.host_memory or 0)

    @property
    def _reserve(self) -> int:
        return max(RESERVE, self.machine.memory_available // 10)

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of everything except the weights."""
        return Sizes(self.request, self.config, self.shape, self.device, self.native,
                     draft_scratch=self.draft_scratch).changed(weight_bytes=0)

    @property
    def strategies(self) -> Strategies:
        return Strategies(self.units, self.device, self.host_budget, self.request.paged_tokens)

    @property
    def alternatives(self) -> list[Choice]:
        """Return the strategies that auto chooses from and errors propose: those that no other one always beats."""
        return [Choice(name) for name in AUTO if self.units.stacks or "experts" not in name]

    def with_budget(self, budget: int) -> OffloadProblem:
        return replace(self, request=replace(self.request, gpu_memory=budget))

    def lengths(self, sizes: Sizes) -> list[int]:
        """Return the lengths of a longest sequence to try, in order of preference."""
        if self.request.max_model_len is not None:
            return [self.request.max_model_len]
        longest = longest_allowed(self.request, sizes)
        blocks = self.request.num_gpu_blocks_override
        if blocks is not None:
            return [max(1, largest(lambda length: sizes.blocks_needed(length) <= blocks, longest))]
        return list(dict.fromkeys(min(longest, length) for length in LENGTHS))

    def kv(self, sizes: Sizes, length: int) -> int:
        blocks = self.request.num_gpu_blocks_override
        return sizes.kv(length) if blocks is None else (blocks + 1) * sizes.block_bytes

    def settings(self) -> Iterator[tuple[Sizes, int]]:
        """Yield the steps and longest sequences to try, in order of preference; the smallest is always included."""
        steps = step_choices(self.request, self.device)
        if self.device in STREAMED_STEP and self.request.max_num_batched_tokens is None:
            steps = (STREAMED_STEP[self.device], *steps)
        for length in self.lengths(self.sizes.changed(steps[-1])):
            for step in steps:
                sizes = self.sizes.changed(step)
                smallest = self.sizes.changed(steps[-1]).workspace(length).total
                most = max(self.budget // STEP_SHARE, smallest + smallest // 4)
                if step is steps[-1] or sizes.workspace(length).total <= most:
                    yield sizes, length


def plan_weights(problem: OffloadProblem) -> tuple[WeightPlan, Sizes]:
    """Return the placement of weights, and the sizes of steps that fit with it. Raises if the budget is too small."""
    choice = _choice(problem)
    if problem.request.paged_tokens is not None and not problem.units.stacks:
        raise PlanError(f"--paged-tokens was given but {problem.request.model} has no experts to page; leave it out")
    if choice is not None:
        _check(problem, choice)
        found = _place(problem, choice)
        if found is None:
            raise PlanError(_refusal(problem, choice))
        _check_card(problem, choice, found[0])
        return found
    placed = [found for found in (_place(problem, one) for one in problem.alternatives) if found is not None]
    if not placed:
        last = _place(problem, Choice(LAST))
        if last is None:
            needs = {one: _need(problem, one) for one in (*problem.alternatives, Choice(LAST))}
            raise PlanError(_refusal(problem, min(needs, key=lambda one: needs[one] or 1 << 62), chosen=False))
        return last
    if len(placed) == 1:
        return placed[0]
    rates = problem.rates() or TYPICAL[problem.device]

    def speed(found: tuple[WeightPlan, Sizes]) -> tuple[float, float]:
        plan, sizes = found
        predicted = predict(plan, problem.units, problem.shape, rates, LENGTHS[-1], sizes.batched_tokens(LENGTHS[-1]))
        return predicted.decode_tokens_per_second, predicted.prefill_tokens_per_second

    return max(placed, key=speed)


def _choice(problem: OffloadProblem) -> Choice | None:
    """Return the requested strategy; None: choose the fastest."""
    if problem.request.cpu_offload:
        return Choice("cpu-offload", problem.request.cpu_offload)
    name, _, count = problem.request.weights.partition(":")
    return None if name == "auto" else Choice(name, int(count or 0))


def _check(problem: OffloadProblem, choice: Choice) -> None:
    units, model = problem.units, problem.request.model
    if choice.name in ("experts", "host-experts") and not units.stacks:
        raise PlanError(f"{choice} was requested but {model} has no experts; use --weights sequential")
    if choice.name == "host-experts" and choice.count > len(units.stacks):
        raise PlanError(f"{choice} was requested but {model} has {len(units.stacks)} layers of experts; lower N to at "
                        f"most {len(units.stacks)}")
    if choice.name in MANAGED and units.substitutes:
        raise PlanError(f"{choice} moves pages instead of layers, and substitutes draft for streamed layers; use "
                        "--weights sequential")
    layers = sum(map(units.moved_bytes, units.layers))
    if choice.name == "cpu-offload" and choice.count > layers:
        raise PlanError(f"{choice} was requested but the layers of {model} are {format_bytes(layers)}; lower it to at "
                        f"most {_gib_below(layers)}")


def _check_card(problem: OffloadProblem, choice: Choice, plan: WeightPlan) -> None:
    """Refuse more managed memory than the card has free, even though only a part of it is on the card at a time."""
    if not plan.managed_bytes or problem.device != "cuda" or problem.request.uvm_oversubscribe:
        return
    other_bytes, free = problem.budget - plan.device_bytes, problem.machine.cuda[0].free
    if plan.managed_bytes + other_bytes > free:
        advice = [*_other_strategy_advice(problem, choice), "give --uvm-oversubscribe to take that risk"]
        raise PlanError(f"{problem.request.model} with {choice} takes {format_bytes(plan.managed_bytes)} of managed "
                        f"memory beside {format_bytes(other_bytes)} of other memory but the card has "
                        f"{format_bytes(free)} free, and more than that can hang the machine; {' or '.join(advice)}")


def _other_strategy_advice(problem: OffloadProblem, choice: Choice) -> list[str]:
    """Return advice to use another strategy that fits without other changes; empty if there is none."""
    others = (other for other in (*problem.alternatives, Choice(LAST)) if other.name != choice.name)
    fitting = next((other for other in others if _place(problem, other) is not None), None)
    return [] if fitting is None else [f"use {fitting}, which fits"]


def _place(problem: OffloadProblem, choice: Choice) -> tuple[WeightPlan, Sizes] | None:
    for sizes, length in problem.settings():
        kv = problem.kv(sizes, length)
        left = problem.budget - sizes.workspace(length).total
        room = left - kv
        least = problem.strategies.place(choice, room)
        if least is None:
            continue
        most = max(kv, min(left // KV_SHARE, sizes.max_num_seqs * kv))
        # Host experts move in whole layers, too much for a little more KV: KV gets the rest that no layer fits in.
        fixed = problem.request.num_gpu_blocks_override is not None or choice.name == "host-experts"
        plan = None if fixed else problem.strategies.place(choice, room - (most - kv))
        chosen = plan or least
        return problem.strategies.with_rows(chosen), sizes.changed(weight_bytes=chosen.device_bytes)
    return None


def _need(problem: OffloadProblem, choice: Choice) -> int | None:
    """Return the smallest budget for a strategy; None if no budget is enough, because of host memory."""
    least = problem.strategies.least(choice)
    if least is None:
        return None
    sizes, length = list(problem.settings())[-1]
    return least + sizes.workspace(length).total + problem.kv(sizes, length)


def _fits_budget(problem: OffloadProblem, choice: Choice, budget: int) -> bool:
    return budget <= problem.available and _place(problem.with_budget(budget), choice) is not None


def _refusal(problem: OffloadProblem, choice: Choice, chosen: bool = True) -> str:
    """Return an error message: needed memory, available memory, advice. `chosen`: the user named the strategy."""
    request = problem.request
    need = _need(problem, choice)
    other_advice = _other_strategy_advice(problem, choice) if chosen else []
    if need is None:
        hosted = (choice.count or len(problem.units.stacks)) * problem.units.layer_record_bytes
        if choice.name in MANAGED:
            hosted = problem.strategies.managed_bytes
        advice = other_advice or (["choose a smaller model"] if hosted > problem.machine.memory_available else
                                  [f"raise --host-memory to at least {size_flag(hosted)}"])
        return (f"{request.model} with {choice} keeps {format_bytes(hosted)} of weights in host memory but "
                f"{format_bytes(problem.host_budget)} of it may be used; {advice[0]}")
    sizes, length = list(problem.settings())[-1]
    workspace, kv = sizes.workspace(length).total, problem.kv(sizes, length)
    if request.gpu_memory is not None:
        against = f"--gpu-memory is {size_flag(problem.budget)}"
    else:
        against = (f"{describe_available(problem.machine, sizes, problem.available)}, of which "
                   f"{format_bytes(problem.budget)} are planned with")
    # If blocks can be offloaded to host memory, a smaller budget may be enough with all weights resident.
    least = min(need, problem.resident_least or need)
    typed = size_flag(least)
    feasible = least <= problem.available if least < need else _fits_budget(problem, choice, parse_bytes(typed))
    advice = [f"raise --gpu-memory to at least {typed}"] if feasible else []
    if request.max_model_len is not None and request.max_model_len > LENGTHS[-1]:
        advice.append("lower --max-model-len")
    return (
        f"{request.model}{f' with {choice}' if chosen else ''}"
        f"{f' and substitutes in {request.substitutes}' if request.substitutes else ''} needs at least "
        f"{format_bytes(need - workspace - kv)} for weights on the device + {format_bytes(workspace)} of workspace + "
        f"{format_bytes(kv)} of KV cache for {length:,} tokens = {format_bytes(need)} but {against}; "
        f"{' or '.join(advice + other_advice) or 'choose a smaller model'}"
    )


def _gib_below(count: int) -> str:
    return f"{int(count / 2**30 * 100) / 100:g}"
