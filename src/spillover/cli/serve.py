"""`spill serve`: an OpenAI-compatible server in the terminal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.cluster.fleet_options import FleetOptions, fleet_options, pop_fleet_options
from spillover.cli.cluster.replicas import check_replicas, own_pool, serve_replicas, visible_gpus
from spillover.cli.cluster.router import check_prefill, routing_options
from spillover.cli.config_file import config_file_option
from spillover.cli.http_options import check_certificate, http_options
from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from socket import socket

    from spillover.server.engine.async_llm import AsyncLLM
    from spillover.server.settings import ServerSettings


@click.command()
@config_file_option
@http_options
@click.option("--api-key-file", default=None, metavar="FILE",
              help="Keys with names, a line NAME KEY for each; read again on SIGHUP. Usage is counted by name.")
@click.option("--admin-api-key", "admin_keys", multiple=True, metavar="KEY", envvar="SPILLOVER_ADMIN_API_KEY",
              help="Enable the admin routes, for this key alone; may be given more than once.  "
                   "[env: SPILLOVER_ADMIN_API_KEY]")
@click.option("--enable-admin-routes", "admin_routes", is_flag=True,
              help="Enable /sleep, /wake_up and /reset_prefix_cache.")
@click.option("--served-model-name", "served_model_names", multiple=True, metavar="NAME",
              help="Name that requests use, instead of the model's own; may be given more than once. The name "
                   "'default' always works.")
@click.option("--max-queue", default=1024, show_default=True, type=click.IntRange(min=1),
              help="Maximum number of waiting sequences; further requests get 429.")
@click.option("--max-json-values", default=262_144, show_default=True, type=click.IntRange(min=1024),
              help="Maximum JSON values in a request body; an eighth of it for fields, a 32nd of it for objects and "
                   "arrays.")
@click.option("--max-messages", default=2048, show_default=True, type=click.IntRange(min=1),
              help="Maximum messages in a conversation.")
@click.option("--response-store-bytes", default="64MiB", show_default=True, metavar="SIZE",
              help="Memory for responses that /v1/responses keeps for previous_response_id; 0 keeps none.")
@click.option("--special-tokens-in-user-text/--no-special-tokens-in-user-text", default=True, show_default=True,
              help="Whether a special token written in a message, as <|im_end|>, becomes that token or stays text.")
@click.option("--engine-degraded-seconds", default=5.0, show_default=True, type=click.FloatRange(min=1),
              help="Answer 503 to /health and refuse requests after this long without a heartbeat of the engine.")
@click.option("--engine-hang-seconds", default=30.0, show_default=True, type=click.FloatRange(min=1),
              help="Kill the engine and start it again after this long without a heartbeat.")
@click.option("--engine-step-seconds", default=900.0, show_default=True, type=click.FloatRange(min=1),
              help="Kill the engine and start it again after this long in one step, even if it sends heartbeats.")
@click.option("--log-prompts", is_flag=True, help="Also log the text of prompts, which is private as a rule.")
@click.option("--metrics-prefix", default="spillover", show_default=True, type=click.Choice(("spillover", "vllm")),
              help="vllm: /metrics also has vLLM's metrics under vLLM's names, for gateways that read these.")
@click.option("--otlp-traces-endpoint", default=None, metavar="URL",
              help="Send OpenTelemetry traces there over HTTP, as to http://127.0.0.1:4318/v1/traces; needs "
                   "spillover[otel].")
@click.option("--profiler-dir", default=None, metavar="DIR",
              help="Turn on POST /start_profile and /stop_profile, which write traces of the engine's steps to DIR.")
@fleet_options
@click.option("--pool-memory", default="4GB", show_default=True, metavar="SIZE",
              help="With --disaggregation: RAM for KV that moves between replicas, if neither --host-pool nor --remote "
                   "is given; allocated on demand.")
@routing_options
@engine_options()
def serve(config: EngineConfig, pool_memory: str, **options: Any) -> None:
    """Serve a model over OpenAI's HTTP API.

    Prints the memory plan, loads the model, and answers until Ctrl-C. The address also has a web page.

    \b
    Examples:
      spill serve
      spill serve ./Llama-3.1-8B-Instruct --gpu-memory 12GB --port 9000
      spill serve --host 0.0.0.0 --api-key "$(openssl rand -hex 16)"
      spill serve ./Llama-3.1-8B-Instruct --replicas 4
      spill serve ./Llama-3.1-8B-Instruct --replicas 4 --disaggregation auto --prefill-replicas 1
      spill serve ./Llama-3.1-8B-Instruct --ray --min-replicas 2 --max-replicas 8
    """
    from spillover.server.listen import address_of, listen
    from spillover.units import parse_bytes

    fleet = pop_fleet_options(options)
    routing = _routing(options, fleet)
    if fleet is not None:
        check_replicas(config, fleet.most, visible_gpus(), routing["disaggregation"], ray=fleet.ray)
        check_prefill(routing["prefill_replicas"], fleet.least, routing["disaggregation"])
        if options["api_key_file"] is not None:
            raise SpilloverError("--api-key-file is for one server: with --replicas give keys as --api-key")
    settings = _settings(config, options)
    with listen(settings.host, settings.port) as listening:  # before anything slow: a port in use is reported at once
        address = address_of(listening, settings.host, settings.ssl_certfile is not None)
        if fleet is not None:
            with own_pool(config, routing["disaggregation"], parse_bytes(pool_memory, "--pool-memory")) as config:
                serve_replicas(config, settings, fleet, routing, listening, address)
        else:
            _run(config, settings, listening, address)


def _routing(options: dict[str, Any], fleet: FleetOptions | None) -> dict[str, Any]:
    """Remove the routing options from the others; refuse them without --replicas."""
    names = ("routing_policy", "disaggregation", "prefill_replicas", "session_header", "retries", "max_in_flight",
             "wait_seconds", "answer_seconds", "health_seconds")
    taken = {name: options.pop(name) for name in names}
    context = click.get_current_context()
    given = next((param for param in context.command.params if isinstance(param, click.Option) and param.name in names
                  and context.get_parameter_source(param.name) is not click.core.ParameterSource.DEFAULT), None)
    if fleet is None and given is not None:
        raise SpilloverError(f"{given.opts[0]} says how to route to several servers: give --replicas N too, or use "
                             "`spill router`")
    return taken


def _settings(config: EngineConfig, options: dict[str, Any]) -> ServerSettings:
    """Return the settings from the command's own options, which have the same names, after checking them."""
    from spillover.server.auth import KeyRing
    from spillover.server.engine.heartbeat import HangLimits
    from spillover.server.settings import ServerSettings
    from spillover.server.telemetry.tracing import traces_endpoint
    from spillover.units import format_bytes, parse_bytes

    if any(not key for key in (*options["api_keys"], *options["admin_keys"])):
        raise SpilloverError("an API key is empty; leave --api-key out to serve without one")
    limit = parse_bytes(options["max_request_bytes"], "--max-request-bytes")
    if limit < 1024:
        raise SpilloverError(f"--max-request-bytes must be at least 1 KiB; got {format_bytes(limit)}")
    odd = next((origin for origin in options["cors_origins"] if origin != "*" and "://" not in origin), None)
    if odd is not None:
        raise SpilloverError(f"--cors-origin is an origin such as https://example.org, or *; got '{odd}'")
    profiler_dir = options["profiler_dir"]
    if profiler_dir is not None:
        try:
            os.makedirs(profiler_dir, exist_ok=True)
        except OSError as error:
            raise SpilloverError(f"--profiler-dir '{profiler_dir}' cannot be made: {error.strerror}") from error
    odd = next((name for name in options["allowed_hosts"] if name != "*" and set(name) & set(":/*")), None)
    if odd is not None:
        raise SpilloverError(f"--allowed-host is a name such as models.example.org, without a port, or *; got '{odd}'")
    if options["api_key_file"] is not None:
        KeyRing(options["api_keys"], options["api_key_file"])
    if options["otlp_traces_endpoint"] is not None:
        options["otlp_traces_endpoint"] = traces_endpoint(options["otlp_traces_endpoint"])
    check_certificate(options["ssl_certfile"], options["ssl_keyfile"])
    served = tuple(dict.fromkeys(" ".join(options["served_model_names"]).split())) or (_name(config.model),)
    limits = HangLimits(*(options.pop(f"engine_{name}_seconds") for name in ("degraded", "hang", "step")))
    stored = parse_bytes(options["response_store_bytes"], "--response-store-bytes")
    return ServerSettings(**(options | {"max_request_bytes": limit, "response_store_bytes": stored,
                                        "served_model_names": served, "limits": limits,
                                        "profiler_dir": profiler_dir and os.path.abspath(profiler_dir),
                                        "admin_routes": options["admin_routes"] or bool(options["admin_keys"])}))


