"""KL divergence and top-1 agreement with a reference: as defined, 0 for a model and itself, and stored on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from spillover import LLM
from spillover.errors import SpilloverError
from spillover.eval.divergence import FullReference, TopReference, divergence, least_divergence
from spillover.eval.in_process import EngineTarget
from spillover.eval.target import Prompt
from support.models.text_model import BOS, TEXT, write_text_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, reference: PreTrainedModel) -> PreTrainedModel:
    """Return a model with slightly changed weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    made = write_text_model(folder)
    with torch.no_grad():
        for weight in made.parameters():
            weight += 0.02 * torch.randn_like(weight)
    made.save_pretrained(folder)
    made.folder = folder
    return made


@pytest.fixture(scope="module")
def other(other_model: PreTrainedModel) -> Iterator[EngineTarget]:
    made = EngineTarget(LLM(other_model.folder, max_model_len=1024, max_num_batched_tokens=64,
                            num_gpu_blocks_override=200), "other")
    yield made
    made.close()


@pytest.fixture(scope="module")
def windows(target: EngineTarget) -> dict[str, Prompt]:
    ids = [BOS, *target.encode(TEXT, False)]
    return {"0.0": Prompt(ids[:180], 1), "0.1": Prompt(ids[90:270], 90), "0.2": Prompt(ids[90:270], 90)}


def test_divergence_is_that_of_the_definition(target: EngineTarget, other: EngineTarget, reference: PreTrainedModel,
                                              other_model: PreTrainedModel, windows: dict[str, Prompt],
                                              tmp_path: Path) -> None:
    stored = FullReference(tmp_path, "tiny")
    stored.prepare(target, windows, 2)
    for name, prompt in windows.items():
        with torch.no_grad():
            logits = [each(torch.tensor([prompt.token_ids])).logits[0].double() for each in (reference, other_model)]
        p, q = (torch.log_softmax(each, -1)[prompt.start - 1:-1] for each in logits)
        logprobs, found = stored.compare(other, name, prompt)
        tokens = torch.tensor(prompt.token_ids[prompt.start:])
        assert logprobs == pytest.approx(q.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-3)
        expected = (p.exp() * (p - q)).sum().item()
        assert expected / len(tokens) > 1e-3
        assert found["kl"] == pytest.approx(expected, rel=2e-3)
        assert found["same_top"] == (p.argmax(-1) == q.argmax(-1)).sum().item() < len(tokens)
        assert found["reference_logprob"] == pytest.approx(p.gather(1, tokens[:, None]).sum().item(), rel=1e-4)


def test_a_model_does_not_diverge_from_itself(target: EngineTarget, windows: dict[str, Prompt], tmp_path: Path) -> None:
    stored = FullReference(tmp_path, "tiny")
    stored.prepare(target, windows, 2)
    for name, prompt in windows.items():
        count = len(prompt.token_ids) - prompt.start
        _, found = stored.compare(target, name, prompt)
        assert found["same_top"] == count
        assert 0 <= found["kl"] / count < 1e-6


def test_float16_is_normalised_again() -> None:
    logits = 5 * torch.randn(8, 1000)
    stored = torch.log_softmax(logits, -1).half()
    assert (stored.float().exp().sum(-1) - 1).abs().max() > 1e-5
    assert divergence(stored, logits).abs().max() < 1e-6


def test_the_likeliest_tokens_bound_the_divergence_from_below(
        target: EngineTarget, other: EngineTarget, windows: dict[str, Prompt], tmp_path: Path) -> None:
    full, top = FullReference(tmp_path / "full", "tiny"), TopReference(tmp_path / "top", "tiny")
    for each in (full, top):
        each.prepare(target, windows, 2)
    for name, prompt in windows.items():
        (exact, whole), (also, bound) = full.compare(other, name, prompt), top.compare(other, name, prompt)
        assert exact == also
        assert 0 < bound["kl"] < whole["kl"]
        assert bound["same_top"] == whole["same_top"]
        assert bound["reference_logprob"] == pytest.approx(whole["reference_logprob"])


def test_tokens_that_not_both_name_count_as_one() -> None:
    p = {1: math.log(0.5), 2: math.log(0.3)}  # 0.2 on other tokens
    q = {1: math.log(0.4), 3: math.log(0.3)}
    assert least_divergence(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    assert least_divergence(p, p) == 0


def test_what_the_reference_said_is_used_again(target: EngineTarget, windows: dict[str, Prompt],
                                               tmp_path: Path) -> None:
    stored = FullReference(tmp_path, "tiny")
    settings = {"window": 180}
    assert not stored.has(settings, 2)
    stored.prepare(target, windows, 2)
    stored.note(settings, 3, False)
    again = FullReference(tmp_path, "tiny")
    assert again.has(settings, 3)
    assert not again.has(settings, 4)
    assert not again.has(settings, None)
    assert not again.has({"window": 90}, 3)
    again.prepare(None, windows, 1)  # type: ignore[arg-type]  # complete, so that no target is needed
    with pytest.raises(SpilloverError, match="has results with another reference"):
        FullReference(tmp_path, "bigger").prepare(target, windows, 1)
    with pytest.raises(SpilloverError, match="has results with another prompt"):
        again.prepare(target, {"0.0": Prompt([BOS, 5], 1)}, 1)
    with pytest.raises(SpilloverError, match="has results with another kind"):
        TopReference(tmp_path, "tiny").prepare(target, windows, 1)
