"""Every task gives the numbers of its definition, computed with transformers on the same weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from spillover.errors import SpilloverError
from spillover.eval.in_process import EngineTarget
from spillover.eval.results import Results
from spillover.eval.run import run, summary
from spillover.eval.target import Prompt, fitted
from spillover.eval.tasks.choices import Question, encode
from spillover.eval.tasks.gsm8k import extract, few_shot, same
from spillover.eval.tasks.named import NAMES, metrics_of, open_task
from spillover.eval.tasks.perplexity import windows
from support.models.text_model import BOS, TEXT


def scores(target: EngineTarget, data: Path, task: str, window: int = 128, stride: int = 128) -> dict[str, float]:
    opened = open_task(task, data, window, stride, None)
    results, items = Results(), list(opened.items(target))
    run(opened, target, items, results, 4)
    return {name: found.value for name, found in summary(opened, items, results)}


@torch.no_grad()
def logprobs(reference: PreTrainedModel, ids: list[int], start: int) -> list[float]:
    rows = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
    return [rows[position - 1, ids[position]].item() for position in range(start, len(ids))]


def test_choices_are_those_of_the_highest_likelihood(target: EngineTarget, reference: PreTrainedModel,
                                                     data: Path) -> None:
    right = right_norm = 0
    for n in range(12):
        context, endings = f"A number: {n} and", [f"then {n + k} comes" for k in range(4)]
        start = len(target.encode(context))
        sums = [sum(logprobs(reference, target.encode(f"{context} {ending}"), start)) for ending in endings]
        right += max(range(4), key=sums.__getitem__) == n % 4
        right_norm += max(range(4), key=lambda k: sums[k] / len(endings[k])) == n % 4
    assert scores(target, data, "hellaswag=hellaswag_val_full.txt") == {"acc": right / 12, "acc_norm": right_norm / 12}


def test_questions_are_asked_as_lm_eval_asks_them(target: EngineTarget, data: Path) -> None:
    arc, mmlu = (open_task(name, data, 1, 1, None).items(target)[1].ask for name in ("arc-easy", "mmlu"))
    assert arc == Question("Question: What is 1 and one?\nAnswer:", ("1", "2", "3", "4"), 1)
    assert mmlu.text == ("The following are multiple choice questions (with answers) about high school mathematics.\n\n"
                         "What is 1 less one?\nA. 1\nB. 0\nC. -1\nD. -2\nAnswer:")
    assert (mmlu.choices, mmlu.right) == (("A", "B", "C", "D"), 1)
    spaced = encode(lambda text: target.encode(text, False), Question("a b  ", ("c",), 0))
    assert spaced == [Prompt(target.encode("a b   c", False), 3)]  # trailing spaces belong to the choice


def test_the_hubs_hellaswag_is_cleaned(target: EngineTarget, tmp_path: Path) -> None:
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(
        {"activity_label": "Cooking", "ctx_a": "[header] Start. [title] Wash", "ctx_b": "they", "label": "1",
         "endings": ["go [substeps] home", "stop"]}) + "\n")
    (item,) = open_task("hellaswag", tmp_path, 1, 1, None).items(target)
    assert item.ask == Question("Cooking: Start.. Wash They", ("go home", "stop"), 1)


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (64, 16), (100, 37)])
def test_perplexity_scores_every_token_once_with_the_context_it_says(
        target: EngineTarget, reference: PreTrainedModel, data: Path, window: int, stride: int) -> None:
    ids = [BOS, *target.encode(TEXT[:600], False)]
    (data / "short.txt").write_text(TEXT[:600])
    total, seen = 0.0, []
    for prompt in windows(ids, window, stride):
        assert len(prompt.token_ids) <= window + 1
        assert len(prompt.token_ids) - prompt.start <= (stride if seen else window)
        total += sum(logprobs(reference, prompt.token_ids, prompt.start))
        seen += prompt.token_ids[prompt.start:]
    assert seen == ids[1:]
    found = scores(target, data, "perplexity=short.txt", window, stride)
    assert found["perplexity"] == pytest.approx(math.exp(-total / 600), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(-total / 600 / math.log(2), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(-total / len(re.split(r"\s+", TEXT[:600]))), rel=1e-4)


def test_json_lines_are_a_document_each(target: EngineTarget, data: Path) -> None:
    (data / "two.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"page": "two"}) + "\n")
    task = open_task("perplexity=two.jsonl", data, 64, 64, None)
    assert [item.ask.prompt.token_ids for item in task.items(target)] == [
        [BOS, *target.encode(word, False)] for word in ("one", "two")]


@pytest.mark.parametrize(("text", "strict", "flexible"), [
    (" 3 + 4 = 7. The answer is 7.", "7", "7."),
    ("The answer is 1,234. Then $5,000.00 are left", "1,234.", "$5,000.00"),
    ("so 12 of them", "[invalid]", "12"),
    ("The answer is -3. The answer is 4.", "-3.", "4."),
    ("none", "[invalid]", "[invalid]"),
])
def test_answers_are_extracted_as_lm_eval_extracts_them(text: str, strict: str, flexible: str) -> None:
    assert extract(text) == (strict, flexible)


def test_numbers_are_compared_without_what_does_not_matter() -> None:
    assert same("$5,000.", "5000")
    assert same("18", "blah\n#### 18")
    assert not same("5.0", "5")
    assert not same("[invalid]", "5")


def test_generated_tasks_are_judged(target: EngineTarget, data: Path) -> None:
    assert set(scores(target, data, "gsm8k")) == {"exact_match_strict", "exact_match_flexible"}
    assert few_shot("Why?").endswith("The answer is 8.\n\nQ: Why?\nA:")
    assert few_shot("Why?").count("Q: ") == 9


def test_a_prompt_too_long_loses_its_front(target: EngineTarget) -> None:
    long = Prompt(list(range(100)) * 50, 4950)
    cut = fitted(target, long)
    assert (len(cut.token_ids), cut.token_ids[cut.start:]) == (4095, long.token_ids[long.start:])
    assert len(target.score([cut])[0]) == 50


def test_every_task_says_what_it_misses(tmp_path: Path) -> None:
    for name in NAMES:
        said = rf"no data for {name}: looked for .*{tmp_path.name}.* it must be .*--task {name}=FILE"
        with pytest.raises(SpilloverError, match=said):
            open_task(name, tmp_path, 1, 1, None)
    with pytest.raises(SpilloverError, match="no task 'helaswag'; did you mean 'hellaswag'"):
        open_task("helaswag", tmp_path, 1, 1, None)
    (tmp_path / "mmlu.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(SpilloverError, match=r"line 1, has no 'subject'; the file must be the hub's JSON lines"):
        open_task("mmlu", tmp_path, 1, 1, None)
    (tmp_path / "arc_easy.jsonl").write_text(
        '{"question": "?", "choices": {"text": [], "label": []}, "answerKey": "A"}\n')
    with pytest.raises(SpilloverError, match="cannot be read"):
        open_task("arc-easy", tmp_path, 1, 1, None)


def test_results_of_every_task_have_metrics(data: Path) -> None:
    for name in NAMES:
        given = "hellaswag=hellaswag_val_full.txt" if name == "hellaswag" else name
        if name != "arc-challenge":
            task = open_task(given, data, 8, 8, None)
            assert metrics_of(name, task.settings) == task.metrics