def _run(config: EngineConfig, settings: ServerSettings, listening: socket, address: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    from spillover.cli.loading import fetch
    from spillover.cli.plan.plan import print_plan
    from spillover.progress import stages
    from spillover.server.serve import serve as run
    from spillover.server.telemetry.logs import set_up_logging

    set_up_logging(settings.log_format)
    console = Console()
    fetch(config.model)
    with contextlib.ExitStack() as bar:
        show = bar.enter_context(stages())

        def announce(client: AsyncLLM) -> None:
            bar.close()
            names = escape(", ".join(settings.served_model_names))
            empty = " without a model (--load-format null)" if client.info.null_model else ""
            console.print(f"[bold]{names}[/bold] is served at {address}/v1{empty}", highlight=False, soft_wrap=True)
            console.print(f"Page: {address}/   Ctrl-C stops.", highlight=False, soft_wrap=True)
            keyless = not settings.api_keys and settings.api_key_file is None
            if keyless and settings.host not in ("127.0.0.1", "localhost", "::1"):
                console.print("Anyone who can reach this machine can use the server; --api-key requires a key.",
                              style="yellow", highlight=False, soft_wrap=True)

        run(config, settings, listening, on_plan=lambda plan: print_plan(console, plan), on_progress=show,
            on_ready=announce)


def _name(model: str | None) -> str:
    """Return the served name of a model that was given as a path: its last part."""
    from spillover.models.hub.store import DEFAULT_MODEL

    if model is None:
        return DEFAULT_MODEL
    return os.path.basename(os.path.normpath(model)).removesuffix(".gguf") if os.path.exists(model) else model
