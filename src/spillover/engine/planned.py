"""Makes a plan from flags and a checkpoint's configuration, without reading any weights."""


from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spillover.engine.config import EngineConfig
from spillover.engine.effects import check_policies, flag_notes
from spillover.engine.parallel.rank_plan import (
    check_experts,
    make_shard,
    rank_machine,
    rank_request,
    with_whole_blocks,
)
from spillover.engine.weights.head import PlannedHead, inspect_head
from spillover.engine.weights.substitutes import (
    Substitutes,
    choose_substitutes,
)
from spillover.errors import SpilloverError
from spillover.kernels import native
from spillover.kernels.cuda import coded_linear
from spillover.memory.budgets import parse_disk
from spillover.memory.shared_pool.wire import socket_path
from spillover.models.checkpoint import read_config
from spillover.models.config import ModelConfig
from spillover.models.hub.store import DEFAULT_MODEL, resolve
from spillover.models.quantize.scheme import Scheme
from spillover.models.quantize.view import choose_scheme, quantized_config
from spillover.models.registry import Architecture, read_architecture
from spillover.models.sharding.shard import Cuts, Shard, shard_specs
from spillover.models.weight_specs import WeightSpecs, in_codes
from spillover.plan.drafting import DraftSpecs, plan_with_draft, plan_with_head
from spillover.plan.hardware import Machine, probe
from spillover.plan.measure import quick_rates
from spillover.plan.planner import Plan, PlanRequest, device_and_dtype, make_plan
from spillover.plan.rates import Rates
from spillover.plan.workspace import Workspace
from spillover.progress import COMPILING, PLANNING
from spillover.units import parse_budget

Progress = Callable[[int, int, str], None]  # called with (done, total, stage); total is 0 if unknown
Share = Callable[[ModelConfig, WeightSpecs], tuple[ModelConfig, WeightSpecs]]  # maps a whole model to one rank's part


@dataclass(frozen=True)
class PlannedModel:
    """A model whose configuration has been read and planned for, but whose weights are not loaded."""

    config: EngineConfig
    path: Path
    architecture: Architecture
    model_config: ModelConfig  # configuration of the whole model
    specs: WeightSpecs  # specs of the rank's part of the weights
    plan: Plan
    scheme: Scheme | None = None  # how weights are quantised while they load; None: not at all
    shard: Shard = field(default_factory=Shard)
    cuts: Cuts = field(default_factory=dict)  # the parts of checkpoint tensors that the rank loads
    substitutes: Substitutes | None = None  # rounded copies of layers, used for drafting
    draft: PlannedModel | None = None  # the draft model
    head: PlannedHead | None = None  # the head that drafts from the model's hidden states

    @property
    def in_codes(self) -> bool:
        """Return whether weights stay in the codes of their file."""
        return any(spec.format is not None and spec.format.quant_method == "gguf" for listed in self.specs.values()
                   for spec in listed)


def plan_model(config: EngineConfig, rates: Rates | None = None, progress: Progress | None = None) -> PlannedModel:
    """Plan a model without reading its weights."""
    show = progress or quiet
    native.on_build(lambda done, total: show(done, total, COMPILING))
    show(0, 0, PLANNING)
    check_policies(config)
    path = resolve(config.model)
    return plan_checkpoint(config, path, read_config(path), rates)


def planned_rank(config: EngineConfig, plan: Plan, rank: int) -> PlannedModel:
    """Return the planned part of a rank other than 0, with rank 0's plan. `config`: rank 0's configuration after
    planning."""
    path = resolve(config.model)
    return plan_checkpoint(config, path, read_config(path), rank=rank, given=plan)


