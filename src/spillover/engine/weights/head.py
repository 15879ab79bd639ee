"""Loading of an EAGLE-3 head: it is found and checked before anything is loaded, then bound to the target model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spillover.engine.batch.draft_head import DraftHead
from spillover.engine.config import EngineConfig
from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.errors import SpilloverError
from spillover.models.checkpoint import open_checkpoint, read_config
from spillover.models.config import ModelConfig
from spillover.models.eagle3 import (
    PART,
    EagleHead,
    HeadConfig,
    check_head,
    dummy_targets,
    head_specs,
    read_head,
    read_targets,
)
from spillover.models.fingerprint import model_fingerprint
from spillover.models.hub.store import resolve
from spillover.models.layers import Decoder, KVViews
from spillover.models.loader import dummy_parts, load_parts
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.plan.drafting import HeadSpecs
from spillover.plan.planner import Plan


@dataclass(frozen=True)
class PlannedHead:
    """A head that has been found and checked but not loaded."""

    name: str
    path: Path
    config: HeadConfig
    specs: WeightSpecs
    draft_tokens: int

    def for_plan(self) -> HeadSpecs:
        layer = replace(self.config.layer, vocab_size=self.config.draft_vocab_size)
        tokens = 8 * self.config.draft_vocab_size if self.config.mapped else 0
        return HeadSpecs(self.name, layer, len(self.config.taps), self.draft_tokens, self.specs, tokens)

    def check_plan(self, plan: Plan) -> None:
        """Raise SpilloverError if under this plan a pass of the head would wait for the model's embeddings."""
        placement = plan.placement
        if placement is not None and placement.parts.get("embed", "resident") != "resident" \
                and not self.config.own_embedding:
            raise SpilloverError(f"the head {self.name} drafts with the model's embeddings, which do not stay on the "
                                 "device; raise --gpu-memory, or leave the method eagle3 out")

    def fingerprint(self, config: EngineConfig, plan: Plan) -> str:
        """Return what distinguishes KV of this head from that of other heads and of other uses of its weights."""
        weights = model_fingerprint(self.path, self.config.layer, config.load_format, dtype=plan.dtype,
                                    device=plan.device, seed=config.seed)
        return f"{weights.hex()} {self.config}"


def inspect_head(config: EngineConfig, model: ModelConfig) -> PlannedHead | None:
    """Find the configured head and check that it fits the model; return None if none is configured."""
    speculation = config.speculation
    if speculation is None or speculation.method != "eagle3" or speculation.model is None:
        return None
    path = resolve(speculation.model)
    if config.load_format == "dummy":
        head = read_head(read_config(path), path, model, None)
    else:
        with open_checkpoint(path) as checkpoint:
            head = read_head(checkpoint.config, path, model, checkpoint.names())
            check_head(checkpoint, head, model)
    return PlannedHead(speculation.model, path, head, head_specs(head), speculation.num_tokens)


def load_head(config: EngineConfig, plan: Plan, planned: PlannedHead, model: Decoder, weights: EngineWeights,
              kv: KVViews) -> DraftHead:
    """Load a head and bind it to a model, the model's weights and its KV."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    specs = kept_on(planned.specs, plan.device, plan.dtype)
    if config.load_format == "dummy":
        parts = dict(dummy_parts(specs, dtype, device, config.seed + 1))
        targets = dummy_targets(planned.config, model.config) if planned.config.mapped else None
    else:
        with open_checkpoint(planned.path) as checkpoint:
            parts = dict(load_parts(checkpoint, planned.config.layer, specs, dtype, lambda part, spec: device))
            targets = read_targets(checkpoint, planned.config, model.config) if planned.config.mapped else None
    if targets is not None:
        parts[PART]["targets"] = targets.to(device)
    head = EagleHead(planned.config, device, dtype, plan.max_model_len)
    return DraftHead(head, FixedWeights(parts), model, weights, kv, plan.max_num_seqs + 1, planned.draft_tokens)
