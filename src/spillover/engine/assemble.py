"""From flags to a running engine: find the model, plan the memory, load the weights, put the parts together."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spillover.engine.batch.offloaded_prefix import OffloadStage, spill_codec
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.config import EngineConfig
from spillover.engine.cpu.cpu_runner import CpuRunner
from spillover.engine.effects import check_policies, flag_notes
from spillover.engine.events.publisher import check_addresses, start_events
from spillover.engine.loop import Engine, ModelRunner
from spillover.engine.null_runner import NullRunner, ordinary_tokens
from spillover.engine.parallel.parallel_runner import ParallelRunner
from spillover.engine.parallel.rank_plan import make_shard, rank_machine, rank_request, with_whole_blocks
from spillover.engine.parallel.start import start_ranks
from spillover.engine.scheduler import Scheduler, SchedulerConfig
from spillover.engine.speculation.draft_model import DraftModel
from spillover.engine.speculation.drafter import Drafter, make_drafter
from spillover.engine.speculation.expert_price import ExpertPrice
from spillover.engine.speculation.head_drafter import HeadDrafter
from spillover.engine.speculation.model_speculator import make_speculator
from spillover.engine.speculation.own_blocks import OwnBlocks
from spillover.engine.speculation.runner_drafter import RunnerDrafter, SharedBlocks
from spillover.engine.speculation.speculator import Speculator
from spillover.engine.speculation.vocabulary import DraftVocabulary, draft_vocabulary
from spillover.engine.tiers import make_store, token_log
from spillover.engine.weights.elastic import ElasticMemory, SlotLender
from spillover.engine.weights.head import PlannedHead, load_head, look_at_head
from spillover.engine.weights.load import load
from spillover.engine.weights.substitutes import (
    Parts,
    Substitutes,
    SubstituteWeights,
    choose_substitutes,
    load_substitutes,
)
from spillover.errors import SpilloverError
from spillover.kernels import native
from spillover.kernels.arena import Arena
from spillover.kernels.attention import KV_LAYOUT
from spillover.kernels.cuda import coded_linear
from spillover.kernels.formats.base import Target
from spillover.kernels.kv_quant import head_bytes, slot_layout
from spillover.memory.budgets import parse_disk
from spillover.memory.connector import KVConnector, NullConnector
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.shared_pool.wire import socket_path
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.tiers.token_log import TokenLog
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.cuda_driver import CudaPinner
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.transfers import Transfers
from spillover.models.checkpoint import read_config
from spillover.models.config import ModelConfig
from spillover.models.fingerprint import model_fingerprint
from spillover.models.hub.store import DEFAULT_MODEL, resolve
from spillover.models.layers import KVViews
from spillover.models.quantize.scheme import Scheme
from spillover.models.quantize.view import choose_scheme, quantized_config
from spillover.models.ranks import ONE_RANK, Ranks
from spillover.models.registry import Architecture, read_architecture
from spillover.models.shard import Cuts, Shard, shard_specs
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from spillover.models.weight_specs import WeightSpecs, in_codes, kept_on, prepare_products
from spillover.plan.drafting import DraftSpecs, plan_beside, plan_with_head
from spillover.plan.hardware import Machine, probe, trim_heap
from spillover.plan.measure import quick_rates
from spillover.plan.planner import Plan, PlanRequest, make_plan, where
from spillover.plan.rates import Rates
from spillover.plan.workspace import Workspace
from spillover.progress import CAPTURING, COMPILING, PLANNING, SUBSTITUTES, TOKENIZER, WEIGHTS
from spillover.units import parse_budget

log = logging.getLogger("spillover.engine")

Progress = Callable[[int, int, str], None]  # done, in all, the stage; 0 in all: nobody knows
Share = Callable[[ModelConfig, WeightSpecs], tuple[ModelConfig, WeightSpecs]]  # makes of a model what one rank has


@dataclass(frozen=True)
class PlannedModel:
    """A model that has been looked at but not loaded."""

    config: EngineConfig
    path: Path
    architecture: Architecture
    model_config: ModelConfig  # of the whole model
    specs: WeightSpecs  # of the rank's part
    plan: Plan
    scheme: Scheme | None = None  # that weights are quantised by while they load
    shard: Shard = field(default_factory=Shard)
    cuts: Cuts = field(default_factory=dict)  # where the rank's part lies in the checkpoint
    substitutes: Substitutes | None = None  # copies of layers that draft
    draft: PlannedModel | None = None  # the model that drafts
    head: PlannedHead | None = None  # that drafts from the model's hidden states

    @property
    def in_codes(self) -> bool:
        """Return whether weights stay in the codes of their file."""
        return any(spec.format is not None and spec.format.quant_method == "gguf" for listed in self.specs.values()
                   for spec in listed)


@dataclass(frozen=True)
class Assembly:
    config: EngineConfig  # as planned: nothing left to choose
    path: Path
    model_config: ModelConfig
    specs: WeightSpecs
    plan: Plan
    engine: Engine
    tokenizer: Tokenizer | None


def plan_model(config: EngineConfig, rates: Rates | None = None, progress: Progress | None = None) -> PlannedModel:
    """Plan a model: all that can be known before a weight is read."""
    show = progress or _quiet
    native.on_build(lambda done, total: show(done, total, COMPILING))
    show(0, 0, PLANNING)
    check_policies(config)
    path = resolve(config.model)
    return plan_checkpoint(config, path, read_config(path), rates)


def planned_rank(config: EngineConfig, plan: Plan, rank: int) -> PlannedModel:
    """Return the part of a rank but the first, which has the plan of rank 0. `config`: as rank 0 has it after planning;
    it was given the same."""
    path = resolve(config.model)
    return plan_checkpoint(config, path, read_config(path), rank=rank, given=plan)


def plan_checkpoint(config: EngineConfig, path: Path, hf_config: Mapping[str, Any], rates: Rates | None = None,
                    rank: int = 0, given: Plan | None = None, machine: Machine | None = None,
                    share: Share | None = None) -> PlannedModel:
    """Plan a model whose checkpoint has this configuration, which may be another than the one at `path`. `given`: the
    plan, which is kept as it is. `machine`: another than this one; `share`: makes of the model the rank's part that is
    planned for there."""
    arch, model_config = read_architecture(hf_config, path)
    null = config.load_format == "null"
    scheme = None
    if config.quantization is not None and not null:
        scheme = choose_scheme(config.quantization, hf_config, path, arch.weight_specs(model_config))
        hf_config = quantized_config(hf_config, scheme)
        arch, model_config = read_architecture(hf_config, path)
    head = look_at_head(config, model_config)
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
        # A GGUF file names no type to compute in; beside codes of few bits float32 would be of no use.
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
        host_memory=None if config.host_memory is None else parse_budget(str(config.host_memory), "--host-memory",
                                                                         machine.memory),
        host_pool=None if config.host_pool is None else socket_path(config.host_pool),
        disks=tuple(parse_disk(text) for text in config.disk),
        remote=config.remote,
        weights="resident" if null else config.weights,
        cpu_offload=int((config.cpu_offload_gb or 0) * 2**30),
        paged_tokens=config.paged_tokens,
        draft_tokens=speculation.num_tokens if speculation is not None else 0,
        substitutes=rounded,
    )
    specs = {} if null else arch.weight_specs(model_config)
    substitutes = None
    if rounded is not None:
        substitutes = choose_substitutes(rounded, config, hf_config, path, specs)
    specs = _kept_in_codes(config, specs, model_config, hf_config, request, machine)
    if share is not None:
        model_config, specs = share(model_config, specs)
    shard = make_shard(config, model_config, request, machine, rank) if share is None else Shard()
    request, machine = rank_request(request, shard), rank_machine(machine, shard)
    specs, cuts = shard_specs(specs, model_config, shard)
    if given is not None:
        return PlannedModel(config, path, arch, model_config, specs, given, scheme, shard, cuts)
    local = shard.planned(model_config)
    draft = look_at_draft(config, request, machine)

    def plan_model(asked: PlanRequest, found: Machine) -> Plan:
        return make_plan(asked, local, specs, found, rates, measure=functools.cache(quick_rates),
                         substitutes=None if substitutes is None else substitutes.specs)

    if draft is not None:
        plan = plan_beside(request, machine, plan_model, DraftSpecs(draft.name, draft.dtype, draft.model_config,
                                                                    draft.specs))
    elif head is not None:
        plan = plan_with_head(request, machine, plan_model, head.for_plan())
        head.check_plan(plan)
    else:
        plan = plan_model(request, machine)
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
    """Return the specs with weights in the codes of their file, where the device computes with those."""
    if config.load_format == "auto" and config.weight_codes == "keep" and "codes" in hf_config:
        device, dtype = where(request, model_config, machine)
        if _multiplies_codes(machine, device, dtype):
            return in_codes(specs, hf_config["codes"], device)
    return specs


@dataclass(frozen=True)
class _Draft:
    """A draft model before there is a plan."""

    name: str
    path: Path
    architecture: Architecture
    model_config: ModelConfig
    specs: WeightSpecs
    dtype: str


def look_at_draft(config: EngineConfig, target: PlanRequest, machine: Machine) -> _Draft | None:
    """Find the model that drafts; None: none does."""
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
    """Return what to do where the checkpoint of a draft model is a head."""
    found = str(read_config(path).get("architectures")).lower() if path is not None else ""
    return "; it seems to be a head, for which there is the method eagle3" if "eagle3" in found else ""


def _planned_draft(config: EngineConfig, draft: _Draft, plan: Plan) -> PlannedModel:
    own = EngineConfig(
        model=str(draft.path), load_format=config.load_format, weight_codes=config.weight_codes, device=plan.device,
        dtype=plan.dtype, block_size=plan.block_size, max_model_len=plan.max_model_len, max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens, enforce_eager=config.enforce_eager,
        graph_capture=config.graph_capture, fast=config.fast, seed=config.seed)
    return PlannedModel(own, draft.path, draft.architecture, draft.model_config, draft.specs, plan)


def _multiplies_codes(machine: Machine, device: str, dtype: str) -> bool:
    """Return whether there are kernels for weights in the codes of a file."""
    if device == "cpu":
        return dtype == "float32" and native.multiplies_codes()
    return coded_linear.serves(machine.cuda[0].capability, getattr(torch, dtype))


def assemble(config: EngineConfig, on_plan: Callable[[Plan], None] | None = None,
             progress: Progress | None = None) -> Assembly:
    """Build an engine. `on_plan` sees the plan before anything is loaded; `progress` gets (done, total, stage)."""
    show = progress or _quiet
    path = resolve(config.model, lambda what, done, total: show(done, total, what))
    show(0, 0, TOKENIZER)
    # Before the plan is made, which counts what the process holds by then.
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer or path, config.chat_template)
    planned = plan_model(config, progress=progress)
    if on_plan is not None:
        on_plan(planned.plan)
    else:
        for note in planned.plan.notes:
            log.warning("%s", note)
    config, plan = planned.config, planned.plan
    check_addresses(config.kv_events)
    vocabulary = None
    if planned.draft is not None:
        vocabulary = draft_vocabulary(planned.draft.path, planned.draft.model_config.vocab_size, tokenizer,
                                      planned.model_config.vocab_size)
    runner: NullRunner | ModelRunner
    if planned.shard.size > 1:
        runner = start_ranks(planned.config, plan, functools.partial(make_runner, planned, tokenizer, show))
    else:
        runner = make_runner(planned, tokenizer, show)
    draft = None
    if planned.draft is not None and vocabulary is not None:
        speculation = config.speculation
        expected = speculation.simulated or None if speculation is not None else None
        draft = _draft_model(planned.draft, vocabulary, runner, expected, show)
    identity = _identity(planned)
    most = None if isinstance(runner, NullRunner) else len(runner.kv.pool) - 1
    kv = KVCache(plan.num_blocks, plan.block_size, plan.windows, config.enable_prefix_caching, identity,
                 most_blocks=most, lender=_lender(runner, plan))
    connector: KVConnector = NullConnector()
    tokens = None
    if plan.tiers and not isinstance(runner, NullRunner):
        tokens = token_log(config, identity)
        store = make_store(config, plan, planned.model_config, runner.kv.pool, identity, runner.transfers, tokens,
                           runner.pools if isinstance(runner, ParallelRunner) else ())
        margin = 2 * -(-plan.max_num_batched_tokens // plan.block_size) * len(plan.windows)
        connector = TieredConnector(kv, store, margin, config.restore)
    scheduler = Scheduler(SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_groups=len(plan.windows),
        chunked_prefill=config.enable_chunked_prefill,
        static_batching=config.batching == "static",
        policy=config.schedule_policy,
        watermark=config.watermark,
        max_samples=step_limits(planned).max_samples,
        drafts_in_kv=planned.substitutes is not None or planned.head is not None,
    ), kv, connector, _speculator(planned, runner, kv, draft, tokens))
    return Assembly(config, planned.path, planned.model_config, planned.specs, plan,
                    Engine(scheduler, runner, config.async_scheduling, draft,
                           start_events(config.kv_events, kv, connector)), tokenizer)


def _speculator(planned: PlannedModel, runner: NullRunner | ModelRunner, kv: KVCache, draft: DraftModel | None,
                tokens: TokenLog | None) -> Speculator | None:
    speculation = planned.config.speculation
    if speculation is None:
        return None
    drafter: Drafter
    if draft is not None:
        drafter = draft
    elif planned.head is not None and not isinstance(runner, NullRunner):
        drafter = HeadDrafter(runner, kv, speculation.simulated or None)
    elif isinstance(runner, NullRunner) or runner.drafting is None:
        drafter = make_drafter(speculation, planned.model_config.vocab_size, tokens)
    else:
        drafter = RunnerDrafter(runner.drafting, SharedBlocks(kv), draft_limits(planned.plan).max_num_batched_tokens,
                                speculation.simulated or None)
    return make_speculator(drafter, speculation.num_tokens, speculation.adaptive, bool(speculation.simulated),
                           _expert_price(runner))


def _draft_model(draft: PlannedModel, vocabulary: DraftVocabulary, runner: NullRunner | ModelRunner,
                 expected: tuple[float, ...] | None, show: Progress) -> DraftModel:
    """Load the model that drafts."""
    plan = draft.plan
    second = make_runner(draft, None, show, beside=runner.inner if isinstance(runner, ParallelRunner) else runner)
    kv = KVCache(plan.num_blocks, plan.block_size, plan.windows)
    return DraftModel(second, OwnBlocks(kv, plan.max_model_len), vocabulary, plan.max_num_batched_tokens, expected)


def _expert_price(runner: NullRunner | ModelRunner) -> ExpertPrice | None:
    """Return what prices the experts that drafts bring to the device; None where all are there."""
    if isinstance(runner, NullRunner) or runner.weights.experts is None:
        return None
    return ExpertPrice(runner.weight_traffic, quick_rates(runner.kv.pool.device.type).host_to_device)


def _lender(runner: NullRunner | ModelRunner, plan: Plan) -> SlotLender | None:
    """Return the slots of experts that KV may take as contexts grow."""
    placement = plan.placement
    if isinstance(runner, NullRunner | ParallelRunner) or placement is None or not placement.spare_slots:
        return None  # ranks would have to lend the same slots at the same step
    weights = runner.weights
    if weights.memory is None or weights.experts is None:
        return None
    return SlotLender(weights.memory, weights.experts, len(placement.slot_layers), placement.spare_slots,
                      runner.kv.pool[0].nbytes, runner.in_order)


def _quiet(done: int, total: int, stage: str) -> None:
    """Do nothing: nobody asked for progress."""


def make_runner(planned: PlannedModel, tokenizer: Tokenizer | None = None, show: Progress = _quiet,
                beside: NullRunner | ModelRunner | None = None, ranks: Ranks = ONE_RANK,
                allocate: Callable[[int], torch.Tensor] | None = None) -> NullRunner | ModelRunner:
    """Load the weights and make room for the KV cache. `beside`: a runner that this one drafts for. `ranks`: those that
    compute beside this one. `allocate`: makes a run of zero bytes for the pool."""
    config, plan, model_config = planned.config, planned.plan, planned.model_config
    shard, local = planned.shard, planned.shard.decoder(model_config)
    decode = (lambda token: tokenizer.decode([token], False)) if tokenizer is not None else None
    if config.load_format == "null":
        return NullRunner(ordinary_tokens(model_config.vocab_size, tokenizer, model_config.eos_token_ids), decode,
                          step_limits(planned).simulated)
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    model = planned.architecture.build(model_config, device, dtype, plan.max_model_len, shard, ranks)
    transfers = make_transfers(plan)
    weights = load(config, plan, model_config, planned.specs, planned.path, transfers,
                   lambda done, total, _: show(done, total, WEIGHTS), planned.scheme, planned.cuts, shard.rank)
    copies: Parts | None = None
    if planned.substitutes is not None:
        copies = load_substitutes(config, plan, planned.substitutes, planned.path,
                                  lambda done, total, _: show(done, total, SUBSTITUTES))
    trim_heap()  # what loading left behind
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = weights.memory if shard.size == 1 else None
    pool = _make_pool(plan, local, len(model.groups[0].layers), dtype, device, memory, allocate)
    views = KVViews(pool, model.groups)
    stage = None
    if plan.offloaded_blocks:
        own = pool[:, :model_config.num_layers]  # no step reads a head's layer of such blocks
        stage = OffloadStage(own, plan.block_size, transfers, spill_codec(config, model_config, pool, plan.block_size))
    limits = step_limits(planned)
    if beside is not None:  # the first step of a draft has a few rows of each request
        limits = replace(limits, draft_tokens=1)
    if device.type == "cuda":
        from spillover.engine.cuda.cuda_runner import CudaRunner  # needs Triton

        runner = CudaRunner(model, weights, views, plan.block_size, device, limits, transfers, decode,
                            plan.kv_cache_dtype, stage, not config.enforce_eager,
                            beside if isinstance(beside, CudaRunner) else None)
        if planned.head is not None:
            runner.add_head(load_head(config, plan, planned.head, model, weights, views))
        if config.graph_capture == "start":
            show(0, 0, CAPTURING)
            kept = kept_on(planned.specs, plan.device, plan.dtype, not config.fast)
            prepare_products(kept, Target(plan.dtype, device), plan.max_num_batched_tokens)
            runner.capture(lambda done, total: show(done, total, CAPTURING))
        if copies is not None:
            runner.drafting = CudaRunner(model, SubstituteWeights(weights, copies), views, plan.block_size, device,
                                         draft_limits(plan), transfers, kv_dtype=plan.kv_cache_dtype,
                                         graphs=not config.enforce_eager, beside=runner)
            if config.graph_capture == "start":
                runner.drafting.capture(lambda done, total: show(done, total, CAPTURING))
        return runner
    cpu = CpuRunner(model, weights, views, plan.block_size, limits, transfers, decode, plan.kv_cache_dtype, stage,
                    beside if isinstance(beside, CpuRunner) else None)
    if planned.head is not None:
        cpu.add_head(load_head(config, plan, planned.head, model, weights, views))
    if copies is not None:
        cpu.drafting = CpuRunner(model, SubstituteWeights(weights, copies), views, plan.block_size, draft_limits(plan),
                                 transfers, kv_dtype=plan.kv_cache_dtype, beside=cpu)
    return cpu


def draft_limits(plan: Plan) -> StepLimits:
    """Return the most of a step that drafts: a token of every request."""
    return StepLimits(plan.max_num_seqs, plan.max_num_seqs, plan.max_model_len)


def step_limits(planned: PlannedModel) -> StepLimits:
    plan, speculation = planned.plan, planned.config.speculation
    return StepLimits(plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.captured_rows,
                      speculation.num_tokens if speculation is not None else 0,
                      speculation.simulated if speculation is not None else ())


def make_transfers(plan: Plan) -> Transfers:
    """Make what copies between the device and host memory, of which the plan says how much there is."""
    limit = plan.host_bytes + plan.host_weight_bytes
    if plan.device == "cuda":
        return CudaTransfers(torch.device("cuda"), HostPool(CudaPinner(0), limit))
    return CpuTransfers(HostPool(limit=limit))


def _make_pool(plan: Plan, config: ModelConfig, layers: int, dtype: torch.dtype, device: torch.device,
               memory: ElasticMemory | None, allocate: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
    """Allocate all blocks, and block 0 which padding points at. Written once here, so that the memory is really there.
    `memory`: shared with slots of experts, over which the pool reaches too. `allocate`: makes a run of zero bytes."""
    size = plan.block_size * config.head_dim
    if plan.kv_cache_dtype != "auto":
        dtype, size = torch.uint8, head_bytes(plan.block_size, config.head_dim)
    shape = (plan.num_blocks + 1, layers, 2, config.num_kv_heads, size)
    if allocate is not None:
        return allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    if memory is not None:
        return memory.pool(math.prod(shape[1:]) * dtype.itemsize).view(dtype).view(-1, *shape[1:])
    try:
        if device.type == "cpu" and dtype in (torch.float32, torch.uint8):
            floats = math.prod(shape) * dtype.itemsize // 4  # of bytes too, there is a multiple of four
            return Arena().empty(floats).zero_().view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    except (RuntimeError, OSError) as error:  # torch's and the system's names for it on the CPU
        raise SpilloverError(f"the KV cache of {plan.num_blocks:,} blocks could not be allocated ({error}); "
                             f"lower --gpu-memory") from error


def _identity(planned: PlannedModel) -> bytes:
    """Return what a KV block's content depends on besides its tokens; the same in every such process."""
    config, plan = planned.config, planned.plan
    weights = model_fingerprint(planned.path, planned.model_config, config.load_format, dtype=plan.dtype,
                                device=plan.device, seed=config.seed)
    parts: list[Any] = [weights, plan.dtype, config.kv_cache_dtype, config.spill_dtype, plan.block_size, KV_LAYOUT,
                        slot_layout(config.spill_dtype), plan.windows, planned.in_codes]
    if planned.head is not None:  # a layer of every block is its own
        parts.append(planned.head.fingerprint(config, plan))
    if config.speculative_simulate is not None:  # its KV is of made-up tokens
        parts.append("simulated")
    if config.load_format == "dummy" and planned.shard.size > 1:  # made up rank by rank
        parts.append(planned.shard)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
