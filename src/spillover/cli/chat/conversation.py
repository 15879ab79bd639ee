"""A conversation with a model: its history, and the commands that change it. Independent of the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from spillover.errors import SpilloverError, did_you_mean

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.output.outputs import RequestOutput
    from spillover.engine.requests.sampling_params import SamplingParams

COMMANDS = {
    "/help": "list these commands",
    "/system TEXT": "set the system prompt and start a new conversation; without TEXT, remove it",
    "/set NAME VALUE": "set a sampling parameter, such as temperature 0 or max_tokens 200; without NAME, show all",
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/clear": "forget the conversation",
    "/save FILE": "write the conversation to a JSON file",
    "/load FILE": "continue a conversation that /save wrote",
    "/exit": "leave the chat, as Ctrl-D does",
}
ALIASES = {"/quit": "/exit", "/reset": "/clear", "/?": "/help", "/bye": "/exit"}
ROLES = ("system", "user", "assistant")
SETTABLE = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "seed")


class Conversation:
    """A conversation: its history, and the handling of each typed message.

    `write` gets pieces of an answer, `notice` messages for the user, `refuse` errors; `quiet` is a context manager
    around an answer that yields whether to stop; `ended` gets each answer and its seconds.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, *,
                 write: Callable[[str], None], notice: Callable[[str], None], refuse: Callable[[str], None],
                 quiet: Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]],
                 ended: Callable[[RequestOutput, float], None] = lambda output, seconds: None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._write, self._notice, self._refuse = write, notice, refuse
        self._quiet, self._ended = quiet, ended
        self.history: list[dict[str, str]] = []

    def run(self, messages: Iterable[str]) -> None:
        """Handle messages until they end or one is /exit. Errors are reported, and the conversation continues."""
        for message in messages:
            try:
                if message.lstrip().startswith("/"):
                    if not self._run_command(*message.strip().partition(" ")[::2]):
                        return
                elif message.strip():
                    self.ask(message.strip())
            except SpilloverError as error:
                self._refuse(str(error))

    def ask(self, message: str) -> None:
        """Answer one message; if that fails, raise SpilloverError and leave the history unchanged."""
        self.history.append({"role": "user", "content": message})
        try:
            self._answer()
        except SpilloverError:
            self.history.pop()
            raise

    def _answer(self) -> None:
        instructions = [{"role": "system", "content": self._system}] if self._system else []
        start, text = time.perf_counter(), ""
        last: RequestOutput | None = None
        stream = cast("Generator[RequestOutput]", self._llm.stream_chat([*instructions, *self.history], self._params))
        with self._quiet() as stopped, contextlib.closing(stream):
            for last in stream:
                self._write(last.outputs[0].text[len(text):])
                text = last.outputs[0].text
                if stopped():
                    break
        self._write("\n")
        # A stopped answer stays in the history as far as it got, as the user has seen it.
        self.history.append({"role": "assistant", "content": text})
        if last is not None:
            self._ended(last, time.perf_counter() - start)

    def _run_command(self, command: str, rest: str) -> bool:
        """Run a command; return whether the conversation continues."""
        rest = rest.strip()
        match ALIASES.get(command, command):
            case "/exit":
                return False
            case "/help":
                width = max(map(len, COMMANDS))
                self._notice("\n".join(f"{name:{width}}  {text}" for name, text in COMMANDS.items()) + "\n\n"
                             'Ctrl-C stops an answer. For a message of several lines end a line with \\, press '
                             'Alt-Enter, or\nput """ before and after it.')
            case "/clear":
                self.history.clear()
                self._notice("The conversation is forgotten.")
            case "/system":
                self._system = rest or None
                self.history.clear()
                self._notice("A new conversation, with these instructions." if rest else
                             "A new conversation, without instructions.")
            case "/set":
                self._set(*rest.partition(" ")[::2])
            case "/undo":
                self._notice(f"Forgotten: {self._pop_last_message()}")
            case "/retry":
                self.ask(self._pop_last_message())
            case "/save":
                self._save(rest)
            case "/load":
                self._load(rest)
            case _:
                names = [name.partition(" ")[0] for name in COMMANDS]
                raise SpilloverError(f"there is no command {command}" + (did_you_mean(command, names) or
                                                                         "; /help lists the commands"))
        return True

    def _pop_last_message(self) -> str:
        """Remove the last message and its answer; return the message."""
        last_user = next((place for place in reversed(range(len(self.history)))
                          if self.history[place]["role"] == "user"), None)
        if last_user is None:
            raise SpilloverError("there is no message yet to retry or undo; type one first")
        message = self.history[last_user]["content"]
        del self.history[last_user:]
        return message

    def _set(self, name: str, value: str) -> None:
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            self._notice("\n".join(f"{each} {getattr(self._params, each)}" for each in SETTABLE))
            return
        if name not in SETTABLE:
            raise SpilloverError(f"/set takes one of {', '.join(SETTABLE)}; got '{name}'"
                                 + did_you_mean(name, SETTABLE))
        try:
            number = None if value == "none" else float(value) if set(value) & set(".einfa") else int(value)
        except ValueError:
            raise SpilloverError(f"/set {name} takes a number; got '{value}'") from None
        changed: dict[str, Any] = {name: number}
        self._params = dataclasses.replace(self._params, **changed)
        self._notice(f"{name} is {getattr(self._params, name)}.")

    def _save(self, name: str) -> None:
        if not name:
            raise SpilloverError("/save needs a file, as in: /save chat.json")
        path = Path(name).expanduser()
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            path.write_text(json.dumps({"messages": [*system, *self.history]}, ensure_ascii=False, indent=2) + "\n",
                            encoding="utf-8")
        except OSError as error:
            raise SpilloverError(f"cannot write '{path}': {error.strerror}") from error
        self._notice(f"{len(self.history)} messages saved to {path}.")

    def _load(self, name: str) -> None:
        if not name:
            raise SpilloverError("/load needs a file that /save has written, as in: /load chat.json")
        path = Path(name).expanduser()
        try:
            value: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpilloverError(f"cannot read '{path}': {error.strerror}") from error
        except (ValueError, RecursionError):
            value = None
        messages = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list) or not all(_is_message(each) for each in messages):
            raise SpilloverError(f"'{path}' is not a conversation: /save writes an object with a list of messages, "
                                 f"each with a role ({', '.join(ROLES)}) and content")
        system = [each["content"] for each in messages if each["role"] == "system"]
        self._system = "\n".join(system) or None
        self.history = [{"role": each["role"], "content": each["content"]} for each in messages
                        if each["role"] != "system"]
        self._notice(f"{len(self.history)} messages loaded from {path}.")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)
