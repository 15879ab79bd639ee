"""The model cache: whole models or none, each downloaded once, and errors that name the cause."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from spillover.errors import SpilloverError
from spillover.models.checkpoint import open_checkpoint
from spillover.models.hub import store
from support.models.gguf_writing import llama_arrays, llama_fields, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(SpilloverError) as error:
        call()
    assert all(part in str(error.value) for part in parts), str(error.value)


def nothing_left(cache: Path) -> bool:
    return not cache.exists() or all(entry.name.endswith(".lock") for entry in cache.iterdir())


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.md").write_text("not wanted")
    save_file({"a": torch.ones(100)}, path / "model.safetensors")
    return path


def test_a_folder_and_a_file_can_be_pulled_listed_verified_and_removed(tmp_path: Path, cache: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    file = write_gguf(tmp_path / "tiny.gguf", "llama", llama_fields(), llama_arrays())
    assert store.resolve(str(folder)) == folder
    assert store.resolve(str(file)) == file
    pulled = store.pull(str(folder), "my-model")
    assert (pulled.name, pulled.path, pulled.format) == ("my-model", cache / "my-model", "safetensors")
    assert store.pull(str(file)).path == cache / "tiny" / "tiny.gguf"
    assert [model.name for model in store.list_models()] == ["my-model", "tiny"]
    for original in folder.iterdir():
        original.unlink()
    file.unlink()
    assert open_checkpoint(store.resolve("my-model")).read("a").sum() == 100
    assert not (cache / "my-model" / "notes.md").exists()
    assert store.pull("tiny") == store.verify("tiny")
    assert store.remove("My-Model").name == "my-model"
    assert [model.name for model in store.list_models()] == ["tiny"]
    refused(lambda: store.remove("my-model"), "there is no model 'my-model'")


def test_damage_in_the_cache_is_found(tmp_path: Path, cache: Path) -> None:
    path = store.pull(str(write_gguf(tmp_path / "tiny.gguf", "llama", llama_fields(), llama_arrays()))).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert store.resolve("tiny") == path
    refused(lambda: store.verify("tiny"), "tiny.gguf is damaged", "remove tiny and pull it again")
    path.write_bytes(whole[:-1])
    refused(lambda: store.resolve("tiny"), f"{len(whole) - 1:,} bytes", "remove tiny and pull it again")


def test_what_does_not_open_is_not_pulled(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(8))
    refused(lambda: store.pull(str(tmp_path / "bad.gguf")), "bad.gguf")
    file = write_gguf(tmp_path / "good.gguf", "llama", llama_fields(), llama_arrays())
    refused(lambda: store.pull(str(file), "../up"), "'../up' cannot be a model's name")
    refused(lambda: store.pull(str(file), "smollm2"), "is the default model's name")
    assert nothing_left(cache)


def test_a_name_that_is_not_known_gets_the_nearest_ones(tmp_path: Path) -> None:
    store.pull(str(write_gguf(tmp_path / "tiny-llama.gguf", "llama", llama_fields(), llama_arrays())))
    refused(lambda: store.resolve("tinyllama"), "did you mean tiny-llama?",
            "Available: SmolLM2-135M-Instruct, tiny-llama")
    refused(lambda: store.resolve("smolm2"), "did you mean smollm2")
    refused(lambda: store.resolve(str(tmp_path / "tiny-lama.gguf")), f"did you mean {tmp_path / 'tiny-llama.gguf'}")
    refused(lambda: store.resolve("xyzzy"), "there is no model 'xyzzy'. Available:", "org/name")
    (tmp_path / "notes.txt").write_text("x")
    refused(lambda: store.resolve(str(tmp_path / "notes.txt")), "is not a model")


def test_models_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = model_folder(tmp_path / "snapshot"), []

    def online(name: str, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        if local_files_only and calls.count(False) == 0:
            raise FileNotFoundError("not cached")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", online)
    assert store.resolve("org/some-model") == folder
    assert calls == [True, False]
    assert store.resolve("org/some-model") == folder
    assert calls == [True, False, True]  # no network the second time
    assert store.pull("org/some-model").name == "some-model"


def test_a_hub_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> None:
        def download(name: str, local_files_only: bool, **_: Any) -> str:
            raise FileNotFoundError if local_files_only else error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def ask() -> Path:
        return store.resolve("org/name")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    raising(ConnectionError("Name or service not known\nlong story"))
    refused(ask, "cannot fetch org/name from the Hugging Face hub (Name or service not known)", "check the network")
    raising(RuntimeError("odd"))
    refused(ask, "(odd)")
    raising(OSError(errno.ENOSPC, "full"))
    refused(ask, "the disk is full")
    for kind, part in (("GatedRepoError", "is gated"), ("RepositoryNotFoundError", "has no model org/name")):
        error_class = getattr(huggingface_hub.errors, kind)
        raising(error_class.__new__(error_class))
        refused(ask, part)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(ask, "HF_HUB_OFFLINE is set")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "file"))
    refused(store.resolve, "cannot be written", "SPILLOVER_CACHE")
