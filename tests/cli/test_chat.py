"""A conversation keeps its history, obeys its commands, survives errors, and stops an answer on Ctrl-C."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from spillover.cli.chat.chat import answering, timing_line
from spillover.cli.chat.conversation import COMMANDS, Conversation
from spillover.engine.output.outputs import CompletionOutput, RequestOutput, RequestTimings, TokenSources
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import RequestError


class Echo:
    """Answers with the number of messages it received, word by word."""

    def __init__(self, interrupt_after: int | None = None, context: int = 1000) -> None:
        self.sent: list[list[Mapping[str, Any]]] = []
        self.params: list[SamplingParams] = []
        self.closed = 0
        self._interrupt_after = interrupt_after
        self._context = context

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> Iterator[RequestOutput]:
        if len(messages) > self._context:
            raise RequestError("the prompt is too long")
        self.sent.append(list(messages))
        self.params.append(params)
        return self._words(f"you sent {len(messages)} messages".split())

    def _words(self, words: list[str]) -> Iterator[RequestOutput]:
        try:
            for count in range(1, len(words) + 1):
                if count == self._interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                text = " ".join(words[:count])
                yield RequestOutput("0", None, [1, 2], [CompletionOutput(0, text, list(range(count)))], False)
        finally:
            self.closed += 1


class Talk:
    """A conversation and all of its output."""

    def __init__(self, llm: Echo, system: str | None = None) -> None:
        self.answers: list[str] = []
        self.notices: list[str] = []
        self.refusals: list[str] = []
        self.conversation = Conversation(llm, SamplingParams(), system, write=self.answers.append,  # type: ignore[arg-type]
                                         notice=self.notices.append, refuse=self.refusals.append, quiet=answering)

    def __call__(self, *messages: str) -> Talk:
        self.conversation.run(iter(messages))
        return self

    @property
    def written(self) -> str:
        return "".join(self.answers)

    @property
    def history(self) -> list[dict[str, str]]:
        return self.conversation.history


def test_each_turn_sees_all_before_it() -> None:
    llm = Echo()
    talk = Talk(llm)("hello\n", "\n", "again\n")
    assert talk.written == "you sent 1 messages\nyou sent 3 messages\n"
    assert [message["role"] for message in llm.sent[1]] == ["user", "assistant", "user"]
    assert llm.sent[1][1]["content"] == "you sent 1 messages"


def test_commands_are_obeyed_and_not_sent() -> None:
    llm = Echo()
    talk = Talk(llm)("hello", "/reset", "hello", "/system be brief", "hello", "/nonsense", "/retyr", "/quit",
                     "never sent")
    assert [len(sent) for sent in llm.sent] == [1, 1, 2]
    assert llm.sent[2][0] == {"role": "system", "content": "be brief"}
    assert talk.refusals == ["there is no command /nonsense; /help lists the commands",
                             "there is no command /retyr; did you mean '/retry'?"]


def test_help_lists_every_command() -> None:
    talk = Talk(Echo())("/help", "/?")
    assert all(name in talk.notices[0] for name in COMMANDS)
    assert talk.notices[1] == talk.notices[0]
    assert not talk.refusals


def test_retry_and_undo_take_the_last_message_back() -> None:
    llm = Echo()
    talk = Talk(llm)("/retry", "/undo", "one", "two", "/retry")
    assert talk.refusals == ["there is no message yet to retry or undo; type one first"] * 2
    assert [len(sent) for sent in llm.sent] == [1, 3, 3]
    assert [each["content"] for each in talk.history if each["role"] == "user"] == ["one", "two"]
    talk("/undo", "/undo")
    assert talk.history == []
    assert talk.notices == ["Forgotten: two", "Forgotten: one"]


def test_set_changes_what_follows_and_refuses_the_rest() -> None:
    llm = Echo()
    talk = Talk(llm)("one", "/set temperature 0", "/set max-tokens 7", "/set top_p 0.5", "two", "/set top_p 2",
                     "/set temprature 1", "/set seed x", "/set seed none", "three", "/set")
    assert [(each.temperature, each.max_tokens, each.top_p) for each in llm.params] == [
        (1.0, 16, 1.0), (0, 7, 0.5), (0, 7, 0.5)]
    assert "top_p must be" in talk.refusals[0]
    assert "did you mean 'temperature'" in talk.refusals[1]
    assert talk.refusals[2] == "/set seed takes a number; got 'x'"
    assert "top_p 0.5" in talk.notices[-1]


def test_a_conversation_is_the_same_after_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    first = Talk(Echo(), "be kind")("höllo", "two\nlines", f"/save {file}")
    llm = Echo()
    second = Talk(llm)(f"/load {file}", "three")
    assert second.history[:4] == first.history
    assert llm.sent[0][0] == {"role": "system", "content": "be kind"}
    assert not first.refusals + second.refusals


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"messages": 1}', '{"messages": [{"role": "user"}]}',
                                  '{"messages": [{"role": "god", "content": ""}]}', "[" * 100_000])
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    talk = Talk(Echo())("hello", f"/load {file}", "/load", "/save", f"/load {tmp_path / 'absent'}", f"/save {tmp_path}")
    assert len(talk.history) == 2
    assert len(talk.refusals) == 5
    assert "is not a conversation" in talk.refusals[0]


def test_what_cannot_be_answered_is_told_and_forgotten() -> None:
    llm = Echo(context=3)
    talk = Talk(llm)("one", "two", "three", "/undo", "two again")
    assert talk.refusals == ["the prompt is too long"]
    assert [each["content"] for each in talk.history if each["role"] == "user"] == ["one", "two again"]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_commands_leaves_whole_exchanges(tmp_path: Path, seed: int) -> None:
    """Whatever is typed, messages and answers alternate, and the last file loads as it was saved."""
    rng = random.Random(seed)
    saved: list[dict[str, str]] | None = None
    file = tmp_path / "chat.json"
    talk = Talk(Echo(context=rng.choice([2, 5, 9])))
    for _ in range(60):
        word = rng.choice(["hello", "/retry", "/undo", "/clear", "/system x", "/system", "save", "load", "/set top_k 3",
                           "/set top_k -9", "/what", "/help", "  ", "/save", "/load /"])
        if word == "save":
            talk(f"/save {file}")
            saved = list(talk.history)
        elif word == "load":
            talk(f"/load {file}")
            assert saved is None or talk.history == saved
        else:
            talk(word)
        assert [each["role"] for each in talk.history] == ["user", "assistant"] * (len(talk.history) // 2)
    if saved is not None:
        assert [each for each in json.loads(file.read_text())["messages"] if each["role"] != "system"] == saved


def test_an_interrupt_stops_the_answer_and_not_the_conversation() -> None:
    llm = Echo(interrupt_after=2)
    before = signal.getsignal(signal.SIGINT)
    talk = Talk(llm)("hello", "again")
    assert talk.written.splitlines()[0] == "you sent"
    assert talk.history[1] == {"role": "assistant", "content": "you sent"}
    assert len(llm.sent) == 2
    assert llm.closed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_timing_line_tells_first_token_rate_and_cache() -> None:
    output = RequestOutput("0", None, list(range(40)), [CompletionOutput(0, "x", list(range(11)))], True,
                           sources=TokenSources(computed=8, device=32),
                           timings=RequestTimings(arrived=1.0, scheduled=1.1, first_token=1.5, finished=2.5))
    assert timing_line(output, 1.5) == ("11 tokens, first after 500 ms, then 10.0 tok/s; prompt 40 tokens, "
                                        "32 from cache")
