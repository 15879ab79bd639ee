"""Log probabilities of a prompt's end are those of the whole prompt, also after a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.errors import RequestError
from support.models.text_model import write_text_model

IDS = [(7 * n) % 250 for n in range(90)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("scored")
    write_text_model(folder)
    with LLM(folder, max_model_len=256, max_num_batched_tokens=24, num_gpu_blocks_override=100) as loaded:
        yield loaded


def scored(llm: LLM, start: int, ids: list[int] = IDS):  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=start)
    return llm.generate([ids], params, use_tqdm=False)[0]


@pytest.mark.parametrize("start", [0, 1, 2, 16, 17, 24, 25, 48, 60, 88, 89, 90, 200])
def test_the_end_has_the_numbers_of_the_whole(llm: LLM, start: int) -> None:
    llm.reset_prefix_cache()
    whole = scored(llm, 0)
    assert whole.sources.device == 0, "all of it was scored"
    part = scored(llm, start)
    assert len(part.prompt_logprobs) == len(IDS)
    assert part.prompt_logprobs[:start] == [None] * min(start, len(IDS))
    assert part.prompt_logprobs[max(1, start):] == whole.prompt_logprobs[max(1, start):]
    assert part.outputs[0].token_ids == whole.outputs[0].token_ids
    # The token before the first scored one is always computed, and blocks have 16 tokens.
    assert part.sources.device == 16 * ((min(max(1, start), len(IDS)) - 1) // 16)


def test_preempted_requests_are_scored_anew(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    prompts = [[(3 * n + k) % 250 for n in range(60)] for k in range(6)]
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=0, prompt_logprobs_start=40, ignore_eos=True)
    rows = []
    for blocks in (200, 14):
        with LLM(tmp_path, max_model_len=128, num_gpu_blocks_override=blocks, watermark=0) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            rows.append([output.prompt_logprobs for output in outputs])
            preempted = sum(output.num_preemptions for output in outputs)
    assert preempted > 0
    assert rows[0] == rows[1]
    assert all(len(each) == 60 and each[39] is None and each[40] is not None for each in rows[0])


def test_the_observer_sees_the_logits_behind_the_numbers(llm: LLM) -> None:
    llm.reset_prefix_cache()
    seen: dict[int, torch.Tensor] = {}
    llm.observe_prompt_logits(lambda prompt, position, logits: seen.update(
        {position + row: torch.log_softmax(each.float(), -1) for row, each in enumerate(logits)
         if list(prompt) == IDS}))
    try:
        output = scored(llm, 30)
    finally:
        llm.observe_prompt_logits(None)
    assert sorted(seen) == list(range(30, 90))
    for position, row in seen.items():
        assert row[IDS[position]].item() == output.prompt_logprobs[position][IDS[position]].logprob
    seen.clear()
    scored(llm, 30)
    assert not seen


def test_a_start_below_0_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs_start must be at least 0"):
        SamplingParams(prompt_logprobs_start=-1)
