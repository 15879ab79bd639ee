"""Conversations and prompts from files are sent unchanged; a repeat of them has no prefix cache hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.served_model import ServedModel
from spillover.bench.workloads.make_workload import make_workload
from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.bench.workloads.workload_text import as_text
from spillover.bench.workloads.workloads import WARMUP
from spillover.bench.workloads.workloads_recorded import RecordedWorkload, custom, sharegpt
from spillover.errors import SpilloverError
from support.models.word_tokenizer import BEGIN, USER, WordTokenizer


def write_talks(folder: Path, talks: list[list[int]]) -> str:
    """Write conversations whose turns have these numbers of words."""
    entries = [{"conversations": [{"from": "human", "value": " ".join(f"t{number}w{word}" for word in range(length))}
                                  for length in lengths]} for number, lengths in enumerate(talks)]
    file = folder / "talks.json"
    file.write_text(json.dumps(entries))
    return str(file)


def write_lines(folder: Path, *entries: object) -> str:
    file = folder / "lines.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return str(file)


def firsts(requests: list[ServeRequest]) -> set[object]:
    return {request.prompt[:8] for request in requests if request.turn == 0}


def assert_repeats_are_cold(workload: RecordedWorkload) -> None:
    first, second, third, warmup = (workload.requests(repeat) for repeat in (0, 1, 2, WARMUP))
    assert workload.requests(1) == second
    for one, other in ((first, second), (second, third), (first, warmup), (third, warmup)):
        assert [(r.prompt_len, r.output_len) for r in one] == [(r.prompt_len, r.output_len) for r in other]
        assert not firsts(one) & firsts(other)


def test_sharegpt_takes_the_first_question_and_answer_of_what_passes(tmp_path: Path) -> None:
    path = write_talks(tmp_path, [[10, 20], [2, 20], [10, 2], [1025, 9], [900, 1140], [10], [30, 40, 5, 6], [12, 7]])
    workload = sharegpt(path, WordTokenizer(), 10, seed=5)
    # Both texts of a pair begin with a special token of the model.
    assert {(len(r.prompt), r.output_len) for r in workload.requests(0)} == {(11, 21), (901, 1141), (31, 41), (13, 8)}
    assert workload.notes == ("10 were requested; the file has 4 that pass the length filter",)
    assert not workload.stats().estimated
    assert_repeats_are_cold(workload)


def test_a_repeat_keeps_the_token_that_begins_a_text_and_all_but_two_others(tmp_path: Path) -> None:
    workload = sharegpt(write_talks(tmp_path, [[10, 20], [12, 30]]), WordTokenizer(), 2)
    for plain, other in zip(workload.requests(0), workload.requests(4), strict=True):
        assert plain.prompt[0] == other.prompt[0] == BEGIN
        assert plain.prompt[3:] == other.prompt[3:]
        assert plain.prompt[1:3] != other.prompt[1:3]


def test_a_warm_up_has_none_of_the_texts_that_are_measured(tmp_path: Path) -> None:
    workload = sharegpt(write_talks(tmp_path, [[60, 5, 60, 5], [80, 30]]), WordTokenizer(), 2, turns=2, shuffle=False)
    measured, warmup = workload.requests(0), workload.requests(WARMUP)
    assert [len(request.prompt) for request in warmup] == [len(request.prompt) for request in measured]
    texts = {request.prompt[at : at + 3] for request in measured for at in range(len(request.prompt) - 2)}
    assert not any(request.prompt[at : at + 3] in texts for request in warmup for at in range(len(request.prompt) - 2))
    assert workload.requests(WARMUP) == warmup


def test_a_fixed_output_length_and_the_models_limit(tmp_path: Path) -> None:
    path = write_talks(tmp_path, [[10, 2], [50, 5], [99, 9]])
    requests = sharegpt(path, WordTokenizer(), 9, output_len=30, max_model_len=90).requests(0)
    assert sorted((r.prompt_len, r.output_len) for r in requests) == [(11, 30), (51, 30)]


def test_conversations_as_sessions(tmp_path: Path) -> None:
    path = write_talks(tmp_path, [[10, 20, 5, 6, 7, 8], [11, 21], [12, 22, 900, 40]])
    workload = sharegpt(path, WordTokenizer(), 99, turns=2, shuffle=False, max_model_len=200)
    assert [(r.session, r.turn, r.prompt_len, r.output_len) for r in workload.requests(0)] == [
        (0, 0, 11, 21), (1, 0, 12, 22), (2, 0, 13, 23), (0, 1, 6, 7)]
    assert workload.stats().sessions == 3
    assert workload.stats().prompt.max == 11 + 21 + 6
    assert_repeats_are_cold(workload)


def test_without_a_tokenizer_texts_are_sent_and_lengths_are_guessed(tmp_path: Path) -> None:
    workload = sharegpt(write_talks(tmp_path, [[40, 80], [50, 60]]), None, 2)
    assert all(isinstance(request.prompt, str) for request in workload.requests(0))
    assert workload.stats().estimated
    assert_repeats_are_cold(workload)


def test_custom_lines_bring_their_own_lengths(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"prompt": "a b c", "output_tokens": 10}, {"prompt": "d e"}, {"prompt": [7, 8, 9, 10]})
    tokenizer = WordTokenizer()
    requests = custom(path, tokenizer, chat=False, shuffle=False).requests(0)
    assert [(r.prompt_len, r.output_len) for r in requests] == [(4, 10), (3, 256), (4, 256)]
    assert requests[2].prompt == (7, 8, 9, 10)
    templated = custom(path, tokenizer, num_prompts=2, output_len=5, shuffle=False).requests(0)
    assert [(r.prompt[:2], r.output_len) for r in templated] == [((BEGIN, USER), 5)] * 2
    assert_repeats_are_cold(custom(path, tokenizer))


def test_a_short_file_is_not_sent_twice(tmp_path: Path) -> None:
    workload = custom(write_lines(tmp_path, {"prompt": "a b c"}, {"prompt": "d e f"}), WordTokenizer(), num_prompts=50)
    assert len(workload.requests(0)) == 2
    assert workload.stats().notes == ("50 were requested; the file has 2 that fit",)


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"text": "a"}', '{"prompt": " "}', '{"prompt": [-1]}',
                                  '{"prompt": "a", "output_tokens": 0}', '{"prompt": "a", "output_tokens": "x"}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(SpilloverError, match=r"line 2 of .*bad\.jsonl"):
        custom(str(file), WordTokenizer())
    with pytest.raises(SpilloverError, match="cannot read"):
        custom(str(tmp_path / "absent.jsonl"), WordTokenizer())


def test_token_ids_as_text_are_counted_again() -> None:
    served = ServedModel("m", tokenizer=WordTokenizer())
    workload = make_workload(WorkloadOptions.from_mapping({"num-prompts": 3, "random-input-len": 12}), served)
    for chat, around in ((False, 1), (True, 2)):  # the tokens that begin a text, and a message
        texts = as_text(workload, served, chat).requests(0)
        assert all(isinstance(request.prompt, str) for request in texts)
        assert {request.prompt_len for request in texts} == {12 + around}
    assert "as text" in " ".join(as_text(workload, served).stats().notes)
    with pytest.raises(SpilloverError, match="--tokenizer"):
        as_text(workload, ServedModel("m")).requests(0)


def test_a_file_goes_to_a_chat_endpoint_in_its_own_words(tmp_path: Path) -> None:
    served = ServedModel("m", tokenizer=WordTokenizer())
    lines = custom(write_lines(tmp_path, {"prompt": "a  b c"}, {"prompt": [7, 8, 9]}), served.tokenizer, shuffle=False)
    spoken = as_text(lines, served).requests(0)
    assert spoken[0].prompt == "a  b c"  # without the template's text, which the endpoint would add again
    assert spoken[0].prompt_len == lines.requests(0)[0].prompt_len == 5
    assert as_text(lines, served).requests(1)[0].prompt == "(1) a  b c"
    assert as_text(lines, served).stats().prompt == lines.stats().prompt


class LongTemplate(WordTokenizer):
    def chat(self, text: str) -> list[int]:
        return [*range(3000, 3040), *self.encode(text)[1:], 3099]


def test_what_a_chat_template_adds_is_shared() -> None:
    served = ServedModel("m", tokenizer=LongTemplate())
    workload = make_workload(WorkloadOptions.from_mapping({"num-prompts": 4, "random-input-len": 12}), served)
    stats = as_text(workload, served).stats()
    assert stats.prompt.total == 4 * (40 + 12 + 1)
    assert stats.shared_tokens == 3 * 32
    assert as_text(workload, served, chat=False).stats().shared_tokens == 0


def test_the_real_conversations(shared_data: Path) -> None:
    path = str(shared_data / "sharegpt_sample.json")
    workload = sharegpt(path, WordTokenizer(), 200, turns=3, max_model_len=4096)
    stats = workload.stats()
    assert stats.count == 200
    assert 60 < stats.sessions < 200
    assert stats.sharing > 0.2  # later turns share the prefix of earlier ones
    assert sharegpt(path, WordTokenizer(), 200).stats().sharing < 0.1


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes('\ufeff{"prompt": "one\u2028two"}\r\n{"prompt": "three\x85four"}\n'.encode())
    made = custom(str(path), None, shuffle=False)
    assert [record.prompt for record in made.records] == ["one\u2028two", "three\x85four"]


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes('{"prompt": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(SpilloverError, match="is not UTF-8"):
        custom(str(path), None)
