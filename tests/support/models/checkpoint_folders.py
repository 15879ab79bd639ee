"""Checkpoint folders, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 7}
TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(8, dtype=torch.bfloat16), "c": torch.ones(2, 2)}
INDEX = "model.safetensors.index.json"


def model_folder(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(TENSORS, path / "model.safetensors")
    return path


def sharded_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    shards = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path
