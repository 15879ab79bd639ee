"""A run recorded as steps gives the same tokens when another process replays it, without a scheduler."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, RequestOutput, SamplingParams
from spillover.engine import replay
from spillover.engine.requests.token_ids import token_array
from spillover.engine.step import NewRequest, Phase, Step, StepItem, StepResult, decode_step, encode_step
from support.models.tiny_configs import WINDOWED as MODEL

VOCAB = 97


def params_of_all_kinds() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=2, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.3, logit_bias={5: 2.0}, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=5, n=2, max_tokens=8, ignore_eos=True),
    ]


def check_replay(folder: Path, device: str, **flags: Any) -> None:
    """Check a run with chunked prompts, two layer groups, shared prompts, preemption, and every way to sample."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    outputs, results = run_and_replay(folder, prompts, params_of_all_kinds(), device=device, max_num_seqs=4,
                                      max_num_batched_tokens=16, max_model_len=64, num_gpu_blocks_override=14, **flags)
    assert flags or sum(output.num_preemptions for output in outputs) > 0
    steps = replay.read(folder / "run.steps")[1]
    assert {item.phase for step in steps for item in step.items} == (
        {Phase.PREFILL, Phase.DECODE, Phase.VERIFY} if flags else {Phase.PREFILL, Phase.DECODE})
    assert sum(map(len, (tokens for result in results for tokens in result))) > 40


def run_and_replay(folder: Path, prompts: list[list[int]], params: list[SamplingParams] | SamplingParams,
                   **flags: Any) -> tuple[list[RequestOutput], list[list[tuple[int, ...]]]]:
    """Return the outputs and the tokens of each step, after checking that another process gives the same tokens."""
    results: list[list[tuple[int, ...]]] = []
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, block_size=8, watermark=0.0, **flags) as llm:
        finish = llm.engine.scheduler.finish

        def noted(step: Step, result: StepResult) -> object:
            results.append(result.token_ids)
            return finish(step, result)

        llm.engine.scheduler.finish = noted  # type: ignore[method-assign,assignment]
        with replay.recorded(llm.engine, llm.config, llm.plan, folder / "run.steps"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
    done = subprocess.run([sys.executable, "-m", "spillover.engine.replay", str(folder / "run.steps")],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    played = [[tuple(tokens) for tokens in json.loads(line)] for line in done.stdout.splitlines()]
    assert played == results
    return outputs, results


def test_a_runner_in_another_process_gives_the_same_tokens(tmp_path: Path) -> None:
    check_replay(tmp_path, "cpu")


DRAFTS = {"speculative_method": "suffix", "num_speculative_tokens": 4, "speculative_adaptive": False}


def test_verified_drafts_are_played_too(tmp_path: Path) -> None:
    check_replay(tmp_path, "cpu", **DRAFTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_verified_drafts_are_played_too_on_a_gpu(tmp_path: Path) -> None:
    check_replay(tmp_path, "cuda", **DRAFTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_runner_in_another_process_gives_the_same_tokens_on_a_gpu(tmp_path: Path) -> None:
    check_replay(tmp_path, "cuda")


def check_offloaded(folder: Path, device: str) -> None:
    """Check a run with sequences longer than the pool between short ones."""
    model = {**MODEL, "use_sliding_window": False, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(model))
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (40, 420, 30, 380)]
    flags: dict[str, Any] = {"max_num_batched_tokens": 64, "max_model_len": 512, "num_gpu_blocks_override": 48,
                             "host_memory": "64MB", "restore": "never"}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True)
    outputs, _ = run_and_replay(folder, prompts, params, device=device, **flags)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 4
    steps = replay.read(folder / "run.steps")[1]
    sequences = {item.id for step in steps for item in step.items if item.host_blocks}
    assert len(sequences) == 2
    assert max(slot for step in steps for item in step.items for slot in item.host_blocks) < 1000  # no addresses


def test_offloaded_blocks_are_played_from_another_host_memory(tmp_path: Path) -> None:
    check_offloaded(tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_blocks_are_played_from_another_host_memory_on_a_gpu(tmp_path: Path) -> None:
    check_offloaded(tmp_path, "cuda")


def test_draft_tokens_that_the_model_would_sample_are_accepted(tmp_path: Path) -> None:
    """A verify step built by hand gives the tokens of plain decoding, whatever the draft."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "use_sliding_window": False}))
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, block_size=8,
             max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64) as llm:
        wanted = list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        runner = llm.engine.runner
        new = NewRequest(10**6, token_array(prompt), len(prompt), params, 3, ())
        blocks = ((1, 2),)
        first = StepItem(id=new.id, phase=Phase.PREFILL, start=0, count=4, num_samples=1, first_block=0,
                         new_blocks=blocks)
        (result,) = list(replay.play(runner, [Step((first,), (new,))]))
        assert result.token_ids == [(wanted[0],)]
        drafts = (wanted[1], wanted[2], (wanted[3] + 1) % VOCAB)
        verify = StepItem(id=new.id, phase=Phase.VERIFY, start=4, count=4, num_samples=4, first_block=2,
                          new_blocks=((),), draft=drafts)
        (result,) = list(replay.play(runner, [decode_step(encode_step(Step((verify,))))]))
        assert result.token_ids == [tuple(wanted[1:4])]
        again = StepItem(id=new.id, phase=Phase.DECODE, start=7, count=1, num_samples=1, first_block=2,
                         new_blocks=((),))
        (result,) = list(replay.play(runner, [Step((again,))]))
        assert result.token_ids == [(wanted[4],)]
