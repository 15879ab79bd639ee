"""On a CUDA device: quantised KV, and sequences longer than the pool, whose first blocks stream from host memory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.engine.batch.offloaded_prefix import OffloadStage, StagedPrefix
from spillover.engine.step import StepItem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KINDS = ["fp8", "int8"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000, "max_position_embeddings": 16384, "tie_word_embeddings": True, "hidden_act": "silu",
    "eos_token_id": 2,
}


def generate(folder: Path, prompts: list[list[int]], **flags: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), device="cuda", load_format="dummy", dtype="float32", skip_tokenizer_init=True,
             watermark=0.0, **flags) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_chunks(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 90))] for _ in range(12)]
    flags: dict[str, Any] = {"max_model_len": 256, "kv_cache_dtype": kind, "gpu_memory": "2GB"}
    found = generate(tmp_path, prompts, **flags)
    for chunk in (37, 512):
        assert generate(tmp_path, prompts, **flags, max_num_batched_tokens=chunk) == found


@pytest.mark.parametrize("flags", [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}],
                         ids=["auto", "fp8", "int8"])
def test_a_sequence_longer_than_the_pool_has_the_same_tokens(flags: dict[str, str], tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    rng = random.Random(2)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (9000, 90, 5001)]
    resident = generate(tmp_path, prompts, max_model_len=12288, gpu_memory="2GB", **flags)
    offloaded: list[int] = []
    original = OffloadStage.prefix

    def prefix(stage: OffloadStage, item: StepItem) -> StagedPrefix:
        offloaded.append(len(item.host_blocks))
        return original(stage, item)

    monkeypatch.setattr(OffloadStage, "prefix", prefix)
    streamed = generate(tmp_path, prompts, max_model_len=12288, max_num_batched_tokens=1024, host_memory="1GB",
                        num_gpu_blocks_override=160, **flags)
    assert max(offloaded) * 16 > 4096 + 1024  # more than one segment
    assert streamed == resident
    assert [len(tokens) for tokens in streamed] == [24] * 3
