"""Malformed files: one sentence that names the file, soon and with little memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_models
import pytest
from fuzz_models import attempt, nested
from fuzz_seeds import ARRAY, FLOAT32, STRING, UINT32, Gguf, gguf_models

from spillover.errors import CheckpointError, RequestError
from spillover.models.literal_text import LiteralText
from spillover.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "seeds"
    fuzz_models.write_seeds(folder)
    return folder


def refused(path: Path, says: str) -> None:
    with pytest.raises(CheckpointError) as error:
        attempt(path, plan=False)
    assert says in str(error.value)


def test_mutations_end_in_a_model_or_a_sentence(tmp_path: Path) -> None:
    """A few hundred mutations end in a model or an error sentence; the script runs thousands."""
    script = Path(fuzz_models.__file__)
    result = subprocess.run([sys.executable, str(script), "--count", "300", "--first", "50000",
                             "--json", str(tmp_path / "result.json")], capture_output=True, text=True, timeout=500,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    counted = json.loads((tmp_path / "result.json").read_text())
    assert counted["faults"] == []
    assert counted["endings"]["sentence"] > 150
    assert counted["endings"]["loads"] > 10
    assert counted["peak_memory_growth_bytes"] < 200 << 20


def set_field(name: bytes, kind: int, value: Any) -> Callable[[Gguf], None]:
    def change(model: Gguf) -> None:
        model.fields = [field for field in model.fields if field[0] != name] + [(name, kind, value)]

    return change


def set_dimensions(at: int, dimensions: list[int]) -> Callable[[Gguf], None]:
    def change(model: Gguf) -> None:
        name, _, kind, offset = model.tensors[at]
        model.tensors[at] = (name, dimensions, kind, offset)

    return change


@pytest.mark.parametrize(("change", "says"), [
    (set_field(b"x", ARRAY, nested(5000)), "nested more than 4 deep"),
    (set_field(b"general.alignment", STRING, b"32"), "general.alignment is '32'"),
    (set_field(b"general.alignment", UINT32, 0), "general.alignment is 0"),
    (set_field(b"llama.block_count", FLOAT32, float("nan")), "llama.block_count is nan"),
    (set_field(b"llama.block_count", UINT32, 2**31), "at most 10,000"),
    (set_field(b"llama.expert_count", STRING, b"many"), ""),
    (set_field(b"tokenizer.ggml.tokens", ARRAY, (UINT32, [1, 2])), "tokenizer.ggml.tokens has 1"),
    (set_field(b"tokenizer.ggml.merges", ARRAY, (STRING, [b"th"])), "tokenizer.ggml.merges has 'th'"),
    (set_field(b"tokenizer.ggml.merges", ARRAY, (STRING, [b"q zz"])), "its tokenizer cannot be made"),
    (set_field(b"tokenizer.ggml.bos_token_id", UINT32, 10**6), "bos_token_id has 1000000"),
    (set_field(b"tokenizer.chat_template", UINT32, 5), "its chat template 'default' is 5"),
    (set_field(b"split.count", STRING, b"2"), "split.count is '2'"),
    (set_dimensions(0, [0, 2**40]), "has shape"),
    (set_dimensions(0, [2**62, 2**62]), "is truncated"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_gguf_files(change: Callable[[Gguf], None], says: str, tmp_path: Path) -> None:
    model = gguf_models()["gguf-llama"]
    change(model)
    path = tmp_path / "odd.gguf"
    path.write_bytes(model.encode())
    if says:
        refused(path, says)
    else:
        attempt(path, plan=False)  # a field that this architecture does not use


def test_a_gguf_vocabulary_of_long_tokens_is_read_soon(tmp_path: Path) -> None:
    model = gguf_models()["gguf-codes"]
    count = 40
    for name, kind, value in (("tokens", STRING, [b"<unk>", *(bytes([97 + index % 26]) * 50_000 + str(index).encode()
                                                              for index in range(count - 1))]),
                              ("scores", FLOAT32, [0.0] * count), ("token_type", UINT32, [1] * count)):
        set_field(f"tokenizer.ggml.{name}".encode(), ARRAY, (kind, value))(model)
    path = tmp_path / "long.gguf"
    path.write_bytes(model.encode())
    with fuzz_models.deadline(30):
        attempt(path, plan=False)


@pytest.mark.parametrize(("file", "key", "value", "says"), [
    ("config.json", "num_hidden_layers", float("nan"), "'num_hidden_layers' is missing or not a whole number"),
    ("config.json", "num_hidden_layers", 2**40, "it can be 1 to 10,000"),
    ("config.json", "num_key_value_heads", "2", "'num_key_value_heads' is missing or not a whole number"),
    ("config.json", "dtype", ["float32"], "'dtype' is ['float32']"),
    ("config.json", "rope_scaling", "linear", "'rope_scaling' is 'linear', not an object"),
    ("config.json", "rms_norm_eps", {}, ""),
    ("config.json", "rms_norm_eps", "small", "'rms_norm_eps' is 'small'"),
    ("config.json", "architectures", "LlamaForCausalLM", "'architectures' is not a list"),
    ("config.json", "eos_token_id", [[1]], ""),
    ("generation_config.json", "eos_token_id", "end", "'eos_token_id' has 'end'"),
    ("tokenizer_config.json", "chat_template", [{"name": "default"}], "chat template is None"),
    ("tokenizer_config.json", "eos_token", "\ud800", ""),
    ("model.safetensors.index.json", "weight_map", {"lm_head.weight": 3}, "3 under 'weight_map'"),
    ("model.safetensors.index.json", "weight_map", {"lm_head.weight": "../up.safetensors"}, "is not the name"),
])
def test_json_files(file: str, key: str, value: Any, says: str, seeds: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    subprocess.run(["cp", "-r", seeds / "folder-llama", path], check=True)
    content = json.loads((path / file).read_text()) | {key: value}
    (path / file).write_text(json.dumps(content))
    if says:
        refused(path, says)
        refused(path, file)
    else:
        attempt(path, plan=False)


def test_a_tokenizer_whose_token_for_the_unknown_is_missing(seeds: Path, tmp_path: Path) -> None:
    """Text that does not need the missing token is accepted; other text is rejected with an error sentence."""
    path = tmp_path / "model"
    subprocess.run(["cp", "-r", seeds / "folder-llama", path], check=True)
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["unk_token"] = "gone"
    (path / "tokenizer.json").write_text(json.dumps(content))
    attempt(path, plan=False)
    tokenizer = load_tokenizer(path)
    known = tokenizer.encode("the")
    assert tokenizer.decode(known) == "the"
    literal = LiteralText(tokenizer)
    assert literal.encode("the", False) == known
    for encode in (tokenizer.encode, literal.encode):
        with pytest.raises(RequestError, match=r"tokenizer cannot encode this text .*gone"):
            encode("the\n", False)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"[]", b'{"a": ' + b"9" * 5000 + b"}", b""])
def test_json_files_of_other_shapes(file: str, content: bytes, seeds: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    subprocess.run(["cp", "-r", seeds / "folder-llama", path], check=True)
    (path / file).write_bytes(content)
    refused(path, file)


@pytest.mark.parametrize(("entry", "says"), [
    ({"dtype": ["F32"]}, "has type ['F32']"), ({"data_offsets": []}, "has data_offsets []"),
    ({"data_offsets": [0, 1, 2]}, "has data_offsets [0, 1, 2]"), ({"shape": 7}, "has shape 7"),
    ({"shape": [-1, 5]}, "has shape [-1, 5]"), ({"shape": [2**30] * 3}, "do not fit F32"),
    ({"data_offsets": [-8, 0]}, "do not fit F32"), (None, "is None"),
])
def test_safetensors_headers(entry: dict[str, Any] | None, says: str, seeds: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    subprocess.run(["cp", "-r", seeds / "folder-qwen2", path], check=True)
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + length])
    header["lm_head.weight"] = None if entry is None else header["lm_head.weight"] | entry
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length:])
    refused(path, says)
    encoded = b"[" * 50_000
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    refused(path, "model.safetensors has a corrupt header")
