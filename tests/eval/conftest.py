"""One small model, loaded in process and served, and data for every task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from spillover import LLM
from spillover.eval.in_process import EngineTarget
from support.models.text_model import TEXT, write_text_model
from support.servers.running_server import Server, running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="session")
def reference(folder: Path) -> PreTrainedModel:
    return write_text_model(folder / "model")


@pytest.fixture(scope="session")
def model(folder: Path, reference: PreTrainedModel) -> Path:
    return folder / "model"


@pytest.fixture(scope="session")
def target(model: Path) -> Iterator[EngineTarget]:
    made = EngineTarget(LLM(model, max_model_len=4096, max_num_seqs=16, num_gpu_blocks_override=1200), "tiny")
    yield made
    made.close()


@pytest.fixture(scope="session")
def served(model: Path) -> Iterator[Server]:
    with running(str(model), "--max-model-len", "4096", "--num-gpu-blocks-override", "1200") as started:
        yield started


@pytest.fixture(scope="session")
def data(folder: Path) -> Path:
    """Write data files where the tasks expect them."""
    place = folder / "data"
    place.mkdir()
    (place / "perplexity.txt").write_text(TEXT)
    tasks = [[f"A number: {n} and", str(n % 4), *(f"then {n + k} comes" for k in range(4))] for n in range(12)]
    (place / "hellaswag_val_full.txt").write_text("".join(line + "\n" for task in tasks for line in task))
    _lines(place / "arc_easy.jsonl", [
        {"id": str(n), "question": f"What is {n} and one?", "answerKey": "ABCD"[n % 4],
         "choices": {"text": [str(n + k) for k in range(4)], "label": list("ABCD")}} for n in range(5)])
    _lines(place / "mmlu.jsonl", [
        {"question": f" What is {n} less one? ", "subject": "high_school_mathematics", "answer": n % 4,
         "choices": [str(n - k) for k in range(4)]} for n in range(5)])
    _lines(place / "gsm8k_test.jsonl", [
        {"question": f"{n} cats have how many tails?", "answer": f"One each.\n#### {n}"} for n in range(3)])
    _lines(place / "ifeval.jsonl", [
        {"key": 7, "prompt": "Speak.", "kwargs": [{}, {"relation": "at least", "num_words": 1}],
         "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"]}])
    return place


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
