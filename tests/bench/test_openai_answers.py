"""Reading streams: events however their bytes are split, and chunks of every kind that servers send."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.bench.serving.openai_api import Answer, Dialect, error_text, refusal, tokens_of
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.sse import EventParser

TEXTS = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=8)


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 400)), end=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data())
def test_events_come_out_whole_however_they_are_cut(texts: list[str], cuts: list[int], end: str, data: Any) -> None:
    stream = "".join(f": ping{end}data: {text}{end}{end}" for text in texts).encode()
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    parser = EventParser()
    found = [event for first, last in itertools.pairwise(places)
             for event in parser.feed(stream[first:last])]
    if end == "\r":
        found += parser.feed(b"\n")  # a last lone CR may be the first half of a line end: this is the second half
    parser.finish()
    assert found == [text.strip(" \t\x0b\x0c").encode() if text.isascii() else text.encode().strip()
                     for text in texts]


def test_half_an_event_at_the_end_is_an_error() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n\ndata: b") == [b"a"]
    with pytest.raises(ValueError, match="half an event"):
        parser.finish()


def test_an_event_of_several_lines() -> None:
    assert EventParser().feed(b"event: x\nid: 1\ndata: {\ndata: }\n\n: comment\n\n") == [b"{\n}"]


def read(*events: Any) -> Answer:
    answer = Answer()
    for at, event in enumerate(events):
        answer.add_event(float(at), event if isinstance(event, bytes) else json.dumps(event).encode())
    return answer


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_a_chat_that_thinks_and_calls_a_tool() -> None:
    answer = read(delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="ok"),
                  delta(tool_calls=[{"function": {"arguments": '{"a"'}}]), delta("tool_calls"),
                  {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}, b"[DONE]")
    assert answer.chunks(3) == ((1.0, 1), (2.0, 1), (3.0, 1))
    assert (answer.prompt_tokens, answer.output_tokens, answer.finished, answer.error) == (5, 3, True, None)


def test_more_tokens_than_chunks_are_put_where_the_text_is() -> None:
    texts = ["ab", "abcdefgh", "c"]
    answer = read(*({"choices": [{"text": text, "finish_reason": None}]} for text in texts))
    counts = [count for _, count in answer.chunks(9)]
    assert sum(counts) == 9
    assert min(counts) >= 1
    assert counts[1] == max(counts)


@given(st.integers(1, 200), st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=20))
def test_tokens_always_add_up_to_what_usage_says(total: int, texts: list[str]) -> None:
    answer = read(*({"choices": [{"text": text, "finish_reason": None}]} for text in texts))
    assert sum(count for _, count in answer.chunks(total)) == total


def test_logprobs_count_tokens() -> None:
    answer = read({"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]},
                  {"choices": [{"delta": {"content": "cd"}, "logprobs": {"content": [{}, {}, {}]}}]})
    assert answer.chunks() == ((0.0, 2), (1.0, 3))


def test_what_a_server_tells_of_itself() -> None:
    ours = read({"choices": [], "timings": [{"queue": 0.1, "restore": 0.2, "prefill": 0.3, "decode": 0.4,
                                             "tokens": {"computed": 1, "host": 7}}]})
    assert ours.timings == {"queue": 0.1, "restore": 0.2, "prefill": 0.3, "decode": 0.4}
    assert ours.sources == {"computed": 1, "host": 7}
    llamacpp = read({"choices": [], "timings": {"prompt_ms": 20.0, "predicted_ms": 50.0, "prompt_n": 3, "cache_n": 9}})
    assert llamacpp.timings == {"prefill": 0.02, "decode": 0.05}
    assert llamacpp.sources == {"computed": 3, "device": 9}


@pytest.mark.parametrize(("event", "said"), [
    ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
    ({"error": "plain words"}, "plain words"),
    (b"{half", "a chunk is not JSON"),
    (b"[1]", "a chunk is not an object"),
])
def test_an_error_in_the_middle_of_an_answer(event: Any, said: str) -> None:
    answer = read({"choices": [{"text": "a"}]}, event, b"[DONE]")
    assert said in (answer.error or "")


def test_refusals_in_the_usual_shapes() -> None:
    assert refusal(400, b'{"error": {"message": "too long"}}') == "HTTP 400: too long"
    assert refusal(422, b'{"detail": "unknown field"}') == "HTTP 422: unknown field"
    assert refusal(502, b"<html>bad gateway") == "HTTP 502: <html>bad gateway"
    assert refusal(503, b"") == "HTTP 503"
    assert error_text({"message": "m"}) == "m"
    assert tokens_of(b'{"tokens": [1, 2]}') == [1, 2]
    assert tokens_of(b'["no"]') == tokens_of(b"?") == []


def test_bodies_say_what_is_needed_and_no_more() -> None:
    request = ServeRequest((1, 2), 2, 5, ignore_eos=False, extra={"priority": 1})
    body = json.loads(Dialect("completions", "m", {"temperature": 0}).body(request, [1, 2]))
    assert body == {"model": "m", "prompt": [1, 2], "max_tokens": 5, "stream": True,
                    "stream_options": {"include_usage": True}, "temperature": 0, "priority": 1}
    chat = json.loads(Dialect("chat", ignore_eos=True).body(request, [{"role": "user", "content": "x"}], True))
    assert chat["messages"] == [{"role": "user", "content": "x"}]
    assert chat["max_completion_tokens"] == 5
    assert chat["ignore_eos"] is chat["return_token_ids"] is True
    assert "model" not in chat


@pytest.mark.parametrize("usage", [
    {"completion_tokens": -3}, {"completion_tokens": 2.5}, {"completion_tokens": "3"}, {"completion_tokens": [3]},
    {"completion_tokens": True}, {"completion_tokens": 10**15}, {"prompt_tokens": -1}, [3], "three",
    {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": "all"}}, {"prompt_tokens_details": [1]},
])
def test_a_malformed_usage_fails_its_request_and_no_more(usage: Any) -> None:
    answer = read(delta(content="a"), {**delta(content="b"), "usage": usage}, delta("stop"), b"[DONE]")
    assert "a chunk is malformed" in (answer.error or "")
    assert all(count >= 0 for _, count in answer.chunks(answer.output_tokens))


@pytest.mark.parametrize("event", [
    {"choices": [5]}, {"choices": 5}, {"choices": {"a": 1}}, delta(content=5), delta(tool_calls=[3]),
    {"choices": [{"text": "a", "token_ids": 7}]}, {"timings": [3]}, {"timings": [{"queue": "long"}]},
    {"timings": [{"tokens": {"device": -1}}]}, {"timings": {"predicted_ms": 1}}, b'{"choices": "\xff"}',
])
def test_a_malformed_chunk_fails_its_request_and_no_more(event: Any) -> None:
    answer = read(delta(content="a"), event, delta("stop"))
    assert "a chunk is" in (answer.error or "")
    assert answer.text == "a"
