"""`spill chat`: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, cast

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.outputs import RequestOutput
    from spillover.engine.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /system TEXT sets the instructions, /quit leaves; Ctrl-C stops an answer"


@click.command()
@click.option("--system", default=None, help="Instructions that the conversation begins with.")
@click.option("--max-tokens", default=512, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", default=0.7, show_default=True, help="0 is greedy: the same answer every time.")
@click.option("--top-p", default=0.95, show_default=True,
              help="Draw from the likeliest tokens that make up this share.")
@engine_options()
def chat(config: EngineConfig, system: str | None, max_tokens: int, temperature: float, top_p: float) -> None:
    """Talk to a model in the terminal.

    \b
    Examples:
      spill chat
      spill chat ./Llama-3.1-8B-Instruct --temperature 0
      echo "What is the capital of France?" | spill chat --temperature 0
    """
    from spillover.cli.loading import open_llm
    from spillover.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with open_llm(config) as llm:
        if sys.stdin.isatty():
            click.secho(f"{llm.config.model}. {HELP}.", dim=True, err=True)
        Conversation(llm, params, system).run(_messages())


class Conversation:
    """The history, and what each line typed does to it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None,
                 write: Callable[[str], None] | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._write = write or _write
        self.history: list[dict[str, str]] = []

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                return
            if command == "/reset":
                self.history.clear()
            elif command == "/system":
                self._system = rest or None
                self.history.clear()
            elif command.startswith("/"):
                click.secho(f"No such command {command}; {HELP}", fg="red", err=True)
            elif command:
                self._answer(line.strip())

    def _answer(self, question: str) -> None:
        self.history.append({"role": "user", "content": question})
        instructions = [{"role": "system", "content": self._system}] if self._system else []
        start, text = time.perf_counter(), ""
        last: RequestOutput | None = None
        stream = cast("Generator[RequestOutput]", self._llm.stream_chat([*instructions, *self.history], self._params))
        with interruptible() as interrupted, contextlib.closing(stream):
            for last in stream:
                self._write(last.outputs[0].text[len(text):])
                text = last.outputs[0].text
                if interrupted.is_set():
                    break
        self._write("\n")
        # A stopped answer stays in the history as far as it got: the person has read it.
        self.history.append({"role": "assistant", "content": text})
        if last is not None and sys.stdout.isatty():
            click.secho(timing_line(last, time.perf_counter() - start), dim=True)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that a step is never cut in half; the second one is raised as usual."""
    interrupted = threading.Event()

    def note(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def timing_line(output: RequestOutput, elapsed: float) -> str:
    """12 tokens, first after 80 ms, then 41.3 tok/s; prompt 38 tokens, 32 of them cached."""
    count = len(output.outputs[0].token_ids)
    line = f"{count} tokens in {elapsed:.2f} s"
    if output.timings is not None and output.timings.first_token:
        first = output.timings.first_token - output.timings.arrived
        rate = f", then {(count - 1) / (elapsed - first):.1f} tok/s" if count > 1 and elapsed > first else ""
        line = f"{count} tokens, first after {first * 1e3:.0f} ms{rate}"
    cached = output.sources.cached
    return f"{line}; prompt {len(output.prompt_token_ids)} tokens" + (f", {cached} of them cached" if cached else "")


def _messages() -> Iterator[str]:
    """Lines typed, with a prompt and line editing at a terminal; Ctrl-D or the end of a pipe ends them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() history and editing)
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
