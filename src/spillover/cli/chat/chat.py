"""`spill chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.options import engine_options
from spillover.cli.sampling_options import sampling_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.engine.output.outputs import RequestOutput


FALLBACK = {"temperature": 0.7, "top_p": 0.95}  # sampling if neither the user nor the model sets it


@click.command()
@click.option("--system", default=None, metavar="TEXT", help="Instructions that the conversation begins with.")
@click.option("--line", "by_line", is_flag=True,
              help="Read piped input as one message or command per line, instead of one message in all.")
@sampling_options(max_tokens=512, temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)
@engine_options()
def chat(config: EngineConfig, sampling: dict[str, Any], system: str | None, by_line: bool) -> None:
    """Talk to a model in the terminal.

    /help lists the commands of a conversation (/save, /load, /set, /retry and others). Ctrl-C stops an answer. Piped
    input is one message, or with --line one message per line.

    \b
    Examples:
      spill chat
      spill chat ./Llama-3.1-8B-Instruct --temperature 0
      spill chat --system "Sum up the text." --temperature 0 < article.txt
    """
    from spillover.cli.chat.conversation import Conversation
    from spillover.cli.chat.terminal import LeaveError, WordWrap, typed_messages
    from spillover.cli.loading import open_llm
    from spillover.engine.requests.sampling_params import SamplingParams

    typed = sys.stdin.isatty()
    if by_line and typed:
        raise SpilloverError("--line is for piped input, as in: spill chat --line < messages.txt")
    SamplingParams(**sampling)  # refuses values out of range before the model is loaded
    message = "" if typed or by_line else sys.stdin.read().strip()
    if not (typed or by_line or message):
        raise SpilloverError('standard input is empty; pipe a message in, as in: echo "Hello" | spill chat')
    with open_llm(config) as llm:
        params = SamplingParams(**(FALLBACK | llm.sampling_defaults | sampling))
        shown = sys.stdout.isatty()
        conversation = Conversation(llm, params, system, write=WordWrap(_write).write if shown else _write,
                                    notice=_notice, refuse=_refuse, quiet=answering,
                                    ended=_print_timing if shown else lambda output, elapsed: None)
        if typed:
            _notice(f"{llm.config.model}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
            try:
                conversation.run(typed_messages(_notice))
            except LeaveError:
                raise click.Abort from None
        elif by_line:
            conversation.run(sys.stdin)
        else:
            conversation.ask(message)


@contextlib.contextmanager
def answering() -> Iterator[Callable[[], bool]]:
    """Hide keys while an answer is written, and turn Ctrl-C into a stop request, so that a step is never interrupted. A
    second Ctrl-C raises KeyboardInterrupt."""
    from spillover.cli.chat.terminal import keys_unseen

    interrupted = threading.Event()

    def note(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        with keys_unseen():
            yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def timing_line(output: RequestOutput, elapsed: float) -> str:
    """Return a line like: 12 tokens, first after 80 ms, then 41.3 tok/s; prompt 38 tokens, 32 from cache."""
    count = len(output.outputs[0].token_ids)
    line = f"{count} tokens in {elapsed:.2f} s"
    if output.timings is not None and output.timings.first_token:
        first = output.timings.first_token - output.timings.arrived
        rate = f", then {(count - 1) / (elapsed - first):.1f} tok/s" if count > 1 and elapsed > first else ""
        line = f"{count} tokens, first after {first * 1e3:.0f} ms{rate}"
    cached = output.sources.cached
    return f"{line}; prompt {len(output.prompt_token_ids)} tokens" + (f", {cached} from cache" if cached else "")


def _print_timing(output: RequestOutput, elapsed: float) -> None:
    click.secho(timing_line(output, elapsed), dim=True)


def _notice(text: str) -> None:
    click.secho(text, dim=True, err=True)


def _refuse(text: str) -> None:
    click.secho(text, fg="red", err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
