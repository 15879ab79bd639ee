"""Builds an engine from flags: finds the model, plans the memory, loads the weights, puts the parts together."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spillover.engine.backend import Backend, RunnerParts
from spillover.engine.batch.offloaded_prefix import OffloadStage, spill_codec
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.config import EngineConfig
from spillover.engine.events.publisher import check_addresses, start_events
from spillover.engine.loop import Engine, ModelRunner
from spillover.engine.null_runner import NullRunner, ordinary_tokens
from spillover.engine.parallel.parallel_runner import ParallelRunner
from spillover.engine.parallel.start import start_ranks
from spillover.engine.planned import PlannedModel, Progress, plan_model, quiet
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.engine.speculation.drafters.choose import draft_vocabulary, make_drafter
from spillover.engine.speculation.drafters.draft_model import DraftModel
from spillover.engine.speculation.drafters.drafter import Drafter
from spillover.engine.speculation.drafters.head_drafter import HeadDrafter
from spillover.engine.speculation.drafters.own_blocks import OwnBlocks
from spillover.engine.speculation.drafters.runner_drafter import RunnerDrafter, SharedBlocks
from spillover.engine.speculation.drafters.vocabulary import DraftVocabulary
from spillover.engine.speculation.expert_price import ExpertPrice
from spillover.engine.speculation.model_speculator import make_speculator
from spillover.engine.speculation.speculator import Speculator
from spillover.engine.step_cost import StepCost
from spillover.engine.tiers import make_store, token_log
from spillover.engine.weights.elastic import ElasticMemory, SlotLender
from spillover.engine.weights.head import load_head
from spillover.engine.weights.load import load
from spillover.engine.weights.substitutes import (
    Parts,
    SubstituteWeights,
    load_substitutes,
)
from spillover.errors import SpilloverError
from spillover.kernels.attention import KV_LAYOUT
from spillover.kernels.kv_quant import head_bytes, slot_layout
from spillover.memory.connector import KVConnector, NullConnector
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.tiers.token_log import TokenLog
from spillover.models.config import ModelConfig
from spillover.models.fingerprint import model_fingerprint
from spillover.models.gguf.gguf_header import headers_kept
from spillover.models.hub.store import resolve
from spillover.models.layers import KVViews
from spillover.models.quantize.calibrated import calibrated_copy
from spillover.models.sharding.ranks import ONE_RANK, Ranks
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.hardware import probe, trim_heap
from spillover.plan.measure import quick_rates
from spillover.plan.planner import Plan
from spillover.plan.workspace import draft_rows
from spillover.progress import SUBSTITUTES, TOKENIZER, WEIGHTS

log = logging.getLogger("spillover.engine")



@dataclass(frozen=True)
class Assembly:
    config: EngineConfig  # the flags, with the planner's choices filled in
    path: Path
    model_config: ModelConfig
    specs: WeightSpecs
    plan: Plan
    engine: Engine
    tokenizer: Tokenizer | None


@headers_kept()
def assemble(config: EngineConfig, on_plan: Callable[[Plan], None] | None = None,
             progress: Progress | None = None) -> Assembly:
    """Build an engine. `on_plan` gets the plan before weights are loaded; `progress` gets (done, total, stage)."""
    show = progress or quiet
    path = resolve(config.model, lambda what, done, total: show(done, total, what))
    if config.calibrate is not None and config.quantization is not None:
        device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
        path = calibrated_copy(path, config.quantization, Path(config.calibrate), device, probe().memory_available,
                               lambda what, done, total: show(done, total, what))
        config = replace(config, model=str(path), quantization=None, calibrate=None)
    show(0, 0, TOKENIZER)
    # Loaded before the plan is made, which counts the memory that the process already uses.
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
    backend = make_backend(config, plan)
    make = functools.partial(make_runner, planned, tokenizer, show, backend=backend)
    runner: ModelRunner = start_ranks(planned.config, plan, make) if planned.shard.size > 1 else make()
    draft = None
    if planned.draft is not None and vocabulary is not None:
        speculation = config.speculation
        expected = speculation.simulated or None if speculation is not None else None
        draft = _draft_model(planned.draft, vocabulary, runner, expected, show)
    identity = _identity(planned)
    kv = KVCache(plan.num_blocks, plan.block_size, plan.windows, config.enable_prefix_caching, identity,
                 most_blocks=len(runner.kv.pool) - 1, lender=_lender(planned, runner))
    connector: KVConnector = NullConnector()
    tokens = None
    if plan.tiers:
        tokens = token_log(config, identity)
        store = make_store(config, plan, planned.model_config, runner.kv.pool, identity, backend, tokens,
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


def _speculator(planned: PlannedModel, runner: ModelRunner, kv: KVCache, draft: DraftModel | None,
                tokens: TokenLog | None) -> Speculator | None:
    speculation = planned.config.speculation
    if speculation is None:
        return None
    drafter: Drafter
    if draft is not None:
        drafter = draft
    elif planned.head is not None:
        drafter = HeadDrafter(runner, kv, speculation.simulated or None)
    elif runner.drafting is None:
        drafter = make_drafter(speculation, planned.model_config.vocab_size, tokens)
    else:
        drafter = RunnerDrafter(runner.drafting, SharedBlocks(kv), draft_limits(planned.plan).max_num_batched_tokens,
                                speculation.simulated or None)
    return make_speculator(drafter, speculation.num_tokens, speculation.adaptive, bool(speculation.simulated),
                           _expert_price(runner, planned.plan), speculation.max_branches)


def _draft_model(draft: PlannedModel, vocabulary: DraftVocabulary, runner: ModelRunner,
                 expected: tuple[float, ...] | None, show: Progress) -> DraftModel:
    """Load the draft model."""
    plan = draft.plan
    second = make_runner(draft, None, show, shared_with=runner.inner if isinstance(runner, ParallelRunner) else runner)
    kv = KVCache(plan.num_blocks, plan.block_size, plan.windows)
    return DraftModel(second, OwnBlocks(kv, plan.max_model_len), vocabulary, plan.max_num_batched_tokens, expected)


def _expert_price(runner: ModelRunner, plan: Plan) -> ExpertPrice | None:
    """Return the cost model of experts that draft rows bring to the device; None if all experts are resident."""
    if runner.weights.experts is None:
        return None
    return ExpertPrice(runner.weight_traffic, quick_rates(plan.device).host_to_device)


def _lender(planned: PlannedModel, runner: ModelRunner) -> SlotLender | None:
    """Return the lender of expert slots, which KV may use as contexts grow; None if there is none."""
    placement, weights = planned.plan.placement, runner.weights
    if planned.shard.size > 1 or placement is None or not placement.spare_slots:
        return None  # ranks would have to lend the same slots at the same step
    if weights.memory is None or weights.experts is None:
        return None
    return SlotLender(weights.memory, weights.experts, len(placement.slot_layers), placement.spare_slots,
                      runner.kv.pool[0].nbytes, runner.in_order)


def make_backend(config: EngineConfig, plan: Plan) -> Backend:
    """Return the backend of the plan's device, which is not open yet."""
    if plan.device == "cuda":
        from spillover.engine.cuda.cuda_backend import CudaBackend  # needs Triton

        return CudaBackend(config, plan)
    from spillover.engine.cpu.cpu_backend import CpuBackend

    return CpuBackend(config, plan)


