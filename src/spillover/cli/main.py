"""The `spill` command and what its sub-commands share: spelling hints, error lines and exit codes."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from spillover.cli.bench.bench import bench
from spillover.cli.cache.cache import cache
from spillover.cli.chat.chat import chat
from spillover.cli.cluster.router import router
from spillover.cli.cluster.simulate import simulate
from spillover.cli.course import course
from spillover.cli.demo.demo import demo
from spillover.cli.draft import draft
from spillover.cli.eval import evaluate
from spillover.cli.export import export
from spillover.cli.generate import generate
from spillover.cli.lab.lab import lab
from spillover.cli.plan.planning import doctor, plan
from spillover.cli.pool import pool
from spillover.cli.pull import pull
from spillover.cli.quantize import quantize
from spillover.cli.serve import serve
from spillover.engine.vllm_flags import replacement_for
from spillover.errors import SpilloverError, did_you_mean

INTERRUPTED = 130  # 128 + SIGINT, as in shells


class SpillGroup(click.Group):
    """A command group that reports every user error as one line on stderr and an exit code."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        extra["standalone_mode"] = False
        extra["prog_name"] = "spill"
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminated)
        try:
            code = super().main(args, **extra)
            sys.stdout.flush()
        except SpilloverError as error:
            code = _complain(str(error))
        except click.NoSuchOption as error:
            code = _complain(_no_such_option(error))
        except click.UsageError as error:
            code = _usage(error)
        except click.ClickException as error:
            code = _complain(error.format_message())
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader has closed the pipe (`spill ... | head`); pointing stdout elsewhere keeps the exit quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        finally:
            if signal.getsignal(signal.SIGTERM) is _terminated:
                signal.signal(signal.SIGTERM, before)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=SpillGroup, context_settings={
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # hyphens and underscores are equivalent
    "max_content_width": 110,
})
@click.version_option(package_name="spillover", prog_name="spill")
def main() -> None:
    """Serve language models that do not fit.

    Without MODEL, commands use SmolLM2-135M-Instruct, which is downloaded once. Start with:

    \b
      spill demo                      see it work, in under three minutes
      spill chat                      talk to a model
      spill serve                     an OpenAI-compatible server, with a page at its address
      spill plan MODEL                the memory plan, and how fast it could run
    """


for command in (demo, serve, router, simulate, chat, generate, plan, doctor, pull, export, quantize, draft, cache, pool,
                bench, lab, course, evaluate):
    main.add_command(command)


def _terminated(number: int, frame: object) -> NoReturn:
    """Exit by an exception, so that cleanup code runs."""
    sys.exit(128 + number)


def _complain(message: str) -> int:
    click.secho(f"spill: {message}", fg="red", err=True)
    return 2


def _usage(error: click.UsageError) -> int:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        click.echo(error.format_message())
        return 2
    message = error.format_message()
    if error.ctx is not None and isinstance(error.ctx.command, click.Group) and message.startswith("No such command"):
        typed, names = message.split("'")[1], error.ctx.command.list_commands(error.ctx)
        message = f"No such command '{typed}'" + did_you_mean(typed, names, listed=True)
    return _complain(message)


def _no_such_option(error: click.NoSuchOption) -> str:
    names = [name for param in error.ctx.command.params for name in (*param.opts, *param.secondary_opts)
             if name.startswith("--")] if error.ctx is not None else []
    if "--tensor-parallel-size" in names and (instead := replacement_for(error.option_name)) is not None:
        return f"vLLM's {error.option_name} is not supported here: {instead}"
    near = difflib.get_close_matches(error.option_name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists the options"
    return f"No such option {error.option_name}{hint}"
