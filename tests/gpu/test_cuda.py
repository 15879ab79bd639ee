"""On a CUDA device: the same tokens as transformers, and never more memory than planned."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from support.models.hf_reference import VOCAB, all_architectures, greedy, save_checkpoint, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151645,
}


@pytest.mark.parametrize("name", all_architectures())
def test_float32_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model, _ = tiny_model(name, seed=5)
    folder = save_checkpoint(model, tmp_path)
    rng = random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(12)]
    lengths = [rng.randint(1, 32) for _ in prompts]
    expected = [greedy(model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    for chunk in (13, 512):
        with LLM(str(folder), device="cuda", skip_tokenizer_init=True, max_num_batched_tokens=chunk, block_size=8,
                 num_gpu_blocks_override=120, max_model_len=128, watermark=0.0) as llm:
            assert llm.plan.device == "cuda"
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("name", all_architectures())
def test_bfloat16_logits_are_as_close_to_float32_as_bfloat16_is_on_the_cpu(name: str, tmp_path: Path) -> None:
    model, _ = tiny_model(name, seed=5)
    folder = save_checkpoint(model, tmp_path)
    rng = random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (60, 7, 33)]

    def scores(device: str, dtype: str) -> torch.Tensor:
        """Return the log probability of every prompt token but the first."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        with LLM(str(folder), device=device, dtype=dtype, skip_tokenizer_init=True, max_model_len=128, block_size=8,
                 num_gpu_blocks_override=120) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return torch.tensor([row[token].logprob for output, prompt in zip(outputs, prompts, strict=True)
                             for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])

    exact = scores("cpu", "float32")
    usual = (scores("cpu", "bfloat16") - exact).abs().mean()
    found = (scores("cuda", "bfloat16") - exact).abs().mean()
    assert found < 2 * usual + 0.01


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    rng = random.Random(0)
    prompts = [[rng.randrange(100_000) for _ in range(rng.randint(10, 700))] for _ in range(96)]
    params = [SamplingParams(temperature=rng.choice([0.0, 0.8]), top_p=0.9, max_tokens=rng.randint(1, 40),
                             ignore_eos=True) for _ in prompts]
    with LLM(str(tmp_path), device="cuda", load_format="dummy", skip_tokenizer_init=True, gpu_memory="4GB",
             max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=64) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        used, taken = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved() - kept
        print(f"plan {llm.plan.device_bytes / 1e9:.2f} GB, peak {used / 1e9:.2f} GB, torch keeps {taken / 1e9:.2f} GB")
        assert used <= llm.plan.device_bytes <= 4_000_000_000
        assert taken <= 4_000_000_000  # includes gaps between tensors
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]


@pytest.mark.parametrize("flags", [{}, {"weights": "sequential"}, {"enforce_eager": True}], ids=str)
def test_a_closed_engine_that_is_still_held_holds_no_memory(flags: dict[str, Any], tmp_path: Path) -> None:
    """A closed engine that is still referenced has freed its memory for the next one in the process."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    gc.collect()
    before = torch.cuda.memory_allocated()
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, gpu_memory="3GB", max_model_len=512,
             **flags) as llm:
        llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert torch.cuda.memory_allocated() - before > 1 << 30
    assert torch.cuda.memory_allocated() - before < 128 << 20
    llm.close()