def make_runner(planned: PlannedModel, tokenizer: Tokenizer | None = None, show: Progress = quiet,
                shared_with: ModelRunner | None = None, ranks: Ranks = ONE_RANK,
                allocate: Callable[[int], torch.Tensor] | None = None, backend: Backend | None = None) -> ModelRunner:
    """Load the weights and allocate the KV cache. `shared_with`: the runner that this one drafts for. `ranks`: the
    group of ranks that this runner is one of. `allocate`: allocates zeroed bytes for the pool. `backend`: that of the
    plan, not open yet; None: it is made."""
    config, plan, model_config = planned.config, planned.plan, planned.model_config
    shard, local = planned.shard, planned.shard.decoder(model_config)
    decode = (lambda token: tokenizer.decode([token], False)) if tokenizer is not None else None
    if config.load_format == "null":
        return NullRunner(ordinary_tokens(model_config.vocab_size, tokenizer, model_config.eos_token_ids), decode,
                          step_limits(planned).simulated, StepCost.of(config.simulate_step))
    backend, dtype = backend or make_backend(config, plan), getattr(torch, plan.dtype)
    model = planned.architecture.build(model_config, backend.device, dtype, plan.max_model_len, shard, ranks)
    backend.open()
    weights = load(config, plan, model_config, planned.specs, planned.path, backend,
                   lambda done, total, _: show(done, total, WEIGHTS), planned.scheme, planned.cuts, shard.rank)
    copies: Parts | None = None
    if planned.substitutes is not None:
        copies = load_substitutes(config, plan, planned.substitutes, planned.path,
                                  lambda done, total, _: show(done, total, SUBSTITUTES))
    trim_heap()  # return memory that loading has freed to the system
    backend.free_unused()
    memory = weights.memory if shard.size == 1 else None
    pool = _make_pool(plan, local, len(model.groups[0].layers), dtype, backend, memory, allocate)
    views = KVViews(pool, model.groups)
    stage = None
    if plan.offloaded_blocks:
        own = pool[:, :model_config.num_layers]  # no step reads the head's layer of offloaded blocks
        stage = OffloadStage(own, plan.block_size, backend.copier, backend.addresses,
                             spill_codec(config, model_config, pool, plan.block_size))
    limits = step_limits(planned)
    if shared_with is not None:  # the first step of a draft may have several rows per request
        limits = replace(limits, draft_tokens=1)
    runner = backend.make_runner(RunnerParts(model, weights, views, limits, decode, stage, shared_with))
    if planned.head is not None:
        runner.add_head(load_head(config, plan, planned.head, model, weights, views))
    backend.capture(runner, show, planned.specs)
    if copies is not None:
        runner.drafting = backend.make_runner(RunnerParts(model, SubstituteWeights(weights, copies), views,
                                                          draft_limits(plan), shared_with=runner))
        backend.capture(runner.drafting, show)
    return runner


