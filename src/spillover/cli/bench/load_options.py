"""Options shared by `spill bench serve` and `spill bench sweep`: the server, and how to talk to it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spillover.bench.serving.openai_api import BACKENDS, SAMPLING, Dialect
from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.bench.serving.load import LoadOptions
    from spillover.bench.serving.serve_request import ServeWorkload

Command = TypeVar("Command", bound=Callable[..., Any])
LINE_SECONDS = 10.0  # seconds between two progress lines where there is no terminal


class Rate(click.ParamType[float]):
    """Requests per second, or inf."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"'{value}' is neither a number nor inf", param, ctx)


class SeveralValues(click.Command):
    """A command whose repeatable options accept several values after the name, as in `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeated = {name for param in self.params if isinstance(param, click.Option) and param.multiple
                    for name in param.opts}
        spread: list[str] = []
        current: str | None = None
        for place, word in enumerate(args):
            if word.startswith("-"):
                current = word if word.replace("_", "-") in repeated else None
            elif current is not None and args[place - 1] != current:
                spread.append(current)
            spread.append(word)
        return super().parse_args(ctx, spread)


@dataclass(frozen=True)
class ServerOptions:
    """The options of the server and the client."""

    base_url: str
    backend: str
    endpoint: str | None
    model: str | None
    api_key: str | None
    headers: tuple[tuple[str, str], ...]
    insecure: bool
    ready_seconds: float | None  # None for the defaults of server_facts
    extra_body: dict[str, Any]
    ignore_eos: bool | None
    return_token_ids: bool
    client_processes: int | None
    request_timeout: float
    num_warmups: int

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        key = () if self.api_key is None else (("Authorization", f"Bearer {self.api_key}"),)
        return (*key, *self.headers)

    def load_options(self, model: str) -> LoadOptions:
        from spillover.bench.serving.load import LoadOptions

        return LoadOptions(base_url=self.base_url, dialect=self._dialect(model), endpoint=self.endpoint,
                           headers=self.all_headers, insecure=self.insecure, timeout=self.request_timeout,
                           processes=self.client_processes)

    def _dialect(self, model: str) -> Dialect:
        return Dialect(BACKENDS[self.backend], model, self.extra_body, self.return_token_ids, self.ignore_eos)


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--backend", type=click.Choice(list(BACKENDS)), default="openai", show_default=True,
                 metavar="[openai|openai-chat]",
                 help="API to call: openai is /v1/completions with prompts of token ids, openai-chat is "
                      "/v1/chat/completions with text. Engines' names, such as vllm, mean openai."),
    click.option("--base-url", default=None, metavar="URL", help="Address of the server, in place of --host and "
                                                                 "--port."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server."),
    click.option("--port", type=int, default=8000, show_default=True, help="Port of the server."),
    click.option("--endpoint", default=None, metavar="PATH", help="Path of requests. [default: the backend's]"),
    click.option("--model", default=None, help="Model name to send. [default: the first that the server serves]"),
    click.option("--served-model-name", default=None, help="Model name to send, if not that of --model."),
    click.option("--api-key", default=None, help="API key to send. [default: OPENAI_API_KEY of the environment]"),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="Send this header with every request; may be "
                                                                      "given more than once."),
    click.option("--insecure", is_flag=True, help="Do not check the server's certificate."),
    click.option("--ready-check-timeout-sec", type=float, default=None,
                 help="Wait at most this many seconds until the server is ready; 0 does not wait. [default: 600 for a "
                      "server that is starting, 30 where nothing listens]"),
    click.option("--num-warmups", default=1, show_default=True,
                 help="Number of requests sent before the run and not measured."),
    click.option("--ignore-eos/--no-ignore-eos", default=None,
                 help="Ignore the end-of-sequence token, so that answers have exactly the requested length. [default: "
                      "set by the workload]"),
    click.option("--return-token-ids", is_flag=True,
                 help="Request the token ids of each chunk, to count its tokens exactly (spillover, vLLM)."),
    click.option("--logprobs", type=int, default=None, help="Request the log probabilities of this many alternatives "
                                                            "per token."),
    click.option("--extra-body", default=None, metavar="JSON", help="Add these fields to every request."),
    *(click.option("--" + name.replace("_", "-"), name, type=int if name == "top_k" else float, default=None,
                   help="Sampling parameter of every request. [default: the server's]") for name in SAMPLING),
    click.option("--client-processes", type=int, default=None,
                 help="Number of client processes that send and read. [default: by the request rate]"),
    click.option("--request-timeout", default=21600.0, show_default=True, help="Seconds after which a request counts "
                                                                               "as failed."),
]


def server_options(command: Command) -> Command:
    """Add the server options to a command; it receives them as `server: ServerOptions`."""

    @functools.wraps(command)
    def with_server(**given: Any) -> Any:
        return command(server=_gather(given), **given)

    wrapped: Any = with_server
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    decorated: Command = wrapped
    return decorated


def prepare(server: ServerOptions, workload: WorkloadOptions) -> tuple[LoadOptions, ServeWorkload]:
    """Wait for the server, query its model and make the workload for it."""
    from spillover.bench.serving import server_facts
    from spillover.bench.workloads.make_workload import make_workload
    from spillover.bench.workloads.workload_text import as_text
    from spillover.cli.bench.workload_options import ask_server

    headers = dict(server.all_headers)
    with waiting_line() as say:
        server_facts.wait_until_ready(server.base_url, server.ready_seconds, headers, server.insecure, say)
    served = ask_server(workload, server.base_url, server.model, server.api_key, dict(server.headers), server.insecure)
    made = make_workload(workload, served)
    if BACKENDS[server.backend] == "chat":
        made = as_text(made, served)
    return server.load_options(served.name), made


@contextlib.contextmanager
def waiting_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on stderr: one updated line on a terminal, else a line every ten seconds."""
    terminal, last = sys.stderr.isatty(), -math.inf

    def say(text: str) -> None:
        nonlocal last
        if terminal:
            click.echo(f"\r\033[K{text}", nl=False, err=True)
        elif time.monotonic() - last >= LINE_SECONDS:
            click.echo(text, err=True)
        else:
            return
        last = time.monotonic()

    try:
        yield say
    finally:
        if terminal and last > -math.inf:
            click.echo("\r\033[K", nl=False, err=True)


