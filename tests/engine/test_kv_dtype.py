"""Device KV with one byte per value, and sequences longer than the pool: the same tokens however they are computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.batch.offloaded_prefix import OffloadStage, StagedPrefix
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.step import StepItem
from spillover.models.hub.store import resolve
from support.models.hf_reference import VOCAB, save_checkpoint, tiny_model

KINDS = ["fp8", "int8"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000, "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
    "eos_token_id": 2,
}


def params(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **options)


def scores(output: RequestOutput) -> list[tuple[int, float]]:
    """Return the tokens with their log probabilities, in which a difference of a single bit is visible."""
    drawn, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert rows is not None
    return [(token, row[token].logprob) for token, row in zip(drawn, rows, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_oss"])
def test_tokens_depend_neither_on_chunks_nor_on_the_batch(architecture: str, kind: str, tmp_path: Path) -> None:
    hf, _ = tiny_model(architecture, seed=7)
    folder = str(save_checkpoint(hf, tmp_path))
    rng = random.Random(architecture)
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    prompts = [shared[: rng.randint(0, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
               for _ in range(12)]
    flags: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128,
                             "kv_cache_dtype": kind, "num_gpu_blocks_override": 120, "watermark": 0.0}
    wanted = params(16, logprobs=0)
    with LLM(folder, **flags, enable_prefix_caching=False) as llm:
        alone = [scores(llm.generate(prompt, wanted, use_tqdm=False)[0]) for prompt in prompts]
    with LLM(folder, **flags, max_num_batched_tokens=13) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts, wanted, use_tqdm=False)
            assert [scores(output) for output in outputs] == alone
        assert sum(output.sources.device for output in outputs) > 0


def test_a_block_takes_a_byte_a_value_and_a_scale_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plans = {}
    for kind in ("auto", *KINDS):
        with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=512,
                 kv_cache_dtype=kind, num_gpu_blocks_override=64) as llm:
            plans[kind] = llm.plan
            pool = llm.engine.runner.kv.pool  # type: ignore[attr-defined]
            assert pool[0].nbytes == llm.plan.block_bytes
            assert pool.nbytes == llm.plan.kv_bytes
    assert plans["auto"].block_bytes == 3 * 2 * 2 * 16 * 16 * 4
    assert plans["fp8"].block_bytes == plans["int8"].block_bytes == 3 * 2 * 2 * 16 * (16 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_the_default_model_stays_near(kind: str) -> None:
    """Log probabilities of a text under a quantised cache stay close to those under a full one."""
    resolve(None)
    text = "The steam engine changed how people worked, travelled and lived. It turned heat into motion, and " * 3
    found = []
    for flags in ({}, {"kv_cache_dtype": kind}):
        with LLM(max_model_len=256, **flags) as llm:  # type: ignore[arg-type]
            output = llm.generate(text, params(1, prompt_logprobs=0), use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        found.append([row[token].logprob for row, token in
                      zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True) if row is not None])
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    mean = sum(differences) / len(differences)
    assert 0 < mean < 0.08


@pytest.mark.parametrize(("kind", "in_place"), [("auto", True), ("auto", False), ("fp8", True), ("int8", False)])
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_a_sequence_longer_than_the_pool_has_the_same_bits(block_size: int, kind: str, in_place: bool, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are equal for blocks read in place in host memory, and for blocks copied through the stage."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    rng = random.Random(block_size)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (1100, 90, 1700)]
    flags: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_dtype": kind,
                             "block_size": block_size, "max_model_len": 2048, "watermark": 0.0}
    wanted = params(24, logprobs=0)
    with LLM(str(tmp_path), **flags) as llm:
        resident = [scores(output) for output in llm.generate(prompts, wanted, use_tqdm=False)]
    offloaded: list[int] = []
    original = OffloadStage.prefix

    def prefix(stage: OffloadStage, item: StepItem) -> StagedPrefix:
        offloaded.append(len(item.host_blocks))
        assert stage.in_place
        stage.in_place = in_place
        made = original(stage, item)
        stage.in_place = True
        return made

    monkeypatch.setattr(OffloadStage, "prefix", prefix)
    with LLM(str(tmp_path), **flags, max_num_batched_tokens=192, host_memory="200MB",
             num_gpu_blocks_override=640 // block_size) as llm:
        assert llm.plan.offloaded_blocks > 0
        outputs = llm.generate(prompts, wanted, use_tqdm=False)
    assert [scores(output) for output in outputs] == resident
    assert max(offloaded) * block_size > 1000
