"""`spill router`: one address in front of several OpenAI servers, until Ctrl-C."""

from __future__ import annotations

import os
from typing import Any

import click

from spillover.cli.config_file import config_file_option
from spillover.cli.http_options import check_certificate, http_options
from spillover.errors import SpilloverError

POLICIES = ("predicted", "prefix", "least-load", "round-robin")
MODES = ("never", "auto", "always")  # as in cluster/disaggregate.py; not imported, so that --help is fast


def routing_options(command: Any) -> Any:
    """Add the routing options to a command."""
    for option in reversed((
            click.option("--routing-policy", default="predicted", show_default=True,
                         type=click.Choice(POLICIES),
                         help="Which server gets a request: the one with the least predicted time to the first token, "
                              "the one with the longest cached prefix, the one with the fewest requests, or each in "
                              "turn."),
            click.option("--disaggregation", default="never", show_default=True, type=click.Choice(MODES),
                         help="Whether a prompt may be computed by another server than the one that decodes its "
                              "answer; auto: if the predicted total wait is shorter. Servers must share a --host-pool "
                              "or a --remote store, and have --spill eager."),
            click.option("--prefill-replicas", default=0, show_default=True, type=click.IntRange(min=0), metavar="N",
                         help="The first N servers compute prompts for the others, and decode only if all others "
                              "would be at least a second slower; needs --disaggregation."),
            click.option("--session-header", default="X-Session-Id", show_default=True, metavar="NAME",
                         help="Header whose value keeps a client's requests on one server if that costs little."),
            click.option("--retries", default=3, show_default=True, type=click.IntRange(0, 10),
                         help="How many times a request that has no token yet may be sent to another server."),
            click.option("--max-in-flight", default=4096, show_default=True, type=click.IntRange(min=1),
                         help="Maximum requests in flight; further ones get 429."),
            click.option("--wait-seconds", default=5.0, show_default=True, type=click.FloatRange(min=0),
                         help="How long a request waits for a server that can take it, before it gets 503."),
            click.option("--answer-seconds", default=600.0, show_default=True, type=click.FloatRange(min=1),
                         help="How long a server may be silent in the middle of a request."),
            click.option("--health-seconds", default=1.0, show_default=True, type=click.FloatRange(min=0.1),
                         help="How long a server may take to answer a health check; after three failures it is "
                              "considered gone."))):
        command = option(command)
    return command


def check_prefill(prefill: int, count: int, disaggregation: str) -> None:
    """Refuse --prefill-replicas if none would be left to decode, or without disaggregation."""
    if prefill and disaggregation == "never":
        raise SpilloverError(f"--prefill-replicas {prefill} needs --disaggregation auto or always")
    if prefill and prefill >= count:
        raise SpilloverError(f"--prefill-replicas {prefill} leaves none of {count} servers to decode; give {count - 1} "
                             "at most")


@click.command()
@config_file_option
@click.argument("urls", metavar="URL...", nargs=-1)
@http_options
@click.option("--tokenizer", default=None, metavar="PATH",
              help="Model folder or GGUF file, if the servers' model is not on this machine.")
@click.option("--kv-events-port", "kv_events_ports", multiple=True, type=click.IntRange(0, 65535), metavar="PORT",
              help="KV event port of servers that do not report it, such as vLLM: given once for all, or once for each "
                   "URL, 0 for a server without events. Needs --tokenizer.")
@click.option("--kv-replay-port", "kv_replay_ports", multiple=True, type=click.IntRange(0, 65535), metavar="PORT",
              help="Port to replay missed events, likewise.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(min=1),
              help="Tokens per KV block of such servers.")
@click.option("--admin-api-key", "admin_keys", multiple=True, metavar="KEY", envvar="SPILLOVER_ADMIN_API_KEY",
              help="Key required to drain a server.  [env: SPILLOVER_ADMIN_API_KEY]")
