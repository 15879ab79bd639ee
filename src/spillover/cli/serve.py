"""`spill serve`: an OpenAI-compatible server in the terminal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from socket import socket

    from spillover.server.async_llm import AsyncLLM
    from spillover.server.settings import ServerSettings


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen on; 0.0.0.0 lets other machines in.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
              help="Port to listen on; 0 takes a free one.")
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY", envvar="SPILLOVER_API_KEY",
              help="Ask clients for this key; may be given more than once.  [env: SPILLOVER_API_KEY]")
@click.option("--served-model-name", "names", multiple=True, metavar="NAME",
              help="Name that requests use, instead of the model's own; may be given more than once. The name "
                   "'default' always works.")
@click.option("--max-queue", default=1024, show_default=True, type=click.IntRange(min=1),
              help="Most sequences that wait; requests beyond it get 429.")
@click.option("--max-request-bytes", default="16MiB", show_default=True, metavar="SIZE",
              help="Largest request body.")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
              help="Let pages from this origin call the server; may be given more than once.")
@click.option("--drain-seconds", default=30.0, show_default=True, type=click.FloatRange(min=0),
              help="How long running requests may take to end after Ctrl-C or SIGTERM.")
@click.option("--engine-degraded-seconds", default=5.0, show_default=True, type=click.FloatRange(min=1),
              help="After this long without a heartbeat of the engine, /health answers 503 and requests are refused.")
@click.option("--engine-hang-seconds", default=30.0, show_default=True, type=click.FloatRange(min=1),
              help="After this long without a heartbeat, the engine is killed and started again.")
@click.option("--engine-step-seconds", default=900.0, show_default=True, type=click.FloatRange(min=1),
              help="After this long in one step, the engine is killed and started again, though its heart beats.")
@click.option("--log-requests/--no-log-requests", default=True, show_default=True, help="One line a request.")
@click.option("--log-prompts", is_flag=True, help="Also log the text of prompts, which is private as a rule.")
@click.option("--profiler-dir", default=None, metavar="DIR",
              help="Turn on POST /start_profile and /stop_profile, which write traces of the engine's steps to DIR.")
@engine_options()
def serve(config: EngineConfig, host: str, port: int, api_keys: tuple[str, ...], names: tuple[str, ...],
          max_queue: int, max_request_bytes: str, cors_origins: tuple[str, ...], drain_seconds: float,
          engine_degraded_seconds: float, engine_hang_seconds: float, engine_step_seconds: float,
          log_requests: bool, log_prompts: bool, profiler_dir: str | None) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Prints what goes where in memory, loads the model, and answers until Ctrl-C. There is a page at the address.

    \b
    Examples:
      spill serve
      spill serve ./Llama-3.1-8B-Instruct --gpu-memory 12GB --port 9000
      spill serve --host 0.0.0.0 --api-key "$(openssl rand -hex 16)"
    """
    from spillover.server.heartbeat import HangLimits
    from spillover.server.listen import address_of, listen
    from spillover.server.settings import ServerSettings
    from spillover.units import format_bytes, parse_bytes

    if any(not key for key in api_keys):
        raise SpilloverError("an API key is empty; leave --api-key out to serve without one")
    limit = parse_bytes(max_request_bytes)
    if limit < 1024:
        raise SpilloverError(f"--max-request-bytes must be at least 1 KiB; got {format_bytes(limit)}")
    odd = next((origin for origin in cors_origins if origin != "*" and "://" not in origin), None)
    if odd is not None:
        raise SpilloverError(f"--cors-origin is an origin such as https://example.org, or *; got '{odd}'")
    if profiler_dir is not None:
        try:
            os.makedirs(profiler_dir, exist_ok=True)
        except OSError as error:
            raise SpilloverError(f"--profiler-dir '{profiler_dir}' cannot be made: {error.strerror}") from error
    served = tuple(dict.fromkeys(" ".join(names).split())) or (_name(config.model),)
    settings = ServerSettings(host, port, served, api_keys, max_queue, limit, cors_origins, drain_seconds,
                              log_requests, log_prompts,
                              HangLimits(engine_degraded_seconds, engine_hang_seconds, engine_step_seconds),
                              profiler_dir and os.path.abspath(profiler_dir))
    with listen(host, port) as listening:  # before anything slow: a port that is taken is known at once
        _run(config, settings, listening, address_of(listening, host))


def _run(config: EngineConfig, settings: ServerSettings, listening: socket, address: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    from spillover.cli.loading import fetch
    from spillover.cli.plan import print_plan
    from spillover.cli.progress import bytes_bar
    from spillover.server.serve import serve as run

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("spillover").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what it would tell is told by the server's own log

    console = Console()
    fetch(config.model)
    with contextlib.ExitStack() as bar:
        show = bar.enter_context(bytes_bar())

        def announce(client: AsyncLLM) -> None:
            bar.close()
            names = escape(", ".join(settings.served_model_names))
            empty = " with no model behind it (--load-format null)" if client.info.null_model else ""
            console.print(f"[bold]{names}[/bold] is served at {address}/v1{empty}", highlight=False, soft_wrap=True)
            console.print(f"Page: {address}/   Ctrl-C stops.", highlight=False, soft_wrap=True)
            if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
                console.print("Whoever can reach this machine can use it; --api-key asks them for a key.",
                              style="yellow", highlight=False, soft_wrap=True)

        run(config, settings, listening, on_plan=lambda plan: print_plan(console, plan), on_progress=show,
            on_ready=announce)


def _name(model: str | None) -> str:
    """What requests call a model that was given as a path: its last part."""
    from spillover.models.store import DEFAULT_MODEL

    if model is None:
        return DEFAULT_MODEL
    return os.path.basename(os.path.normpath(model)).removesuffix(".gguf") if os.path.exists(model) else model
