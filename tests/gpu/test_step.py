"""On a CUDA device: graphs and early launches change no token, batches no bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 5003, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "eos_token_id": 3, "torch_dtype": "float32", "tie_word_embeddings": True,
}
LENGTHS = (700, 3, 130, 64, 1, 255, 400)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5003) for _ in range(length)] for length in LENGTHS]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def generate(folder: str, asked: list[list[int]], tokens: int = 24, temperature: float = 0.0,
             **flags: Any) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each request and their log probabilities."""
    params = [SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, logprobs=0, seed=index)
              for index in range(len(asked))]
    flags = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 1024, "gpu_memory": "4GB", **flags}
    with LLM(folder, device="cuda", load_format="dummy", skip_tokenizer_init=True, **flags) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(list(each.token_ids), [row[token].logprob for row, token in zip(each.logprobs, each.token_ids,
                                                                             strict=True)]) for each in answers]


def test_graphs_change_no_token(folder: str) -> None:
    plain = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, seed=7)

    def tokens(**flags: Any) -> list[list[int]]:
        with LLM(folder, device="cuda", load_format="dummy", skip_tokenizer_init=True, dtype="float32",
                 max_num_seqs=16, max_model_len=1024, gpu_memory="4GB", **flags) as llm:
            outputs = llm.generate(prompts(), plain, use_tqdm=False)
            stats = llm.engine.runner.graph_stats
            assert (stats is None) == flags.get("enforce_eager", False)
            if stats is not None:
                assert stats.graphs > 0
            return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens() == tokens(enforce_eager=True) == tokens(graph_capture="start")


def test_a_request_has_the_same_bits_whatever_runs_beside_it(folder: str) -> None:
    """Alone, with others, with other chunks, and preempted, a request has the same bits."""
    together = generate(folder, prompts(), dtype="bfloat16")
    small = generate(folder, prompts(), dtype="bfloat16", max_num_batched_tokens=37)
    assert small == together
    scarce = generate(folder, prompts(), dtype="bfloat16", gpu_memory=None,
                      num_gpu_blocks_override=80, watermark=0.0)
    assert scarce == together
    for index, prompt in enumerate(prompts()):
        if index:  # the seed of a request is its index
            alone = generate(folder, [[1]] * index + [prompt], dtype="bfloat16")[index]
            assert alone == together[index]


def test_tokens_are_those_of_the_fast_kernels_in_float32(folder: str) -> None:
    fast = generate(folder, prompts(), fast=True)
    assert [tokens for tokens, _ in generate(folder, prompts())] == [tokens for tokens, _ in fast]


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_narrow_kv_stays_close(folder: str, kv_dtype: str) -> None:
    """The first token's log probability, before different tokens cause divergence, stays close."""
    wide = generate(folder, prompts(), tokens=1)
    narrow = generate(folder, prompts(), tokens=1, kv_cache_dtype=kv_dtype)
    for (_, (expected,)), (_, (found,)) in zip(wide, narrow, strict=True):
        assert found == pytest.approx(expected, abs=0.1)
