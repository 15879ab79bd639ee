"""A model's fingerprint: the same wherever its files are, different for other weights or another computation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from spillover.models import fingerprint
from spillover.models.config import ModelConfig, RopeScaling
from spillover.models.fingerprint import SAMPLE_BYTES, WHOLE_BYTES, model_fingerprint, weights_digest
from support.models.checkpoint_folders import sharded_folder
from support.models.gguf_writing import llama_arrays, llama_fields, write_gguf

CONFIG = ModelConfig("LlamaForCausalLM", vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
                     head_dim=4, intermediate_size=16, rms_norm_eps=1e-5, rope_theta=1e4, max_position=128)
LARGE, SMALL = 8 * WHOLE_BYTES, 64  # numbers of one-byte elements


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"large": torch.randint(0, 255, (LARGE,), dtype=torch.uint8, generator=generator),
            "norm": torch.ones(SMALL, dtype=torch.uint8)}


def write_folder(folder: Path, contents: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(contents, folder / "model.safetensors")
    return folder


def gguf_model(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(folder / "model.gguf", "llama", llama_fields(), llama_arrays())


def one_file_folder(folder: Path) -> Path:
    return write_folder(folder, tensors())


@pytest.mark.parametrize("make", [one_file_folder, sharded_folder, gguf_model])
@pytest.mark.parametrize("full", [False, True])
def test_the_same_bytes_elsewhere_are_the_same_model(make: Callable[[Path], Path], full: bool, tmp_path: Path) -> None:
    here = make(tmp_path / "here")
    folder = tmp_path / "under" / "another name"
    shutil.copytree(here if here.is_dir() else here.parent, folder)
    there = folder if here.is_dir() else folder.joinpath("model.gguf").rename(folder / "renamed.gguf")
    assert weights_digest(here, full) == weights_digest(there, full)


def test_shards_do_not_change_the_model(tmp_path: Path) -> None:
    from support.models.checkpoint_folders import model_folder

    assert weights_digest(model_folder(tmp_path / "one")) == weights_digest(sharded_folder(tmp_path / "two"))


@pytest.mark.parametrize("change", [
    lambda t: {**t, "large": t["large"] + 1},  # as after training
    lambda t: {**t, "large": torch.cat([t["large"][:-1], t["large"][-1:] + 1])},  # the last byte
    lambda t: {**t, "large": torch.cat([t["large"][:1] + 1, t["large"][1:]])},  # the first byte
    lambda t: {**t, "norm": t["norm"].scatter(0, torch.tensor([SMALL // 3]), 7)},  # any byte of a small tensor
    lambda t: {**t, "large": t["large"].reshape(2, -1)},
    lambda t: {**t, "large": t["large"].view(torch.int8)},
    lambda t: {"large": t["large"], "norm2": t["norm"]},
    lambda t: {**t, "bias": t["norm"].clone()},
    lambda t: {"large": t["large"]},
])
def test_other_weights_are_another_model(change: Callable[[Any], Any], tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first", tensors())
    second = write_folder(tmp_path / "second", change(tensors()))
    assert weights_digest(first) != weights_digest(second)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=st.integers(0, LARGE - 1), count=st.integers(1, LARGE))
def test_a_change_is_seen_if_wide_and_always_by_a_full_read(begin: int, count: int, tmp_path: Path) -> None:
    changed = tensors()
    changed["large"][begin : begin + count] ^= 1
    first, second = write_folder(tmp_path / "first", tensors()), write_folder(tmp_path / "second", changed)
    assert weights_digest(first, full=True) != weights_digest(second, full=True)
    if min(count, LARGE - begin) >= LARGE // 7 + SAMPLE_BYTES:  # wider than the gap between two samples
        assert weights_digest(first) != weights_digest(second)


def test_a_start_reads_no_weights_again_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "KEPT_BYTES", 1)
    folder = write_folder(tmp_path / "model", tensors())
    before = weights_digest(folder)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *where: reads.append(1) or pread(*where))
    assert weights_digest(folder) == before
    assert not reads
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    write_folder(folder, {name: tensor + 1 for name, tensor in tensors().items()})
    os.utime(folder / "model.safetensors", ns=(stamp, stamp))  # as after a copy that preserves times
    assert weights_digest(folder) != before
    assert reads


def test_a_spoiled_record_and_a_read_only_cache_cost_nothing_but_time(
        tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "KEPT_BYTES", 1)
    folder = write_folder(tmp_path / "model", tensors())
    before = weights_digest(folder)
    (record,) = (cache / "models" / ".fingerprints").glob("*.json")
    record.write_text("not JSON")
    assert weights_digest(folder) == before
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    assert weights_digest(folder) == before


def of(config: ModelConfig = CONFIG, load_format: str = "dummy", **changes: Any) -> bytes:
    given = {"dtype": "float32", "device": "cpu", "seed": 0} | changes
    return model_fingerprint(Path("nowhere"), config, load_format, **given)


def test_dummy_weights_are_what_they_are_made_of() -> None:
    assert of() == of()
    others = [of(seed=1), of(dtype="bfloat16"), of(device="cuda"), of(load_format="null"),
              of(replace(CONFIG, rope_theta=5e5)), of(replace(CONFIG, rms_norm_eps=1e-6)),
              of(replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0))), of(replace(CONFIG, windows=(None, 64)))]
    assert len({of(), *others}) == len(others) + 1


def test_what_ends_a_generation_is_not_the_model() -> None:
    assert of(replace(CONFIG, eos_token_ids=(2,), bos_token_id=1)) == of()


def test_the_configuration_counts_beside_the_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", tensors())
    given = {"dtype": "float32", "device": "cpu", "seed": 0}
    plain = model_fingerprint(folder, CONFIG, "auto", **given)
    assert plain == model_fingerprint(folder, CONFIG, "auto", **(given | {"seed": 9}))
    assert plain != model_fingerprint(folder, replace(CONFIG, rope_theta=5e5), "auto", **given)