def plan_checkpoint(config: EngineConfig, path: Path, hf_config: Mapping[str, Any], rates: Rates | None = None,
                    rank: int = 0, given: Plan | None = None, machine: Machine | None = None,
                    share: Share | None = None) -> PlannedModel:
    """Plan a model whose checkpoint has this configuration, which may differ from the one at `path`. `given`: a plan to
    keep as it is. `machine`: the machine to plan for, if not this one; `share`: maps the model to the rank's part that
    is planned for that machine."""
    arch, model_config = read_architecture(hf_config, path)
    null = config.load_format == "null"
    scheme = None
    if config.quantization is not None and not null:
        scheme = choose_scheme(config.quantization, hf_config, path, arch.weight_specs(model_config))
        hf_config = quantized_config(hf_config, scheme)
        arch, model_config = read_architecture(hf_config, path)
    head = inspect_head(config, model_config)
    if head is not None:
        model_config = replace(model_config, head_layers=1)
    speculation = config.speculation
    rounded = speculation.substitute_dtype if speculation is not None and speculation.method == "substitute" else None
    machine = machine or probe()
    on_card = bool(machine.cuda) and not null and config.device in ("auto", "cuda")
    whole = machine.cuda[0].total if on_card else machine.memory
    request = PlanRequest(
        model=config.model or DEFAULT_MODEL,
        device="cpu" if null else config.device,
        # A GGUF file names no compute type; next to codes of few bits, the precision of float32 is of no use.
        dtype="bfloat16" if on_card and config.dtype == "auto" and hf_config.get("codes") else config.dtype,
        gpu_memory=None if config.gpu_memory is None else parse_budget(str(config.gpu_memory), "--gpu-memory", whole),
        block_size=config.block_size,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        kv_cache_dtype=config.kv_cache_dtype,
        spill_dtype=config.spill_dtype,
        spill=config.spill,
        host_memory=None if config.host_memory is None else parse_budget(str(config.host_memory), "--host-memory",
                                                                         machine.memory),
        host_pool=None if config.host_pool is None else socket_path(config.host_pool),
        disks=tuple(parse_disk(text) for text in config.disk),
        remote=config.remote,
        weights="resident" if null else config.weights,
        cpu_offload=int((config.cpu_offload_gb or 0) * 2**30),
        paged_tokens=config.paged_tokens,
        uvm_oversubscribe=config.uvm_oversubscribe,
        draft_tokens=speculation.num_tokens if speculation is not None else 0,
        substitutes=rounded,
    )
    specs = {} if null else arch.weight_specs(model_config)
    substitutes = None
    if rounded is not None:
        substitutes = choose_substitutes(rounded, config, hf_config, path, specs)
    specs = _kept_in_codes(config, specs, model_config, hf_config, request, machine)
    substitutes = None if substitutes is None else substitutes.with_head(specs)
    if share is not None:
        model_config, specs = share(model_config, specs)
    shard = make_shard(config, model_config, request, machine, rank) if share is None else Shard()
    request, machine = rank_request(request, shard), rank_machine(machine, shard)
    specs, cuts = shard_specs(specs, model_config, shard)
    if given is not None:
        return PlannedModel(config, path, arch, model_config, specs, given, scheme, shard, cuts)
    local = shard.planned(model_config)
    draft = inspect_draft(config, request, machine)

    def plan_model(asked: PlanRequest, found: Machine) -> Plan:
        return make_plan(asked, local, specs, found, rates, measure=functools.cache(quick_rates),
                         substitutes=None if substitutes is None else substitutes.specs)

    if draft is not None:
        plan = plan_with_draft(request, machine, plan_model, DraftSpecs(draft.name, draft.dtype, draft.model_config,
                                                                        draft.specs))
    elif head is not None:
        plan = plan_with_head(request, machine, plan_model, head.for_plan())
        head.check_plan(plan)
    else:
        plan = plan_model(request, machine)
    check_experts(plan, shard)
    plan = with_whole_blocks(plan, request, model_config, shard)
    if plan.device == "cuda" and plan.block_size & (plan.block_size - 1):
        raise SpilloverError(f"--block-size on CUDA is a power of two, such as 16, 32 or 64; got {plan.block_size}")
    if null:  # the planned blocks are counted but never held
        plan = replace(plan, device_name="a null model (no weights, no KV, meaningless output)", kv_bytes=0,
                       workspace=Workspace(0, 0, 0, 0, 0), workspace_bytes=0)
    chosen = replace(config, model=request.model, device=plan.device, dtype=plan.dtype,
                     max_model_len=plan.max_model_len, max_num_seqs=plan.max_num_seqs,
                     max_num_batched_tokens=plan.max_num_batched_tokens)
    plan = replace(plan, notes=flag_notes(config, model_config, plan))
    return PlannedModel(chosen, path, arch, model_config, specs, plan, scheme, shard, cuts, substitutes,
                        None if draft is None or plan.draft is None else _planned_draft(chosen, draft, plan.draft),
                        head)


def _kept_in_codes(config: EngineConfig, specs: WeightSpecs, model_config: ModelConfig, hf_config: Mapping[str, Any],
                   request: PlanRequest, machine: Machine) -> WeightSpecs:
    """Return the specs with weights in the codes of their file, if the device can compute with these codes."""
    if config.load_format == "auto" and config.weight_codes == "keep" and "codes" in hf_config:
        device, dtype = device_and_dtype(request, model_config, machine)
        if _multiplies_codes(machine, device, dtype):
            return in_codes(specs, hf_config["codes"], device)
    return specs


@dataclass(frozen=True)
class _Draft:
    """A draft model that is not planned yet."""

    name: str
    path: Path
    architecture: Architecture
    model_config: ModelConfig
    specs: WeightSpecs
    dtype: str


def inspect_draft(config: EngineConfig, target: PlanRequest, machine: Machine) -> _Draft | None:
    """Read the draft model's configuration; None if there is no draft model."""
    speculation = config.speculation
    if speculation is None or speculation.method != "draft_model" or speculation.model is None:
        return None
    name = speculation.model
    path = None
    try:
        path = resolve(name)
        hf_config = read_config(path)
        arch, model_config = read_architecture(hf_config, path)
    except SpilloverError as error:
        raise type(error)(f"the draft model cannot be used: {error}{_head_hint(path)}") from error
    dtype = "bfloat16" if target.device != "cpu" and machine.cuda and hf_config.get("codes") else "auto"
    specs = _kept_in_codes(config, arch.weight_specs(model_config), model_config, hf_config,
                           replace(target, dtype=dtype), machine)
    return _Draft(name, path, arch, model_config, specs, dtype)


def _head_hint(path: Path | None) -> str:
    """Return a hint for the error message if the checkpoint given as a draft model is a head."""
    found = str(read_config(path).get("architectures")).lower() if path is not None else ""
    return "; it seems to be an EAGLE-3 head: use --speculative-method eagle3" if "eagle3" in found else ""


def _planned_draft(config: EngineConfig, draft: _Draft, plan: Plan) -> PlannedModel:
    own = EngineConfig(
        model=str(draft.path), load_format=config.load_format, weight_codes=config.weight_codes, device=plan.device,
        dtype=plan.dtype, block_size=plan.block_size, max_model_len=plan.max_model_len, max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens, enforce_eager=config.enforce_eager,
        graph_capture=config.graph_capture, fast=config.fast, seed=config.seed)
    return PlannedModel(own, draft.path, draft.architecture, draft.model_config, draft.specs, plan)


def _multiplies_codes(machine: Machine, device: str, dtype: str) -> bool:
    """Return whether the device has kernels for weights in the codes of a file."""
    if device == "cpu":
        return dtype == "float32" and native.multiplies_codes()
    return coded_linear.serves(machine.cuda[0].capability, getattr(torch, dtype))


def quiet(done: int, total: int, stage: str) -> None:
    """Ignore progress."""
