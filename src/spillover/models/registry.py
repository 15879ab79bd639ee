"""The architectures by their name in config.json; a new one is a file in `architectures` and an entry in the table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spillover.errors import CheckpointError, short_repr
from spillover.models.config import ModelConfig
from spillover.models.layers import Decoder
from spillover.models.sharding.ranks import ONE_RANK, Ranks
from spillover.models.sharding.shard import Shard
from spillover.models.weight_specs import WeightSpecs

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}


@dataclass(frozen=True)
class Architecture:
    name: str
    config: Callable[[Mapping[str, Any]], ModelConfig]  # parses a config.json
    weight_specs: Callable[[ModelConfig], WeightSpecs]
    model: type[Decoder]

    def build(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, num_positions: int | None = None,
        shard: Shard | None = None, ranks: Ranks = ONE_RANK,
    ) -> Decoder:
        return self.model(config, device, dtype, num_positions, shard, ranks)


def read_architecture(hf_config: Mapping[str, Any], path: Path) -> tuple[Architecture, ModelConfig]:
    """Return a checkpoint's architecture and parsed configuration; errors name the checkpoint's file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = architecture(hf_config)
        return found, found.config(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {str(error).removeprefix('config.json: ')}") from error


def architecture(hf_config: Mapping[str, Any]) -> Architecture:
    names = hf_config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json: 'architectures' is not a list (found {short_repr(names)})")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            module = importlib.import_module(f"spillover.models.architectures.{ARCHITECTURES[name]}")
            return Architecture(name, module.config, module.weight_specs, module.Model)
    supported = ", ".join(ARCHITECTURES)
    if not names:
        raise CheckpointError(f"config.json: it names no architecture; supported are {supported}")
    raise CheckpointError(f"config.json: architecture {short_repr(names[0])} is not supported; supported are "
                          f"{supported}")
