"""Terminal handling of a conversation: line editing of messages, word wrap of answers, keys typed during an answer."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator

FENCE = "```"  # code between two fences is not wrapped, so that it can be copied


class LeaveError(Exception):
    """Raised if Ctrl-C was pressed twice in a row at the prompt."""


def typed_messages(notice: Callable[[str], None]) -> Iterator[str]:
    """Yield typed messages until Ctrl-D. Ctrl-C clears the line; a second one in a row raises LeaveError."""
    _bind_keys()
    warned = False
    while True:
        try:
            message = _message()
        except EOFError:
            notice("")
            return
        except KeyboardInterrupt:
            if warned:
                raise LeaveError from None
            warned = True
            notice("\nCtrl-C again leaves, and so do Ctrl-D and /exit; /save FILE keeps the conversation.")
            continue
        warned = False
        yield message


def _message() -> str:
    r"""Return a message: a line, several lines joined by \ at their ends, or a block between lines of triple quotes."""
    line = input("> ")
    if line.lstrip().startswith('"""'):
        first, closed, _ = line.lstrip()[3:].partition('"""')
        lines = [first]
        while not closed:
            line, closed, _ = input(". ").partition('"""')
            lines.append(line)
        return "\n".join(lines).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = input(". ")
    return "\n".join([*lines, line])


def _bind_keys() -> None:
    with contextlib.suppress(ImportError):
        import readline  # importing it enables editing and history for input()

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter: a new line within the message


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Keep keys typed while an answer is written for the next prompt, and do not echo them."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = termios.tcgetattr(terminal)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def terminal_width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class WordWrap:
    """A writer of streamed text that wraps at words: a word that would cross the right edge moves to the next line.

    A word is held back until it ends, so a text should end with a line break."""

    def __init__(self, write: Callable[[str], None], width: Callable[[], int] = terminal_width) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._spaces = ""  # not yet written; dropped at a line break
        self._word = ""  # the received part of the current word
        self._code = False

    def write(self, text: str) -> None:
        out = "".join(map(self._add, text))
        if out:
            self._write(out)

    def _add(self, character: str) -> str:
        if character == "\n":
            out = self._take_word() + "\n"
            self._spaces, self._column = "", 0
            return out
        if self._code and not (self._column == 0 and (self._word + character) in FENCE):
            out = self._word + character
            self._word = ""
            self._column += 1  # here only whether it is 0 matters
            return out
        if character.isspace():
            out = self._take_word()
            self._spaces += character
            return out
        wide = _columns(character) == 2  # CJK: lines may break between any two characters
        out = self._take_word() if wide else ""
        self._word += character
        if wide:
            return out + self._take_word()
        if self._word == FENCE and self._column == 0 and not self._spaces:
            self._code = not self._code
            self._word, self._column = "", len(FENCE)
            return FENCE
        if len(self._word) >= self._width():  # longer than a line
            out += self._take_word()
        return out

    def _take_word(self) -> str:
        """Return the current word, preceded by its spaces, or by a line break if it does not fit."""
        if not self._word:
            return ""
        word, spaces = self._word, self._spaces
        self._word = self._spaces = ""
        length = sum(map(_columns, word))
        if self._column + len(spaces) + length > self._width():
            out = ("\n" if self._column else "") + word
            self._column = length
            return out
        self._column += len(spaces) + length
        return spaces + word


def _columns(character: str) -> int:
    """Return the number of terminal columns of a character."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
