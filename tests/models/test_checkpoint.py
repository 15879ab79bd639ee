"""Model folders: complete ones are read exactly, others are rejected in one sentence that names the fault."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spillover.errors import CheckpointError
from spillover.models.checkpoint import open_checkpoint, read_config
from support.models.checkpoint_folders import CONFIG, INDEX, TENSORS, model_folder, sharded_folder


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [model_folder, sharded_folder])
def test_every_tensor_comes_back_as_stored(make: Any, tmp_path: Path) -> None:
    with open_checkpoint(make(tmp_path / "m")) as checkpoint:
        assert checkpoint.names() == set(TENSORS)
        for name, tensor in TENSORS.items():
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
            assert checkpoint.shape(name) == tuple(tensor.shape)
        with pytest.raises(CheckpointError, match="has no tensor nothing"):
            checkpoint.read("nothing")


def test_a_read_tensor_is_its_own_memory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model_folder(tmp_path / "m"))
    kept = checkpoint.read("a")
    assert str(tmp_path / "m") not in Path("/proc/self/maps").read_text()
    assert torch.equal(kept, TENSORS["a"])


def test_a_single_file_by_another_name_is_taken(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).names() == set(TENSORS)
    save_file(TENSORS, folder / "more.safetensors")
    refused(folder, "has 2 safetensors files but no", INDEX)


def test_every_end_of_generation_is_merged_into_the_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert open_checkpoint(folder).config["generation_eos_token_id"] == [7]
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8, 9]}')
    config = open_checkpoint(folder).config
    assert (config["eos_token_id"], config["generation_eos_token_id"]) == (7, [7, 8, 9])
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_checkpoint(folder).config["generation_eos_token_id"] == [9]


def test_a_config_can_be_read_without_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert read_config(folder) == CONFIG | {"generation_eos_token_id": [7]}


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent does not exist")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "notes.txt", "notes.txt is not a model", ".gguf")
    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no safetensors file")
    (tmp_path / "pytorch_model.bin").write_text("x")
    refused(tmp_path, "pytorch_model.bin", "convert it to safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json is not readable JSON")


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "lacks model-00002-of-00002.safetensors", INDEX)


def test_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    save_file({"b": TENSORS["b"]}, folder / "model-00002-of-00002.safetensors")
    refused(folder, "model-00002-of-00002.safetensors has no tensor c")


@pytest.mark.parametrize("lost", [1, 20, 150])
def test_a_truncated_shard(lost: int, tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-lost])
    refused(folder, "model-00002-of-00002.safetensors is truncated", "download it again")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]",
                                     struct.pack("<Q", 9) + b'{"a": {}}', struct.pack("<Q", 8) + b'{"a": 1}'])
def test_a_corrupt_header(content: bytes, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors has a corrupt header")


def test_types_and_quantisations_that_are_not_supported(tmp_path: Path) -> None:
    refused(model_folder(tmp_path / "m", CONFIG | {"quantization_config": {"quant_method": "aqlm"}}), "'aqlm'")
    folder = model_folder(tmp_path / "m", CONFIG | {"quantization_config": {"quant_method": "mxfp4"}})
    open_checkpoint(folder)
    save_file({"odd": torch.zeros(4).to(torch.float8_e5m2)}, folder / "model.safetensors")
    refused(folder, "tensor odd has type F8_E5M2")
