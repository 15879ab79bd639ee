"""An EAGLE-3 head trained on a model's answers drafts as trained, and some of its drafts are accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from spillover import LLM, SamplingParams
from spillover.errors import SpilloverError
from spillover.models.registry import read_architecture
from spillover.training import train_head
from spillover.training.head_student import HeadStudent
from spillover.training.teacher import Teacher
from spillover.training.train import Trained, TrainOptions, train
from support.models.eagle_heads import ReferenceHead, predictable
from support.models.text_model import write_text_model

OPTIONS = TrainOptions(method="eagle3", draft_vocab=200, steps=24, batch_tokens=512, learning_rate=3e-3, answers=40,
                       prompt_tokens=24, answer_tokens=24, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    made = write_text_model(folder, layers=4)
    predictable(made)
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.txt"
    file.write_text("\n".join(f"What is {n} and {n}?" for n in range(20)))
    return file


@pytest.fixture(scope="module")
def trained(folder: Path, target: PreTrainedModel, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(str(folder), tmp_path_factory.mktemp("heads") / "head", OPTIONS, data)


def test_the_loss_falls_and_drafts_change_no_text(folder: Path, trained: Trained) -> None:
    assert trained.last_loss < 0.9 * trained.first_loss
    assert 0 < trained.covered <= 1
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [f"What is {n} and {n}?" for n in range(6)]
    with LLM(folder, device="cpu", max_model_len=128) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with LLM(folder, device="cpu", max_model_len=128, speculative_method="eagle3", speculative_adaptive=False,
             speculative_model=str(trained.folder)) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats().speculation
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert stats is not None
    assert stats.counts.accepted > 0.02 * stats.counts.tokens  # random drafts: 0.005


def test_passes_are_trained_as_they_draft(folder: Path, target: PreTrainedModel, trained: Trained) -> None:
    """Row p of pass n equals the reference's draft that began at p - n."""
    hf = json.loads((trained.folder / "config.json").read_text())
    stored = {name: weight.float() if weight.is_floating_point() else weight
              for name, weight in load_file(trained.folder / "model.safetensors").items()}
    _, config = read_architecture(json.loads((folder / "config.json").read_text()), folder)
    student = HeadStudent(config, hf, 32, torch.device("cpu"))
    student.load_state_dict({".".join(name.split(".")[-2:]): weight for name, weight in stored.items()
                             if weight.is_floating_point()})
    with torch.no_grad():
        student.get_buffer("embedded").copy_(target.get_input_embeddings().weight)
    reference = ReferenceHead(target, {**hf, **hf["eagle_config"]}, stored)
    tokens = list(range(70, 90))
    features = reference.features(tokens)
    with torch.no_grad():
        said = student(torch.tensor([tokens]), features[None], 3)
        fused = torch.nn.functional.pad(reference.fused(features)[:-1], (0, 0, 1, 0))
        for end in (5, 12, 19):
            before = fused[:end + 1].clone()
            for number in range(3):
                row = end - 2 + number
                logits, stands_in = reference.rows(torch.tensor(tokens[:row + 1]), before[:row + 1])
                mine = student.logits(said[number][0, row])
                torch.testing.assert_close(mine, logits[-1], atol=2e-4, rtol=1e-3)
                if number < 2:
                    before[row + 1] = stands_in[-1]


def test_the_teacher_shows_the_hidden_states_of_the_model(folder: Path, target: PreTrainedModel) -> None:
    teacher = Teacher(str(folder), [0, 2, 3], 24, "cpu", None)
    try:
        for count in (24, 1, 7):
            tokens = list(range(60, 60 + count))
            with torch.no_grad():
                found = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            expected = torch.cat([found[layer][0] for layer in (0, 2, 3)], dim=-1)
            torch.testing.assert_close(teacher.features(tokens), expected, atol=1e-3, rtol=1e-3)
    finally:
        teacher.close()


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(
    folder: Path, data: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss, calls = train_head.HeadTraining._loss, 0

    def stops(training: train_head.HeadTraining, some: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 15:
            raise KeyboardInterrupt
        return loss(training, some)  # type: ignore[arg-type]

    monkeypatch.setattr(train_head.HeadTraining, "_loss", stops)
    with pytest.raises(KeyboardInterrupt):
        train(str(folder), tmp_path / "head", OPTIONS, data)
    monkeypatch.setattr(train_head.HeadTraining, "_loss", loss)
    with pytest.raises(SpilloverError, match="another method"):
        train(str(folder), tmp_path / "head", replace(OPTIONS, method="draft_model"), data, resume=True)
    train(str(folder), tmp_path / "head", OPTIONS, data, resume=True)
    mine, theirs = (load_file(where / "model.safetensors") for where in (tmp_path / "head", trained.folder))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


def test_a_head_has_one_layer() -> None:
    with pytest.raises(SpilloverError, match="leave --layers out"):
        TrainOptions(method="eagle3", layers=3)
