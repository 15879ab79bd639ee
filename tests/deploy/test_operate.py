"""Probes, named keys, phases of a trace and vLLM's metric names, without a server; and an unavailable collector."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from spillover.cli.main import main
from spillover.cli.serve import serve
from spillover.engine.output.outputs import TokenSources
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import EngineDead, SpilloverError
from spillover.server.app import make_app
from spillover.server.auth import KeyRing, read_keys
from spillover.server.notify import notify
from spillover.server.serve import _shut_down
from spillover.server.settings import ServerSettings
from spillover.server.telemetry.metrics import Metrics, TokenCounts
from spillover.server.telemetry.tracing import LOWER_TIERS, TraceRequests, Traces, phases, traces_endpoint
from spillover.server.telemetry.vllm_metrics import VLLM_FAMILIES
from support.servers.stub_client import StubClient

# Probes

STATES: dict[str, dict[str, Any]] = {
    "loading": {"ready": False, "engine_state": "starting", "trouble": "it is starting", "info": None},
    "ready": {},
    "asleep": {"engine_state": "sleeping", "is_sleeping": True},
    "hung": {"ready": False, "engine_state": "hung", "trouble": "no heartbeat"},
    "restarting": {"ready": False, "engine_state": "dead", "trouble": "it died"},
    "given up": {"ready": False, "engine_state": "dead", "trouble": "it died", "gave_up": True},
}
ANSWERS = {  # statuses of live, started, ready
    "loading": (200, 503, 503), "ready": (200, 200, 200), "asleep": (200, 200, 503), "hung": (200, 200, 503),
    "restarting": (200, 200, 503), "given up": (503, 200, 503),
}


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_probes_tell_alive_started_and_ready_apart(state: str, draining: bool) -> None:
    client: Any = StubClient()
    vars(client).update({"trouble": None, "gave_up": False, "is_sleeping": False} | STATES[state])
    app = make_app(client, ServerSettings(served_model_names=("m",), api_keys=("secret",)))
    app.state.front.draining = draining

    async def ask() -> list[httpx.Response]:
        paths = ("/livez", "/startupz", "/readyz", "/ready", "/health", "/ping")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://any.name") as http:
            return [await http.get(path) for path in paths]

    answers = asyncio.run(ask())
    live, started, ready = ANSWERS[state]
    if draining:
        live, ready = 200, 503
    assert [answer.status_code for answer in answers] == [live, started, ready, ready, ready, ready]
    assert all(("connection" in answer.headers) == draining for answer in answers)


@pytest.mark.parametrize("hurried", [False, True])
def test_connections_are_kept_until_the_last_request_has_ended_or_a_second_signal(hurried: bool) -> None:
    drains: list[float] = []

    async def scenario() -> bool:
        ended, begun = asyncio.Event(), asyncio.Event()

        async def close(seconds: float) -> None:
            drains.append(seconds)
            begun.set()
            if seconds == 0:
                ended.set()
            await ended.wait()

        client: Any = SimpleNamespace(ready=True, num_open=1, close=close)
        server: Any = SimpleNamespace(should_exit=False, force_exit=False)
        stop: Any = SimpleNamespace(hurried=asyncio.Event())
        http: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaving = asyncio.ensure_future(_shut_down(client, server, http, stop, ServerSettings(
            drain_seconds=7, shutdown_delay_seconds=0.01)))
        await begun.wait()
        assert not server.should_exit
        (stop.hurried if hurried else ended).set()
        while not server.should_exit:
            await asyncio.sleep(0)
        assert not leaving.done()  # not before the connections are closed
        http.set_result(None)
        await leaving
        return bool(server.force_exit)

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == hurried
    assert drains == ([7, 0] if hurried else [7])


def test_systemd_is_told_and_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")  # there is no listener
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address)
        heard.settimeout(10)
        notify("STOPPING=1")
        assert heard.recv(100) == b"STOPPING=1"
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify("READY=1")
        heard.setblocking(False)
        with pytest.raises(BlockingIOError):
            heard.recv(100)


# Keys

names = st.text("abcXYZ019_.@-", min_size=1, max_size=64)
secrets = st.text("abcXYZ019_.@-+/=#:", min_size=8, max_size=40)


@settings(max_examples=25, deadline=None)
@given(keys=st.dictionaries(names, secrets, min_size=1, max_size=8), odd=st.sampled_from(
    ["{name}", "{name} {key} more", "na/me {key}", "{double} {key}", "x" * 65 + " {key}"]))
def test_a_file_of_keys_is_read_or_refused_without_telling_a_key(tmp_path_factory: pytest.TempPathFactory,
                                                                 keys: dict[str, str], odd: str) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# names and keys\n\n" + "\n".join(f"{name}\t {key}" for name, key in keys.items()))
    assert read_keys(str(file)) == keys
    secret = "surely-secret"
    with file.open("a") as more:
        more.write("\n" + odd.format(name="name", key=secret, double=next(iter(keys))))
    with pytest.raises(SpilloverError) as refused:
        read_keys(str(file))
    assert secret not in str(refused.value)
    assert "--api-key-file" in str(refused.value)


def test_keys_without_names_are_numbered_and_names_are_not_taken_twice(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team a\n")
    assert KeyRing(("x", "y"), str(file)).names == ("key1", "key2", "team")
    assert not KeyRing(())
    file.write_text("key2 a\n")
    with pytest.raises(SpilloverError, match="'key2'"):
        KeyRing(("x", "y"), str(file))
    file.write_text("# nobody\n")
    for wrong in (file, tmp_path / "missing"):
        with pytest.raises(SpilloverError, match="--api-key-file"):
            serve.main(["--port", "0", "--api-key-file", str(wrong)], standalone_mode=False)


def test_a_file_with_the_default_of_every_flag_changes_nothing(tmp_path: Path) -> None:
    def params(*arguments: str) -> dict[str, Any]:
        with main.make_context("spill", ["serve"]) as outer:
            return serve.make_context("serve", list(arguments), parent=outer).params

    options = [param for param in serve.params if isinstance(param, click.Option) and param.name != "config"]
    file = tmp_path / "all.json"
    given = {option.opts[0]: option.default for option in options
             if isinstance(option.default, str | int | float | bool)}
    assert {"--host", "--port", "--drain-seconds", "--log-format", "--metrics-prefix"} <= given.keys()
    file.write_text(json.dumps(given))
    assert params("--config", str(file)) == params()


# Traces

seconds = st.floats(0, 100)


@settings(max_examples=100, deadline=None)
@given(waited=seconds, restored=st.none() | st.tuples(seconds, seconds), first=seconds, rest=seconds,
       tiers=st.lists(st.integers(0, 40), min_size=4, max_size=4), block=st.sampled_from([1, 16]))
def test_phases_follow_each_other_and_add_up_to_the_timings(
        waited: float, restored: tuple[float, float] | None, first: float, rest: float, tiers: list[int],
        block: int) -> None:
    request = Request("r", range(200), SamplingParams(), arrived=1000.0)
    assert list(phases(request, block, 10)) == []
    request.scheduled = 1000 + waited
    if restored is not None:
        request.restore_started, request.restore_ended = request.scheduled, request.scheduled + restored[0]
    request.first_token = request.scheduled + first
    request.finished = request.first_token + rest
    tokens = dict(zip(LOWER_TIERS, tiers, strict=True)) if restored is not None else {}
    request.sources = TokenSources(computed=200 - sum(tokens.values()), **tokens)
    made = {phase.name: phase for phase in phases(request, block, 10)}
    assert list(made)[:1] + list(made)[-2:] == ["queue", "prefill", "decode"]
    end = request.arrived
    for phase in made.values():
        assert phase.start == pytest.approx(end)
        assert phase.end >= phase.start
        end = phase.end
        lengths = {"queue": request.timings.queue, "restore": request.timings.restore,
                   "prefill": request.timings.prefill, "decode": request.timings.decode}
        assert phase.end - phase.start == pytest.approx(lengths[phase.name], abs=1e-6)
    parts = made["restore"].parts if "restore" in made else ()
    assert {part.attributes["spillover.tier"]: part.attributes["spillover.tokens"]
            for part in parts} == {tier: count for tier, count in tokens.items() if count}
    assert sum(part.attributes["spillover.bytes"] for part in parts) == sum(
        -(-count // block) * 10 for count in tokens.values())


def test_an_endpoint_is_a_url_and_what_is_missing_is_named() -> None:
    assert traces_endpoint("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_endpoint("https://c/otlp") == "https://c/otlp"
    for wrong in ("collector:4317", "grpc://collector:4317", "http://", "http://c:port"):
        with pytest.raises(SpilloverError, match="OTLP over HTTP"):
            traces_endpoint(wrong)
    with mock.patch("spillover.server.telemetry.tracing.find_spec", return_value=None), \
            pytest.raises(SpilloverError, match=r"pip install 'spillover\[otel\]'"):
        traces_endpoint("http://collector:4318")


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    registry = CollectorRegistry()
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        client: Any = StubClient()
        traces = Traces(f"http://127.0.0.1:{port}/v1/traces", client, "m", registry)
        sent: list[dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/v1/broken":
                raise EngineDead("gone")

        async def send(message: Any) -> None:
            sent.append(message)

        async def ask(path: str) -> None:
            scope = {"type": "http", "method": "POST", "path": path, "headers": [], "request_id": "1"}
            await TraceRequests(app, traces)(scope, mock.Mock(), send)

        async def many() -> None:
            for _ in range(2500):  # more than the queue of spans holds
                await ask("/v1/completions")
            with pytest.raises(EngineDead):
                await ask("/v1/broken")

        asyncio.run(asyncio.wait_for(many(), 60))
        assert len({dict(message["headers"])[b"traceparent"] for message in sent}) == 2501
        traces.close(0.1)
        assert "spillover-traces" in {thread.name for thread in threading.enumerate()}  # still sending; not awaited
    assert "Traceback" not in caplog.text


# Metrics


def test_vllms_names_have_our_values_and_no_label_of_ours() -> None:
    client: Any = StubClient()
    counts = TokenCounts(7, 3)
    ours = Metrics("m").render(client.stats, client.info, counts)
    both = Metrics("m", vllm_names=True).render(client.stats, client.info, counts)

    def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {(sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text.decode()) for sample in family.samples}

    before, after = values(ours), values(both)
    added = {key: value for key, value in after.items() if key[0].startswith("vllm:")}
    assert {key[0] for key in after if not key[0].startswith("vllm:")} == {key[0] for key in before}
    assert ("vllm:prompt_tokens_total", frozenset({("model_name", "m"), ("engine", "0")})) in added
    for (name, labels), value in added.items():
        kept = {label for label, _ in labels} - {"engine"}
        same = [known for (own, others), known in after.items() if own == "spillover:" + name.removeprefix("vllm:")
                and labels - {("engine", "0")} <= others and dict(others).get("tier", "device") == "device"]
        assert same == [value], name
        assert kept <= {"model_name", "le", *(label for each in VLLM_FAMILIES.values() for label in each)}
