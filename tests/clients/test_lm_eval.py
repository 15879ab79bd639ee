"""The evaluation harness with the server, and transformers with the same file: the same numbers, item by item."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, PreTrainedModel

from spillover.eval.results import Results
from spillover.eval.run import run, summary
from spillover.eval.served import ServedTarget
from spillover.eval.tasks.named import open_task
from spillover.models.hub.store import resolve
from spillover.models.tokenizer import Tokenizer
from support.servers.client_process import OFFLINE, run_client

TASKS = Path(__file__).parent / "lm_eval_tasks"


@dataclass(frozen=True)
class Report:
    scores: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]  # in the order of the data


@pytest.fixture(scope="module")
def report(server: ServerProcess, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("lm_eval")
    for file in TASKS.iterdir():
        shutil.copy(file, folder)
    model = {"model": "default", "base_url": f"{server.url}/v1/completions", "tokenizer": tokenizer_folder,
             "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1, "max_length": 2048}
    run_client("lm_eval", [
        "--model", "local-completions", "--model_args", ",".join(f"{key}={value}" for key, value in model.items()),
        "--include_path", str(folder), "--tasks", "small_multiple_choice,small_short_answer",
        "--output_path", str(folder / "results"), "--log_samples"], folder, OFFLINE)
    (results,) = (folder / "results").rglob("results_*.json")
    samples = {}
    for file in (folder / "results").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        name = re.fullmatch(r"samples_(\w+?)_\d{4}-.*", file.name)
        assert name is not None, file.name
        samples[name[1]] = sorted(lines, key=lambda line: line["doc_id"])
    return Report(json.loads(results.read_text())["results"], samples)


@pytest.fixture(scope="module")
def reference(report: Report) -> Iterator[PreTrainedModel]:
    path = resolve(None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with so few rows, more threads only wait for each other
    yield AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


@torch.no_grad()
def log_likelihood(model: PreTrainedModel, tokenizer: Tokenizer, context: str, ending: str) -> tuple[float, bool]:
    """Return the log probability of the ending after the context, and whether greedy decoding would write it."""
    start = len(tokenizer.encode(context, add_special_tokens=False))
    ids = tokenizer.encode(context + ending, add_special_tokens=False)
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)  # [T, V]
    rows = logprobs[start - 1:len(ids) - 1]
    target = torch.tensor(ids[start:])
    return rows.gather(1, target[:, None]).sum().item(), bool((rows.argmax(-1) == target).all())


def continuation(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, limit: int) -> str:
    """Return the greedy continuation, up to the end of the line."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit,
                         eos_token_id=list(tokenizer.eos_token_ids), pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1]:].tolist()).split("\n")[0]


def test_log_likelihoods_and_accuracy_equal_transformers(report: Report, reference: PreTrainedModel,
                                                         tokenizer: Tokenizer) -> None:
    samples = report.samples["small_multiple_choice"]
    assert len(samples) == 12
    right = right_norm = 0
    for sample in samples:
        doc = sample["doc"]
        expected = [log_likelihood(reference, tokenizer, doc["context"], f" {choice}") for choice in doc["choices"]]
        for (ours, ours_greedy), (theirs, theirs_greedy) in zip(_pairs(sample), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-2)
            assert ours_greedy == theirs_greedy
        sums = [total for total, _ in expected]
        by_length = [total / len(choice) for total, choice in zip(sums, doc["choices"], strict=True)]
        assert _best([total for total, _ in _pairs(sample)]) == _best(sums)
        right += _best(sums) == doc["answer"]
        right_norm += _best(by_length) == doc["answer"]
    scores = report.scores["small_multiple_choice"]
    assert scores["acc,none"] == pytest.approx(right / 12)
    assert scores["acc_norm,none"] == pytest.approx(right_norm / 12)
    print(f"acc {scores['acc,none']:.3f}, acc_norm {scores['acc_norm,none']:.3f}, by both")
    assert right > 6, "a model of this size knows most of these; chance is 3"


def test_spill_eval_gives_the_harness_numbers(report: Report, server: ServerProcess, tmp_path: Path) -> None:
    samples = report.samples["small_multiple_choice"]
    docs = [sample["doc"] for sample in samples]
    (tmp_path / "tasks.txt").write_text("".join(
        "\n".join([doc["context"], str(doc["answer"]), *doc["choices"]]) + "\n" for doc in docs))
    target, task, results = ServedTarget(server.url), open_task("hellaswag=tasks.txt", tmp_path, 1, 1, None), Results()
    items = task.items(target)
    run(task, target, items, results, 4)
    for name, found in summary(task, items, results):
        assert found.value == report.scores["small_multiple_choice"][f"{name},none"]
    for item, sample in zip(items, samples, strict=True):
        sums = task.ask(target, item).detail["logprobs"]
        assert sums == pytest.approx([total for total, _ in _pairs(sample)], abs=1e-5)


def test_generated_texts_equal_transformers(report: Report, reference: PreTrainedModel, tokenizer: Tokenizer) -> None:
    samples = report.samples["small_short_answer"]
    assert len(samples) == 6
    right = 0
    for sample in samples:
        expected = continuation(reference, tokenizer, sample["doc"]["prompt"], limit=16)
        assert sample["resps"] == [[expected]]
        right += _plain(expected) == _plain(sample["doc"]["answer"])
    assert report.scores["small_short_answer"]["exact_match,none"] == pytest.approx(right / 6)


def _pairs(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Return the harness's (log likelihood, greedy) of each choice, which it writes as strings."""
    return [(float(total), str(greedy) == "True") for ((total, greedy),) in sample["resps"]]


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _plain(text: str) -> str:
    return re.sub(r"[^\w\s]", "", text.lower())
