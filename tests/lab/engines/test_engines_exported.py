"""vLLM and SGLang get the same weights as a folder by `spill export`; arms that cannot run are found early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz_seeds import gguf_models

from spillover.errors import SpilloverError
from spillover.lab.engines import EngineSpec, make_engine
from spillover.lab.engines.exported import absent, hf_folder


def test_a_gguf_file_is_exported_for_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_models()["gguf-llama"].encode())
    command = make_engine(EngineSpec("vllm", str(file))).command(8123)
    folder = Path(command[command.index("serve") + 1])
    assert folder.parent == tmp_path / "cache" / "exports"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    asked = make_engine(EngineSpec("sglang", str(file))).command(8124)
    assert asked[asked.index("--model-path") + 1] == str(folder)
    for kind in ("vllm", "sglang"):  # a dry run writes nothing
        assert "$(spill export default)" in make_engine(EngineSpec(kind)).command(0)
        assert "org/name" in make_engine(EngineSpec(kind, "org/name")).command(8125)


def test_what_cannot_be_exported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(SpilloverError, match=r"cannot be exported to a Hugging Face folder: .*odd\.gguf"):
        hf_folder(str(tmp_path / "odd.gguf"))


def test_an_arm_without_its_model_is_found_before_anything_is_started(tmp_path: Path) -> None:
    assert absent(None) is None
    assert absent("org/name") is None
    assert "no file" in str(absent(str(tmp_path / "none.gguf")))
    assert "no config.json" in str(absent(str(tmp_path)))