def draft_limits(plan: Plan) -> StepLimits:
    """Return the limits of a step that drafts: one token per request, and more when branches of drafts begin."""
    return StepLimits(plan.max_num_seqs, draft_rows(plan.max_num_seqs, plan.max_num_batched_tokens), plan.max_model_len)


def step_limits(planned: PlannedModel) -> StepLimits:
    plan, speculation = planned.plan, planned.config.speculation
    return StepLimits(plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.captured_rows,
                      speculation.num_tokens if speculation is not None else 0,
                      speculation.simulated if speculation is not None else ())


def _make_pool(plan: Plan, config: ModelConfig, layers: int, dtype: torch.dtype, backend: Backend,
               memory: ElasticMemory | None, allocate: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
    """Allocate all blocks, and the dummy block 0 for padding. The memory is zeroed, so that its pages are allocated.
    `memory`: memory shared with expert slots, which the pool's address range includes. `allocate`: allocates zeros."""
    size = plan.block_size * config.head_dim
    if plan.kv_cache_dtype != "auto":
        dtype, size = torch.uint8, head_bytes(plan.block_size, config.head_dim)
    shape = (plan.num_blocks + 1, layers, 2, config.num_kv_heads, size)
    if allocate is not None:
        return allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    if memory is not None:
        return memory.pool(math.prod(shape[1:]) * dtype.itemsize).view(dtype).view(-1, *shape[1:])
    try:
        return backend.allocate_pool(shape, dtype)
    except (RuntimeError, OSError) as error:  # allocation errors of torch and of the system
        raise SpilloverError(f"the KV cache of {plan.num_blocks:,} blocks could not be allocated ({error}); "
                             f"lower --gpu-memory") from error


def _identity(planned: PlannedModel) -> bytes:
    """Return a digest of all that a KV block's content depends on besides its tokens; the same in all processes."""
    config, plan = planned.config, planned.plan
    weights = model_fingerprint(planned.path, planned.model_config, config.load_format, dtype=plan.dtype,
                                device=plan.device, seed=config.seed)
    parts: list[Any] = [weights, plan.dtype, config.kv_cache_dtype, config.spill_dtype, plan.block_size, KV_LAYOUT,
                        slot_layout(config.spill_dtype), plan.windows, planned.in_codes]
    if planned.head is not None:  # one layer of every block is the head's
        parts.append(planned.head.fingerprint(config, plan))
    if config.speculative_simulate is not None:  # its KV is that of made-up tokens
        parts.append("simulated")
    if config.load_format == "dummy" and planned.shard.size > 1:  # each rank makes its own random weights
        parts.append(planned.shard)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
