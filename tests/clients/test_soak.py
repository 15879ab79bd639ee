"""A few hundred random requests, valid, invalid and abandoned, all at once; `benchmarks/soak.py` runs thousands."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from request_shapes import Shapes
from server_process import ServerProcess
from soak import growth, soak

from spillover.models.tokenizer import Tokenizer

SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
         "torch_dtype": "float32"}


@pytest.mark.parametrize(("load_format", "requests"), [("null", 500), ("dummy", 120)])
def test_nothing_breaks_or_leaks(load_format: str, requests: int, tokenizer: Tokenizer, tokenizer_folder: Path,
                                 tmp_path: Path) -> None:
    """Nothing breaks or leaks with a null model, or with few dummy layers, which compute everything requested."""
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"vocab_size": tokenizer.vocab_size}))
    with ServerProcess(str(tmp_path), "--load-format", load_format, "--max-model-len", "1024",
                       "--num-gpu-blocks-override", "256") as server:
        shapes = Shapes(seed=1, max_model_len=1024, max_tokens=12)
        findings = asyncio.run(soak(server, shapes, requests, concurrency=64, weigh=False))
        assert not findings.problems, "\n".join(findings.problems[:10])
        assert findings.streams > requests // 10
        assert findings.hung_up > 0


def test_growth_is_measured_from_the_warm_state() -> None:
    def at(requests: int, front: float, engine: float) -> dict[str, float]:
        return {"requests": requests, "front": front, "engine": engine}

    assert not growth([at(50, 10, 10), at(100, 200, 300), at(1000, 219, 324)], warm=100)
    assert len(growth([at(100, 200, 300), at(1000, 250, 400)], warm=100)) == 2
