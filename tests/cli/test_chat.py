"""A conversation keeps its history, obeys its commands, and stops an answer on Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from spillover.cli.chat import Conversation, timing_line
from spillover.engine.outputs import CompletionOutput, RequestOutput, RequestTimings, TokenSources
from spillover.engine.sampling_params import SamplingParams


class Echo:
    """Answers with the number of messages it was sent, word by word."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.sent: list[list[Mapping[str, Any]]] = []
        self.closed = 0
        self._interrupt_after = interrupt_after

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.sent.append(list(messages))
        words = f"you sent {len(messages)} messages".split()
        try:
            for count in range(1, len(words) + 1):
                if count == self._interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                text = " ".join(words[:count])
                yield RequestOutput("0", None, [1, 2], [CompletionOutput(0, text, list(range(count)))], False)
        finally:
            self.closed += 1


def talk(llm: Echo, *lines: str, system: str | None = None) -> tuple[Conversation, str]:
    written: list[str] = []
    conversation = Conversation(llm, SamplingParams(), system, written.append)  # type: ignore[arg-type]
    conversation.run(iter(lines))
    return conversation, "".join(written)


def test_each_turn_sees_all_before_it() -> None:
    llm = Echo()
    _, written = talk(llm, "hello\n", "\n", "again\n")
    assert written == "you sent 1 messages\nyou sent 3 messages\n"
    assert [message["role"] for message in llm.sent[1]] == ["user", "assistant", "user"]
    assert llm.sent[1][1]["content"] == "you sent 1 messages"


def test_commands_are_obeyed_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Echo()
    talk(llm, "hello", "/reset", "hello", "/system be brief", "hello", "/nonsense", "/quit", "never sent")
    assert [len(sent) for sent in llm.sent] == [1, 1, 2]
    assert llm.sent[2][0] == {"role": "system", "content": "be brief"}
    assert "No such command /nonsense" in capsys.readouterr().err


def test_an_interrupt_stops_the_answer_and_not_the_conversation() -> None:
    llm = Echo(interrupt_after=2)
    before = signal.getsignal(signal.SIGINT)
    conversation, written = talk(llm, "hello", "again")
    assert written.splitlines()[0] == "you sent"
    assert conversation.history[1] == {"role": "assistant", "content": "you sent"}
    assert len(llm.sent) == 2
    assert llm.closed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_timing_line_tells_first_token_rate_and_cache() -> None:
    output = RequestOutput("0", None, list(range(40)), [CompletionOutput(0, "x", list(range(11)))], True,
                           sources=TokenSources(computed=8, device=32),
                           timings=RequestTimings(arrived=1.0, scheduled=1.1, first_token=1.5, finished=2.5))
    assert timing_line(output, 1.5) == ("11 tokens, first after 500 ms, then 10.0 tok/s; prompt 40 tokens, "
                                        "32 of them cached")
