"""Answers wrap between words, and a real terminal session handles keys, conversations and long messages."""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cli.chat.terminal import WordWrap
from spillover.cli.main import main

SPILL = [sys.executable, "-c", "from spillover.cli.main import main; main()"]


def wrapped(pieces: list[str], width: int) -> str:
    out: list[str] = []
    wrap = WordWrap(out.append, lambda: width)
    for piece in [*pieces, "\n"]:
        wrap.write(piece)
    return "".join(out)


@given(text=st.text(st.sampled_from("abcdef  \n`'.-é"), max_size=300), width=st.integers(4, 40),
       cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_line_is_too_long_and_no_word_is_lost(text: str, width: int, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width), "how it comes in pieces does not matter"
    assert shown.endswith("\n")
    if "```" in text:
        return
    assert re.sub(r"\s+", "", shown) == re.sub(r"\s+", "", text)
    short = all(len(word) < width for word in text.split())
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    if short:
        assert shown.split() == text.split()


def test_words_code_and_wide_characters() -> None:
    assert wrapped(["the quick brown fox"], 10) == "the quick\nbrown fox\n"
    assert wrapped(["a " * 4], 4) == "a a\na a\n"
    code = "```\n" + "x" * 20 + "  y " + "z" * 20 + "\n```\nthe quick brown"
    assert wrapped([code], 10) == "```\n" + "x" * 20 + "  y " + "z" * 20 + "\n```\nthe quick\nbrown\n"
    assert wrapped(["漢字" * 5], 10) == "漢字漢字漢\n字漢字漢字\n"


class Terminal:
    """`spill chat` with a null model, on a terminal of 40 columns."""

    def __init__(self) -> None:
        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*SPILL, "chat", "--load-format", "null", "--max-tokens", "3000",
                                      "--max-model-len", "8192"])
        self.pid = pid
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C after a pause: a person is never fast enough to do it between a prompt and the wait for keys."""
        time.sleep(0.5)
        self.type("\x03")

    def until(self, wanted: str, seconds: float = 60) -> str:
        """Wait for `wanted`; return the output up to its end, since the last call."""
        deadline = time.monotonic() + seconds
        while not re.search(wanted, self.seen):
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.seen[-2000:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace").replace("\r\n", "\n")
                except OSError:
                    break
        end = re.search(wanted, self.seen)
        assert end is not None, self.seen
        shown, self.seen = self.seen[:end.end()], self.seen[end.end():]
        return shown

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    started = Terminal()
    try:
        yield started
    finally:
        try:
            os.kill(started.pid, signal.SIGKILL)
            os.waitpid(started.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(started.fd)


PROMPT = r"(?m)^> "


def test_a_session(terminal: Terminal) -> None:
    terminal.until(PROMPT, 120)
    terminal.type("/help\n")
    assert "/retry" in terminal.until(PROMPT)

    # Keys typed during an answer are not shown in it, and become the beginning of the next message.
    terminal.type("hello\n")
    terminal.until("hello\n")
    terminal.until(r"\w+\s\w+")
    terminal.type("/set XYZZY")
    answer = terminal.until(r"tokens, first after[^\n]*\n[^>]*")
    assert "XYZZY" not in answer
    lines = answer.splitlines()[:-1]
    assert len(lines) > 20
    terminal.until(PROMPT + "/set XYZZY")
    terminal.type("\n")
    assert "/set takes one of" in terminal.until(PROMPT)

    # Ctrl-C stops an answer ...
    terminal.type("again\n")
    terminal.until("again\n")
    terminal.until(r"\w+\s\w+")
    terminal.type("\x03")
    terminal.until("tokens(,| in)")
    terminal.until(PROMPT)
    # ... and at the prompt it warns, and loses no message.
    terminal.type("half a mess")
    terminal.until("half a mess")
    terminal.interrupt()
    assert "Ctrl-C again leaves" in terminal.until(PROMPT)
    terminal.type("/undo\n")
    assert "Forgotten: again" in terminal.until(PROMPT)

    # Messages of several lines.
    terminal.type("/set max_tokens 1\n")
    terminal.until(PROMPT)
    terminal.type('"""one\n')
    terminal.until(r"(?m)^\. ")
    terminal.type('two"""\n')
    terminal.until("1 tokens")
    terminal.until(PROMPT)
    terminal.type("/undo\n")
    assert "Forgotten: one\ntwo" in terminal.until(PROMPT)
    terminal.type("three\\\n")
    terminal.until(r"(?m)^\. ")
    terminal.type("four\n")
    terminal.until("1 tokens")
    terminal.until(PROMPT)
    terminal.type("/undo\n")
    assert "Forgotten: three\nfour" in terminal.until(PROMPT)

    terminal.interrupt()
    terminal.until("Ctrl-C again leaves")
    terminal.until(PROMPT)
    terminal.interrupt()
    assert terminal.code() == 130


def piped(text: str, *flags: str) -> Result:
    return CliRunner().invoke(main, ["chat", *flags, "--load-format", "null", "--max-model-len", "512"], input=text)


def test_piped_input_is_one_message_or_one_per_line() -> None:
    whole = piped("/what is\nthis?\n", "--max-tokens", "3")
    assert (whole.exit_code, whole.stdout.count("\n")) == (0, 1), whole.stderr
    lines = piped("one\n\ntwo\n/exit\nthree\n", "--line", "--max-tokens", "3")
    assert (lines.exit_code, lines.stdout.count("\n")) == (0, 2), lines.stderr
    empty = piped(" \n")
    assert empty.exit_code == 2
    assert "standard input is empty" in empty.stderr
