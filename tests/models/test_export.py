"""`spill export`: transformers loads from the folder the exported model, with its tokenizer and template."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from click.testing import CliRunner
from fuzz_seeds import byte_level_fields
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillover.cli.main import main
from spillover.models.checkpoint import open_checkpoint
from spillover.models.export import cached_export, export
from spillover.models.tokenizer import load_tokenizer
from support.models.gguf_cases import CASES, FIELDS, random_model
from support.models.gguf_writing import write_like_llama_cpp

MESSAGES = [{"role": "user", "content": "the that"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))


def tiny(folder: Path, case: str = "llama", kind: Kind = Kind.F32) -> tuple[Path, Any]:
    arch, config, fields = CASES[case]
    model = random_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    fields = FIELDS | fields | byte_level_fields()
    matrices = None if kind is Kind.F32 else (lambda _name, dims: kind if dims == 2 else Kind.F32)
    return write_like_llama_cpp(folder / "tiny.gguf", model, arch, fields, kind_of=matrices), model


def greedy(model: Any, count: int = 12) -> list[int]:
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0].tolist()


def names() -> list[str]:
    return [name for name in CASES if name in ("llama", "qwen3moe", "mixtral", "gpt-oss")]


@pytest.mark.parametrize("case", names())
def test_transformers_loads_it_and_gives_the_same_tokens(case: str, tmp_path: Path) -> None:
    source, model = tiny(tmp_path, case)
    folder = export(source, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model)
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert greedy(loaded) == greedy(model)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(source)
    for text in ("the that", " a\nthe</s>", "<s>"):
        assert theirs(text)["input_ids"] == ours.encode(text) == load_tokenizer(folder).encode(text)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == ours.apply_chat_template(
        MESSAGES, add_generation_prompt=False)
    assert theirs.eos_token == ours.special_tokens["eos_token"]
    assert sorted(loaded.generation_config.eos_token_id) == sorted(ours.eos_token_ids)


def test_quantised_weights_become_what_they_stand_for(tmp_path: Path) -> None:
    source, _ = tiny(tmp_path, kind=Kind.Q8_0)
    folder = export(source, tmp_path / "out")
    with open_checkpoint(source) as stored, open_checkpoint(folder) as written:
        assert written.names() <= stored.names()
        for name in written.names():
            assert torch.equal(written.read(name), stored.read(name).float()), name
    half = export(source, tmp_path / "half", "bfloat16")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    with open_checkpoint(folder) as whole, open_checkpoint(half) as written:
        for name in written.names():
            assert torch.equal(written.read(name), whole.read(name).bfloat16()), name


def test_large_models_are_sharded_and_a_folder_can_be_exported_again(tmp_path: Path) -> None:
    source, model = tiny(tmp_path)
    folder = export(source, tmp_path / "out", shard_nbytes=20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert greedy(AutoModelForCausalLM.from_pretrained(folder)) == greedy(model)
    again = export(folder, tmp_path / "again")
    assert [file.name for file in again.glob("*.safetensors")] == ["model.safetensors"]
    assert greedy(AutoModelForCausalLM.from_pretrained(again)) == greedy(model)
    assert load_tokenizer(again).encode("the") == load_tokenizer(source).encode("the")


def test_the_command(tmp_path: Path) -> None:
    source, _ = tiny(tmp_path)
    out = tmp_path / "out"

    def spill(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["export", str(source), *arguments])

    assert spill(str(out)).stdout.strip() == str(out)
    refused = spill(str(out))
    assert refused.exit_code == 2
    assert "is not empty" in refused.stderr
    (out / "notes.txt").write_text("mine")
    (out / "model-00001-of-00009.safetensors").write_text("old")
    assert spill(str(out), "--force", "--dtype", "float16").exit_code == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert not list(out.glob("model-*"))
    assert "is a file" in spill(str(source)).stderr
    assert not [entry for entry in tmp_path.iterdir() if "partial" in entry.name]


def test_an_export_in_the_cache_is_made_once_and_again_for_other_weights(tmp_path: Path) -> None:
    source, _ = tiny(tmp_path)
    first = cached_export(source)
    before = os.stat(first / "config.json").st_mtime_ns
    assert cached_export(source) == first
    assert os.stat(first / "config.json").st_mtime_ns == before
    source, _ = tiny(tmp_path, kind=Kind.F16)
    assert cached_export(source) != first
    assert gguf.GGUFReader(source)  # the source is unchanged


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    source, _ = tiny(tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out", progress=interrupt)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "cache") == ["tiny.gguf"]
