"""One server with all options of an operator: named keys, traces, vLLM's metric names, an orderly shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.servers.collector import Collector, Span
from support.servers.running_server import Server, running, until

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "eos_token_id": 3, "torch_dtype": "float32", "tie_word_embeddings": True,
}
LENGTH = 130  # tokens of a prompt: eight full blocks of 16, and two tokens
BLOCK_BYTES = 16 * 2 * 2 * 16 * 4  # tokens, layers, K and V, width, float32
KEYS = {"alice": "a-secret-of-alice", "bob": "a-secret-of-bob"}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# Labels and metrics that Prometheus adds.
SCRAPE_LABELS = {"job", "instance", "namespace", "pod", "container"}
SCRAPE_METRICS = {"up"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "keys").write_text("# NAME KEY\n" + "".join(f"{name} {key}\n" for name, key in KEYS.items()))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> Iterator[Server]:
    flags = {
        "model": str(folder), "load-format": "dummy", "skip-tokenizer-init": True, "served-model-name": ["tiny"],
        "max-model-len": 256, "num-gpu-blocks-override": 24, "host-memory": "4MB",
        "disk": [f"{folder / 'kv'}:40MB"], "restore": "always", "spill": "eager", "api-key-file": str(folder / "keys"),
        "admin-api-key": ["an-admin"], "metrics-prefix": "vllm", "otlp-traces-endpoint": collector.url,
        "log-format": "json", "shutdown-delay-seconds": 30,
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(flags))
    with mock.patch.dict(os.environ, OTEL_BSP_SCHEDULE_DELAY="50"), \
            running("--config", str(folder / "serve.yaml"), key=KEYS["alice"]) as started:
        yield started


def ask(server: Server, start: int, key: str = KEYS["alice"], **fields: Any) -> httpx.Response:
    body = {"prompt": [(start + i * i) % 97 for i in range(LENGTH)], "max_tokens": 3, "temperature": 0,
            "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}", "traceparent": CALLER}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.is_success, answer.text
    return answer


def scraped(server: Server) -> dict[str, list[dict[str, str]]]:
    """Return the names of samples in /metrics, with the labels of each."""
    text = server.http().get("/metrics").text
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def value(server: Server, name: str, **labels: str) -> float:
    text = server.http().get("/metrics").text
    [found] = [sample.value for family in text_string_to_metric_families(text) for sample in family.samples
               if sample.name == name and labels.items() <= sample.labels.items()]
    return found


def spans_of(collector: Collector, answer: httpx.Response) -> dict[str, list[Span]]:
    """Return the span of an HTTP request and all spans below it, by name."""
    _, trace, root, _ = answer.headers["traceparent"].split("-")
    until(lambda: any(span.id == root for span in collector.of_trace(trace)), 20)
    spans = collector.of_trace(trace)
    below = {root}
    for _ in range(3):
        below |= {span.id for span in spans if span.parent in below}
    named: dict[str, list[Span]] = {}
    for span in spans:
        if span.id in below:
            named.setdefault(span.name, []).append(span)
    return named


# Traces


def test_a_request_is_a_tree_of_spans_below_its_callers(server: Server, collector: Collector) -> None:
    answer = ask(server, 1, n=2)
    _, trace, _, flags = answer.headers["traceparent"].split("-")
    assert (trace, flags) == (CALLER.split("-")[1], "01")
    named = spans_of(collector, answer)
    [root] = named["llm_request"]
    assert root.parent == CALLER.split("-")[2]
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.prompt_tokens"] == root.attributes["gen_ai.usage.input_tokens"] == LENGTH
    assert root.attributes["gen_ai.usage.completion_tokens"] == 6
    assert root.attributes["gen_ai.response.model"] == "tiny"
    assert root.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert {name: len(spans) for name, spans in named.items()} == {"llm_request": 1, "queue": 2, "prefill": 2,
                                                                   "decode": 2}
    assert {span.attributes["spillover.sequence"] for span in named["decode"]} == {0, 1}
    for queue, prefill, decode in zip(named["queue"], named["prefill"], named["decode"], strict=True):
        assert queue.parent == prefill.parent == decode.parent == root.id
        assert root.start <= queue.start <= queue.end <= prefill.end <= decode.start <= decode.end <= root.end + 0.001
        assert decode.attributes["spillover.tokens"] == 3
    assert {"service.name": "spillover"}.items() <= collector.resources[0].items()


def test_restored_blocks_are_spans_with_tier_and_bytes(server: Server, collector: Collector) -> None:
    first = ask(server, 40).json()["choices"]
    for start in range(50, 54):  # the device holds three prompts
        ask(server, start)
    answer = ask(server, 40, return_timings=True)
    assert answer.json()["choices"] == first
    sources = answer.json()["timings"][0]["tokens"]
    below = {tier: tokens for tier, tokens in sources.items() if tier in ("host", "disk") and tokens}
    assert below, sources
    named = spans_of(collector, answer)
    [root], [restore], [prefill] = named["llm_request"], named["restore"], named["prefill"]
    assert restore.parent == prefill.parent == root.id
    assert restore.end <= prefill.start + 1e-6
    assert {span.attributes["spillover.tier"]: span.attributes["spillover.tokens"]
            for span in named["transfer"]} == below
    assert all(span.parent == restore.id for span in named["transfer"])
    assert restore.attributes["spillover.bytes"] == sum(below.values()) // 16 * BLOCK_BYTES
    assert restore.attributes["spillover.bytes"] == sum(s.attributes["spillover.bytes"] for s in named["transfer"])
    assert prefill.attributes["spillover.tokens"] == sources["computed"] == root.attributes[
        "spillover.prompt_tokens.computed"]


def test_a_caller_that_does_not_sample_gets_no_spans_and_others_are_told_apart(server: Server,
                                                                               collector: Collector) -> None:
    headers = {"Authorization": f"Bearer {KEYS['bob']}", "traceparent": CALLER.replace("0af7", "0bf7")[:-2] + "00"}
    unsampled = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 1}, headers=headers)
    assert unsampled.headers["traceparent"].endswith("-00")
    wrong = httpx.post(f"{server.url}/v1/completions", json={"prompt": []}, headers=headers | {"traceparent": "odd"})
    assert wrong.status_code == 400
    [refused] = spans_of(collector, wrong)["llm_request"]
    assert refused.attributes["http.response.status_code"] == 400
    assert not refused.is_error
    assert not refused.parent
    assert collector.of_trace(unsampled.headers["traceparent"].split("-")[1]) == []
    assert "traceparent" not in server.http().get("/v1/models").headers
    until(lambda: value(server, "spillover:trace_spans_total", result="sent") >= len(collector.spans))
    assert value(server, "spillover:trace_spans_total", result="lost") == 0


# Keys


def test_usage_is_counted_by_the_names_of_keys_and_seen_by_their_owners(server: Server, folder: Path) -> None:
    def used(key: str) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = server.http().get(
            "/usage", headers={"Authorization": f"Bearer {key}"}).json()["keys"]
        return found

    ask(server, 60, KEYS["alice"])
    before = used("an-admin")
    usages = [ask(server, 70 + i // 2, KEYS["bob"], n=1 + i).json()["usage"] for i in range(3)]
    after = used("an-admin")
    assert after.keys() == KEYS.keys()
    assert after["alice"] == before["alice"]
    grown = {name: after["bob"][name] - before["bob"][name] for name in after["bob"]}
    assert grown == {"requests": 3, "prompt_tokens": 3 * LENGTH, "generation_tokens": 3 * (1 + 2 + 3),
                     "cached_tokens": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)}
    assert used(KEYS["bob"]) == {"bob": after["bob"]}
    assert value(server, "spillover:key_generation_tokens_total", key="bob") == after["bob"]["generation_tokens"]
    assert sum(value(server, "spillover:key_prompt_tokens_total", key="bob", source=source)
               for source in ("cached", "computed")) == after["bob"]["prompt_tokens"]
    assert httpx.get(f"{server.url}/usage").status_code == 401
    told = server.http().get("/metrics").text + server.log() + json.dumps(after)
    assert not [key for key in (*KEYS.values(), "an-admin") if key in told]
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    assert {line["key"] for line in lines if line.get("path") == "/v1/completions"} == {"alice", "bob"}


def test_the_file_of_keys_is_read_again_on_a_signal(server: Server, folder: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    text = (folder / "keys").read_text()
    try:
        (folder / "keys").write_text(text + "carol a-third\n")
        assert status("a-third") == 401
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status("a-third") == 200)
        (folder / "keys").write_text("carol a-third too-much\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the keys stay as they were" in server.log())
        assert status("a-third") == status(KEYS["bob"]) == 200
        assert "too-much" not in server.log()
    finally:
        (folder / "keys").write_text(text)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status("a-third") == 401)


# Metrics


def test_gateways_find_vllms_names_with_the_device_tier_alone(server: Server) -> None:
    found = scraped(server)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "time_to_first_token_seconds_bucket", "request_success_total",
                 "cache_config_info"):
        assert all(labels["model_name"] == "tiny" and labels["engine"] == "0" for labels in found[f"vllm:{name}"])
    assert len(found["vllm:kv_cache_usage_perc"]) == 1
    assert {labels["tier"] for labels in found["spillover:kv_cache_usage_perc"]} == {"device", "host", "disk"}
    assert value(server, "vllm:prefix_cache_queries_total") == value(server, "spillover:prefix_cache_queries_total")
    assert found["vllm:cache_config_info"][0].items() >= {"block_size": "16", "num_gpu_blocks": "24"}.items()


def queries() -> Iterator[tuple[str, str]]:
    """Yield every query of the alerts, the chart and the dashboard, with its place."""
    for group in yaml.safe_load((DEPLOY / "observability" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    scaled = (DEPLOY / "helm" / "spillover" / "templates" / "scaledobject.yaml").read_text()
    yield "autoscaling", re.sub(r"{{.*?}}", "x", scaled.split("query: ")[1].splitlines()[0])
    dashboard = json.loads((DEPLOY / "observability" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found is not None, variable
            yield variable["name"], f"count by ({found[2]}) ({found[1]})"


def selected(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of a query, each with the labels by which the query filters or groups it."""
    def walk(node: Any, grouped: frozenset[str]) -> Iterator[tuple[str, set[str]]]:
        match node:
            case promql_parser.VectorSelector():
                yield node.name, {matcher.name for matcher in node.matchers.matchers} | grouped
            case promql_parser.MatrixSelector():
                yield from walk(node.vector_selector, grouped)
            case promql_parser.AggregateExpr():
                labels = node.modifier.labels if node.modifier is not None else ()
                yield from walk(node.expr, frozenset(labels))
            case promql_parser.BinaryExpr():
                yield from walk(node.lhs, grouped)
                yield from walk(node.rhs, grouped)
            case promql_parser.Call():
                for argument in node.args:
                    yield from walk(argument, grouped)
            case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
                yield from walk(node.expr, grouped)
            case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
                pass
            case _:
                raise AssertionError(f"not read: {type(node)}")

    return walk(promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$__range", "1h")), frozenset())


def test_every_query_of_dashboard_and_alerts_finds_its_metric(server: Server) -> None:
    ask(server, 3)
    found = scraped(server)
    asked = 0
    for where, query in queries():
        for name, labels in selected(query):
            if name in SCRAPE_METRICS:
                continue
            asked += 1
            assert name in found, f"{where}: /metrics has no {name}"
            has = set().union(*(sample.keys() for sample in found[name])) | SCRAPE_LABELS
            assert labels <= has, f"{where}: {name} has no label {labels - has}"
    assert asked > 40


# Shutdown


def test_readiness_falls_first_and_requests_are_taken_until_the_delay_is_over(server: Server) -> None:
    """Requests are accepted during the delay; last test of the file, as a second signal ends delay and server."""
    with server.http() as http:
        assert [http.get(f"/{probe}").status_code for probe in ("livez", "readyz", "ready", "startupz")] == [200] * 4
        server.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/readyz").status_code == 503)
        refused = http.get("/ready")
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        assert [http.get(f"/{probe}").status_code for probe in ("livez", "startupz", "health")] == [200, 200, 503]
        assert ask(server, 5).headers["connection"] == "close"
        assert value(server, "spillover:server_draining") == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0, server.log()  # sooner than the delay alone