@click.option("--replica-api-key", default=None, metavar="KEY", envvar="SPILLOVER_REPLICA_API_KEY",
              help="Key of the servers; without it, clients' keys are forwarded.  [env: SPILLOVER_REPLICA_API_KEY]")
@routing_options
def router(urls: tuple[str, ...], **options: Any) -> None:
    """Route requests to several OpenAI servers of one model, each to where its first token comes soonest.

    The prediction uses the contents of each server's KV tiers, its waiting requests, and its measured rates. If a
    server fails before the first token, clients do not notice.

    \b
    Examples:
      spill router http://10.0.0.7:8000 http://10.0.0.8:8000
      spill router http://127.0.0.1:8001 http://127.0.0.1:8002 --routing-policy least-load --port 9000
    """
    from spillover.cluster.serve import serve_router
    from spillover.cluster.settings import RouterSettings
    from spillover.cluster.upstream import Upstream
    from spillover.cluster.watch import WatchSettings
    from spillover.server.listen import address_of, listen
    from spillover.server.telemetry.logs import set_up_logging
    from spillover.units import parse_bytes

    if not urls:
        raise SpilloverError("give the servers to route to, such as http://127.0.0.1:8001 http://127.0.0.1:8002")
    if any(not key for key in (*options["api_keys"], *options["admin_keys"])):
        raise SpilloverError("an API key is empty; leave --api-key out to route without one")
    check_certificate(options["ssl_certfile"], options["ssl_keyfile"])
    key = options.pop("replica_api_key")
    upstreams = [Upstream(url, key) for url in urls]
    names = [each.url.partition("://")[2] for each in upstreams]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpilloverError(f"{twice} is given twice; give each server once")
    check_prefill(options["prefill_replicas"], len(names), options["disaggregation"])
    if len(names) > 256:
        raise SpilloverError(f"a router takes 256 servers at most; got {len(names)}")
    ports = {name: options.pop(f"kv_{name}") for name in ("events_ports", "replay_ports")}
    tokenizer = options.pop("tokenizer")
    if any(ports["events_ports"]) and tokenizer is None:
        raise SpilloverError("--kv-events-port needs --tokenizer PATH: such servers name blocks by their tokens")
    for name, given in ports.items():
        if len(given) not in (0, 1, len(names)):
            raise SpilloverError(f"--kv-{name[:-1].replace('_', '-')} is given {len(given)} times for {len(names)} "
                                 "servers; give it once for all, or once for each, 0 for one without")
    if any(ports["replay_ports"]) and not any(ports["events_ports"]):
        raise SpilloverError("--kv-replay-port needs --kv-events-port, the port of the events themselves")
    if tokenizer is not None and not os.path.exists(os.path.expanduser(tokenizer)):
        raise SpilloverError(f"--tokenizer {tokenizer} does not exist; give a model folder or a .gguf file")
    watch = WatchSettings(tokenizer, options.pop("health_seconds"), block_size=options.pop("block_size"), **ports)
    limit = parse_bytes(options.pop("max_request_bytes"), "--max-request-bytes")
    prefill = tuple(names[:options.pop("prefill_replicas")])
    settings = RouterSettings(policy=options.pop("routing_policy"), watch=watch, pass_keys=key is None, prefill=prefill,
                              max_request_bytes=limit, session_header=options.pop("session_header").lower(), **options)
    set_up_logging(settings.log_format)
    with listen(settings.host, settings.port) as listening:
        address = address_of(listening, settings.host, settings.ssl_certfile is not None)

        def announce() -> None:
            click.echo(f"{len(names)} servers are routed to at {address}/v1, by {settings.policy}; {address}/replicas "
                       "shows them. Ctrl-C stops.")
            if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
                click.secho("Anyone who can reach this machine can use the servers; --api-key requires a key.",
                            fg="yellow")

        serve_router(settings, list(zip(names, upstreams, strict=True)), listening, on_ready=announce)
