"""A draft model trained on a model's answers is loaded, drafts, and some of its drafts are accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from spillover import LLM, SamplingParams
from spillover.cli.main import main
from spillover.errors import SpilloverError
from spillover.models.architectures import llama
from spillover.training.answers import Answers
from spillover.training.student import Student
from spillover.training.train import Trained, TrainOptions, train
from support.models.text_model import write_text_model

OPTIONS = TrainOptions(layers=1, draft_vocab=200, steps=40, batch_tokens=512, learning_rate=3e-3, answers=40,
                       prompt_tokens=24, answer_tokens=24, device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_text_model(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    entries: list[Any] = [f"What is {n} and {n}?" for n in range(10)]
    entries += [{"conversations": [{"from": "human", "value": f"Tell {n}"}, {"from": "gpt", "value": "No."}]}
                for n in range(10)]
    file.write_text("\n".join(map(json.dumps, entries)))
    return file


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(str(model), tmp_path_factory.mktemp("drafts") / "draft", OPTIONS, data)


def test_the_loss_falls_and_drafts_are_accepted(model: Path, trained: Trained) -> None:
    assert trained.last_loss < 0.8 * trained.first_loss
    assert trained.agreement > 0.1
    assert 0 < trained.covered <= 1
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [f"What is {n} and {n + 1}?" for n in range(8)]
    with LLM(model, device="cpu", max_model_len=128) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with LLM(model, device="cpu", max_model_len=128, speculative_model=str(trained.folder),
             speculative_adaptive=False) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats().speculation
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert stats is not None
    assert stats.counts.accepted > 0.05 * stats.counts.tokens


def test_what_is_written_computes_what_was_trained(trained: Trained) -> None:
    """The engine's log probabilities for the folder are those of the decoder in plain torch."""
    hf = json.loads((trained.folder / "config.json").read_text())
    student = Student(hf, 32, torch.device("cpu"))
    stored = load_file(trained.folder / "model.safetensors")
    names = {name.replace("self_attn.", "").replace("mlp.", "").removeprefix("model."): weight
             for name, weight in stored.items()}
    student.load_state_dict({name: weight.float() for name, weight in names.items()})
    assert llama.config(hf).vocab_size == OPTIONS.draft_vocab + 1
    ids = list(range(5, 25))
    with torch.no_grad():
        logprobs = student.logits(student(torch.tensor([ids]))[0]).log_softmax(-1)
    with LLM(trained.folder, device="cpu", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for position in range(1, len(ids)):
        said = output.prompt_logprobs[position]
        assert said is not None
        assert said[ids[position]].logprob == pytest.approx(float(logprobs[position - 1, ids[position]]), abs=1e-3)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(model: Path, data: Path, trained: Trained,
                                                             tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "draft"
    seen: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("Training"):
            seen.append(done)
            if done == 20:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(str(model), folder, OPTIONS, data, show=stop)
    with pytest.raises(SpilloverError, match="--resume"):
        train(str(model), folder, OPTIONS, data)
    with pytest.raises(SpilloverError, match="another layers"):
        train(str(model), folder, replace(OPTIONS, layers=2), data, resume=True)
    monkeypatch.setattr("spillover.training.train.LLM", None)  # no answers are generated again
    again = train(str(model), folder, OPTIONS, data, resume=True)
    assert seen == [10, 20]
    first, second = (load_file(one / "model.safetensors") for one in (trained.folder, again.folder))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_answers_are_scored_where_they_are(model: Path, trained: Trained) -> None:
    """The most likely tokens that are stored are those of plain generation: greedy answers equal them."""
    answers = Answers.load(trained.folder / "training" / "answers.npz")
    assert len(answers.top_ids) == int((answers.lengths - answers.prompts).sum())
    token = score = 0
    for index, (length, prompt) in enumerate(zip(answers.lengths.tolist(), answers.prompts.tolist(), strict=True)):
        said = answers.tokens[token + prompt:token + length]
        likeliest = answers.top_ids[score:score + length - prompt, 0]
        if index % 2 == 0:  # greedy
            assert (said == likeliest).all()
        token, score = token + length, score + length - prompt


def test_the_command_asks_the_model_for_prompts(model: Path, tmp_path: Path) -> None:
    """Without --data the model generates prompts; with the full draft vocabulary there is no file of tokens."""
    run = CliRunner().invoke(main, [
        "draft", "train", str(model), "--out", str(tmp_path / "draft"), "--layers", "1", "--draft-vocab", "0",
        "--answers", "8", "--answer-tokens", "8", "--steps", "3", "--batch-tokens", "64", "--device", "cpu"])
    assert run.exit_code == 0, run.output
    assert sorted(file.name for file in (tmp_path / "draft").iterdir()) == [
        "config.json", "model.safetensors", "training"]
    with LLM(model, device="cpu", max_model_len=64, speculative_model=str(tmp_path / "draft")) as llm:
        llm.generate(["a"], SamplingParams(max_tokens=4), use_tqdm=False)


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "none.txt"
    empty.write_text("\n")
    with pytest.raises(SpilloverError, match="one prompt a line"):
        train(str(model), tmp_path / "a", OPTIONS, empty)
    with pytest.raises(SpilloverError, match="cannot be read"):
        train(str(model), tmp_path / "b", OPTIONS, tmp_path / "nothing.txt")
    with pytest.raises(SpilloverError, match="at least 1"):
        TrainOptions(steps=0)