def warm_up(made: ServeWorkload, options: LoadOptions, count: int) -> None:
    """Send prompts of the warm-up, with at most the concurrency of the measurement."""
    from dataclasses import replace

    from spillover.bench.serving.load_processes import run_load
    from spillover.bench.workloads.arrivals import Arrivals

    requests = [request for request in made.requests(-1) if request.turn == 0][:count]
    if not requests:
        return
    limit = min(count, options.arrivals.max_concurrency or count)
    run = run_load([replace(request, session=None) for request in requests],
                   replace(options, arrivals=Arrivals(max_concurrency=limit), processes=1, read_counters=False))
    if run.failed:
        raise SpilloverError(f"a warm-up request failed: {run.failed[0].error}")


def _gather(given: dict[str, Any]) -> ServerOptions:
    base_url, host, port = given.pop("base_url"), given.pop("host"), given.pop("port")
    name, served_name = given.pop("model"), given.pop("served_model_name")
    sampling = {key: value for key in SAMPLING if (value := given.pop(key)) is not None}
    logprobs = given.pop("logprobs")
    if logprobs is not None:
        chat = BACKENDS[given["backend"]] == "chat"
        sampling |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    if given["client_processes"] is not None and given["client_processes"] < 1:
        raise SpilloverError(f"--client-processes must be at least 1; got {given['client_processes']}")
    if given["num_warmups"] < 0:
        raise SpilloverError(f"--num-warmups must not be negative; got {given['num_warmups']}")
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ServerOptions(
        base_url=(base_url or f"http://{authority}").rstrip("/").removesuffix("/v1"),
        model=served_name or name,
        api_key=given.pop("api_key") or os.environ.get("OPENAI_API_KEY"),
        headers=tuple(pairs(given.pop("header"), "--header").items()),
        ready_seconds=given.pop("ready_check_timeout_sec"),
        extra_body=sampling | _json_object(given.pop("extra_body")),
        **{key: given.pop(key) for key in ("backend", "endpoint", "insecure", "ignore_eos", "return_token_ids",
                                           "client_processes", "request_timeout", "num_warmups")})


def pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    found = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise SpilloverError(f"{option} takes KEY=VALUE; got '{item}'")
        found[key.strip()] = value.strip()
    return found


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SpilloverError(f"""--extra-body takes a JSON object such as '{{"top_k": 20}}'; got '{text}'""")
    return value


def shown_rate(rate: float) -> str:
    return "inf" if math.isinf(rate) else f"{rate:g}"
