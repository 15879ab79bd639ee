"""Text generated before a restart is used for drafts after it, as without a restart; never across salts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import DraftCounts, RequestOutput
from spillover.engine.speculation.drafters.suffix import SuffixDrafter
from spillover.memory.tiers.folder import TOKENS
from support.models.text_model import write_text_model

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder)
    return folder


def load(model: Path, **flags: Any) -> LLM:
    return LLM(model, device="cpu", block_size=8, max_model_len=128, speculative_method="suffix",
               speculative_adaptive=False, num_gpu_blocks_override=64, host_memory="1MB", **flags)


def ask(llm: LLM, salt: str | None = None) -> list[RequestOutput]:
    rng = random.Random(4)
    prompts = [[rng.randrange(256) for _ in range(20)] for _ in range(5)]
    return [llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False, cache_salt=salt)[0]
            for prompt in prompts]


def accepted(outputs: list[RequestOutput]) -> list[DraftCounts]:
    return [output.drafts for output in outputs]


def said(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_acceptance_after_a_restart_is_that_before(model: Path, tmp_path: Path) -> None:
    with load(model, disk=[f"{tmp_path}/one:64MB"]) as llm:
        first, again = ask(llm), ask(llm)
    with load(model, disk=[f"{tmp_path}/two:64MB"]) as llm:
        ask(llm)
    (kept,) = (tmp_path / "two").glob(f"*/{TOKENS}")
    assert kept.stat().st_size > 4 * 5 * 60
    with load(model, disk=[f"{tmp_path}/two:64MB"]) as llm:
        restarted = ask(llm)
        foreign = ask(llm, "somebody else")
    assert said(first) == said(again) == said(restarted) == said(foreign)
    assert accepted(restarted) == accepted(again)
    counts = sum(accepted(restarted), DraftCounts())
    assert counts.accepted > 0.9 * counts.tokens
    assert accepted(foreign) == accepted(first), "nothing of one salt is drafted under another"


def test_damaged_tokens_change_no_text_and_without_a_disk_nothing_is_kept(model: Path, tmp_path: Path) -> None:
    with load(model, disk=[f"{tmp_path}/one:64MB"]) as llm:
        plain = ask(llm)
    (kept,) = (tmp_path / "one").glob(f"*/{TOKENS}")
    data = bytearray(kept.read_bytes())
    for at in range(50, len(data), 97):
        data[at] ^= 0x55
    kept.write_bytes(data)
    with load(model, disk=[f"{tmp_path}/one:64MB"]) as llm:
        assert said(ask(llm)) == said(plain)
    with load(model) as llm:
        drafter = llm.engine.scheduler.speculator._drafter
        assert isinstance(drafter, SuffixDrafter)
        assert drafter._log is None
