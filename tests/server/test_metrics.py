"""Metrics have vLLM's names, never decrease, and count the source of every prompt token; the recorder keeps no text."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from spillover.engine.config import EngineConfig
from spillover.engine.output.output_processor import Answer
from spillover.engine.output.outputs import DraftCounts, TokenSources
from spillover.engine.parallel.report import RanksReport
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.memory.spill.report import TierReport, by_name
from spillover.server.app import make_app
from spillover.server.engine.protocol import LiveStats
from spillover.server.settings import ServerSettings
from spillover.server.telemetry.metrics import SOURCES, EngineTotals, Metrics, TokenCounts, WeightedHistogram
from spillover.server.telemetry.recorder import KEPT_REQUESTS, RateHistory, Recorder
from support.servers.running_server import Server, running, until
from support.servers.stub_client import StubClient

# The metrics used by dashboards made for vLLM.
VLLM_NAMES = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
    prompt_tokens_total generation_tokens_total prompt_tokens_cached_total num_preemptions_total
    request_success_total iteration_tokens_total_sum time_to_first_token_seconds_bucket
    inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
    request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
    request_inference_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
    request_params_n_sum request_params_max_tokens_sum request_prefill_kv_computed_tokens_sum cache_config_info
    external_prefix_cache_queries_total external_prefix_cache_hits_total
"""


def make_answer(prompt: int = 20, output: int = 5, cached: int = 16, n: int = 1, reason: str | None = "stop",
                times: tuple[float, float, float] = (0.5, 0.8, 1.2), text: str = "") -> Answer:
    """Return a finished request as the front holds it; `times` are relative to arrival."""
    requests = [Request(f"r.{i}" if n > 1 else "r", list(range(prompt)), SamplingParams(max_tokens=output))
                for i in range(n)]
    for request in requests:
        request.arrived = time.monotonic() - times[-1]
        request.scheduled, request.first_token, request.finished = (request.arrived + after for after in times)
        request.token_ids.extend(range(output))
        request.sources = TokenSources(computed=prompt - cached, device=cached)
        request.finish_reason = reason
    return Answer(requests, text, None)


def samples(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "model_name"))
            found.setdefault(sample.name.removeprefix("spillover:"), {})[labels] = sample.value
    return found


def test_every_name_of_vllm_is_there_before_the_first_request() -> None:
    found = samples(Metrics("m").render(LiveStats(), StubClient().info, TokenCounts()))  # type: ignore[arg-type]
    assert [name for name in VLLM_NAMES.split() if name not in found] == []


def test_ranks_and_the_load_of_their_experts() -> None:
    ranks = RanksReport(2, calls=7, bytes=800, seconds=0.5, expert_rows=(30, 10))
    found = samples(Metrics("m").render(LiveStats(ranks=ranks), None, TokenCounts()))
    assert [found[f"ranks_{name}"][()] for name in ("size", "calls_total", "bytes_total", "seconds_total")] == [
        2, 7, 800, 0.5]
    assert found["rank_expert_rows_total"] == {(("rank", "0"),): 30, (("rank", "1"),): 10}
    assert "ranks_size" not in samples(Metrics("m").render(LiveStats(), None, TokenCounts()))


def test_a_request_that_ended_is_counted_with_its_phases_and_sources() -> None:
    metrics = Metrics("m")
    metrics.observe(make_answer(prompt=20, output=5, cached=16, times=(0.5, 0.8, 1.2)))
    found = samples(metrics.render(LiveStats(), None, TokenCounts()))
    assert found["prompt_tokens_total"][()] == 20
    assert found["generation_tokens_total"][()] == 5
    assert found["prompt_tokens_by_source_total"][("source", "computed"),] == 4
    assert sum(found["prompt_tokens_by_source_total"].values()) == 20
    assert found["request_success_total"][("finished_reason", "stop"),] == 1
    for name, seconds in (("request_queue_time", 0.5), ("time_to_first_token", 0.8), ("request_prefill_time", 0.3),
                          ("request_decode_time", 0.4), ("request_inference_time", 0.7),
                          ("e2e_request_latency", 1.2), ("inter_token_latency", 0.4),
                          ("request_time_per_output_token", 0.1)):
        assert abs(found[f"{name}_seconds_sum"][()] - seconds) < 1e-6, name
    assert found["inter_token_latency_seconds_count"][()] == 4


def test_the_time_of_a_restore_is_a_phase_of_its_own() -> None:
    metrics, answer = Metrics("m"), make_answer(times=(0.5, 0.8, 1.2))
    answer.requests[0].restore_started = answer.requests[0].scheduled
    answer.requests[0].restore_ended = answer.requests[0].scheduled + 0.2
    metrics.observe(answer)
    found = samples(metrics.render(LiveStats(), None, TokenCounts()))
    for phase, seconds in (("queue", 0.5), ("restore", 0.2), ("prefill", 0.1), ("decode", 0.4)):
        assert abs(found[f"request_{phase}_time_seconds_sum"][()] - seconds) < 1e-6, phase


def test_running_requests_count_too_and_siblings_count_each() -> None:
    metrics = Metrics("m")
    running = make_answer(n=3, reason=None)
    counts = TokenCounts.of(running.requests)
    assert samples(metrics.render(LiveStats(), None, counts))["generation_tokens_total"][()] == 15
    metrics.observe(running)
    found = samples(metrics.render(LiveStats(), None, TokenCounts()))
    assert found["generation_tokens_total"][()] == 15
    assert found["request_params_n_sum"][()] == 3


def test_a_request_whose_client_left_is_counted_but_not_averaged() -> None:
    metrics = Metrics("m")
    metrics.observe(make_answer(reason=None))
    found = samples(metrics.render(LiveStats(), None, TokenCounts()))
    assert found["request_success_total"][("finished_reason", "abort"),] == 1
    assert found["e2e_request_latency_seconds_count"][()] == 0


lives = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6)


@given(lives)
@settings(max_examples=60, deadline=None)
def test_totals_never_fall_when_the_engine_is_restarted_and_lose_nothing_seen(growths: list[list[int]]) -> None:
    totals, expected, last = EngineTotals(), 0, 0
    for life, growth in enumerate(growths):
        count, started = 0, 10.0 * (life + 1)
        for step, grown in enumerate(growth):
            count += grown
            expected += grown
            stats = LiveStats(time=started + step, steps=count, prefix_queries=count, output_tokens=count)
            values = totals.update(stats, started)
            # The next engine may be ready while the front still has the numbers of the previous one.
            assert totals.update(stats, started if step % 2 else started + 9.5) == values
            assert values["steps"] == values["prefix_queries"] == values["step_tokens"] == expected >= last
            last = expected


HOST = TierReport("host", blocks=30, capacity_blocks=40, bytes_in=500, bytes_out=200, seconds_in=2.0, seconds_out=0.5,
                  hit_tokens=64, failures=1, dropped=3, available=True, link_in=1000.0, link_out=800.0)
REMOTE = TierReport("remote", blocks=5, capacity_blocks=None, bytes_in=70, bytes_out=0, seconds_in=1.0, seconds_out=0.0,
                    hit_tokens=0, failures=9, dropped=0, available=False, link_in=None, link_out=None)


def test_speculation_has_the_names_of_vllm_and_says_what_is_simulated() -> None:
    metrics = Metrics("m")
    plan = SimpleNamespace(placement=None, slot_bytes=0, dtype="float32", kv_cache_dtype="auto", block_size=8,
                           num_blocks=1)
    config = EngineConfig(load_format="dummy", speculative_simulate="0.8,0.5,0.1")
    info: Any = SimpleNamespace(plan=plan, config=config, restarts=0, started=1.0)
    stats = LiveStats(time=2.0, drafts=DraftCounts(10, 30, 13, (8, 5)), draft_seconds=0.5, draft_proposed=45,
                      verify_seconds=1.25, branches=12, branches_accepted=4)
    found = samples(metrics.render(stats, info, TokenCounts()))
    label = ("simulated", "true")
    names = {"num_drafts_total": 10, "num_draft_tokens_total": 30, "num_accepted_tokens_total": 13,
             "tokens_per_pass": 2.3, "num_wasted_tokens_total": 17, "num_proposed_tokens_total": 45,
             "draft_milliseconds_total": 500, "verify_milliseconds_total": 1250,
             "num_branches_total": 12, "num_accepted_branches_total": 4}
    for name, value in names.items():
        ((labels, number),) = found["spec_decode_" + name].items()
        assert label in labels
        assert number == value
    by_position = found["spec_decode_num_accepted_tokens_per_pos_total"]
    assert {dict(labels)["position"]: count for labels, count in by_position.items()} == {"0": 8, "1": 5, "2": 0}
    info.config = EngineConfig()
    assert not any("spec_decode" in name for name in samples(metrics.render(stats, info, TokenCounts())))


def test_every_tier_shows_what_it_holds_what_moved_and_how_close_to_its_link() -> None:
    stats = LiveStats(prefix_queries=640, prefix_hits=128, kv_tiers=(HOST, REMOTE))
    found = samples(Metrics("m").render(stats, StubClient().info, TokenCounts()))  # type: ignore[arg-type]

    def way(tier: str, direction: str) -> tuple[tuple[str, str], ...]:
        return ("direction", direction), ("tier", tier)

    assert found["kv_transfer_bytes_total"] == {way("host", "in"): 500, way("host", "out"): 200,
                                                way("remote", "in"): 70, way("remote", "out"): 0}
    assert found["kv_transfer_blocks_total"][way("host", "in")] == 50
    assert found["kv_transfer_seconds_total"][way("host", "out")] == 0.5
    assert found["kv_transfer_bytes_per_second"] == {way("host", "in"): 250, way("host", "out"): 400,
                                                     way("remote", "in"): 70}
    assert found["kv_transfer_link_usage_perc"] == {way("host", "in"): 0.25, way("host", "out"): 0.5}
    assert found["kv_transfer_link_bytes_per_second"][way("host", "in")] == 1000
    for name, host, remote in (("hit_tokens_total", 64, 0), ("hit_rate", 0.1, 0), ("failures_total", 1, 9),
                               ("dropped_blocks_total", 3, 0), ("available", 1, 0)):
        assert found[f"kv_tier_{name}"] == {(("tier", "host"),): host, (("tier", "remote"),): remote}
    assert found["kv_cache_usage_perc"][("tier", "host"),] == 0.75
    assert found["kv_blocks"][("state", "free"), ("tier", "host")] == 10
    assert found["kv_blocks"][("state", "evictable"), ("tier", "remote")] == 5
    assert (("state", "free"), ("tier", "remote")) not in found["kv_blocks"]
    # Under vLLM's names.
    assert found["external_prefix_cache_queries_total"][()] == 512
    assert found["external_prefix_cache_hits_total"][()] == 64
    assert found["kv_offload_total_bytes_total"] == {(("transfer_type", "GPU_to_CPU"),): 500,
                                                     (("transfer_type", "CPU_to_GPU"),): 200}


counts = st.integers(0, 100)


@given(st.lists(st.lists(st.tuples(counts, counts), max_size=4), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_what_tiers_moved_is_added_up_over_restarts(growths: list[list[tuple[int, int]]]) -> None:
    totals, moved, hits = EngineTotals(), 0, 0
    for life, growth in enumerate(growths):
        started, report = 10.0 * (life + 1), replace(HOST, bytes_in=0, hit_tokens=0)
        for step, (more, found) in enumerate([(0, 0), *growth]):
            report = replace(report, bytes_in=report.bytes_in + more, hit_tokens=report.hit_tokens + found)
            moved, hits = moved + more, hits + found
            totals.update(LiveStats(time=started + step, steps=step, kv_tiers=(report,)), started)
            [shown] = totals.tiers
            assert (shown.bytes_in, shown.hit_tokens, shown.blocks) == (moved, hits, report.blocks)


def test_two_disks_are_one_tier() -> None:
    one, two = replace(HOST, name="disk"), replace(HOST, name="disk", available=False, link_out=None)
    assert by_name([HOST, one]) == (HOST, one)
    _, disks = by_name([HOST, one, two])
    assert (disks.name, disks.blocks, disks.capacity_blocks, disks.bytes_in) == ("disk", 60, 80, 1000)
    assert (disks.available, disks.link_in, disks.link_out) == (True, 2000.0, None)
    assert by_name([one, replace(one, capacity_blocks=None)])[0].capacity_blocks is None


def test_a_weighted_histogram_is_cumulative() -> None:
    histogram = WeightedHistogram((1, 2, 5))
    for value, count in ((0.5, 3), (2, 4), (7, 2)):
        histogram.add(value, count)
    values = {sample.labels.get("le"): sample.value for sample in histogram.family("x", "text", "m").samples}
    assert (values["1.0"], values["2.0"], values["5.0"], values["+Inf"]) == (3, 7, 7, 9)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_rate_history_keeps_every_event_of_its_window(looks: list[tuple[float, int]]) -> None:
    now, total = 100.3, 0
    history = RateHistory(120, now)
    for after, grown in looks:
        now += max(after, 0.001)
        total += grown
        history.update(total, now)
    assert abs(sum(history.seconds()) - total) < 0.1 + 0.01 * len(looks)
    history.update(total, now + 1e6)
    assert sum(history.seconds()) == 0


def test_the_recorder_keeps_phases_but_no_text() -> None:
    async def scenario() -> dict[str, Any]:
        recorder = Recorder(StubClient(), "m")  # type: ignore[arg-type]
        for _ in range(KEPT_REQUESTS + 50):
            answer = make_answer(text="a secret prompt")
            recorder.started(answer, "chat")
            recorder.finished(answer, 200)
            recorder.finished(answer, 200)
        running = make_answer(reason=None)
        running.requests[0].first_token = running.requests[0].finished = 0.0
        recorder.started(running, "completion")
        left = make_answer(reason=None)
        recorder.started(left, "completion")
        recorder.finished(left, 200)
        assert len(recorder._latest) == KEPT_REQUESTS
        return recorder.live()

    live = asyncio.run(scenario())
    assert "secret" not in str(live)
    assert live["generation_tokens"] == 5 * (KEPT_REQUESTS + 52)
    rows = {row["status"]: row for row in live["requests"]}
    assert rows.keys() == {"ok", "running", "aborted"}
    assert abs(rows["ok"]["queue"] - 0.5) < 1e-6
    assert abs(rows["ok"]["decode"] - 0.4) < 1e-6
    assert rows["running"]["decode"] == 0
    assert sum(rows["running"][phase] for phase in ("queue", "prefill", "restore")) == rows["running"]["age"]
    assert live["sources"].keys() == set(SOURCES)
    assert live["tiers"][0] == {"name": "device", "total": 1000, "used": 100, "kept": 200, "weights": 500}
    assert live["tiers"][3]["total"] == 0


@given(st.lists(st.sampled_from(["queued", "prefilling", "decoding", "ended"]), max_size=12), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_as_many_requests_are_drawn_as_queued_as_wait(states: list[str], more: int) -> None:
    """As many are shown as queued as wait, although the engine reports scheduling only with the first token."""
    waiting = min(states.count("queued"), more)

    async def scenario() -> dict[str, Any]:
        client = StubClient()
        client.stats = msgspec.structs.replace(client.stats, num_waiting=waiting)
        recorder = Recorder(client, "m")  # type: ignore[arg-type]
        for place, state in enumerate(states):
            answer = make_answer(reason="stop" if state == "ended" else None)
            (request,) = answer.requests
            request.request_id, request.arrived = str(place), time.monotonic() - 5 + 0.1 * place
            if state in ("queued", "prefilling"):
                request.scheduled = request.first_token = request.finished = 0.0
            recorder.started(answer, "chat")
            if state == "ended":
                recorder.finished(answer, 200)
        return recorder.live()

    live = asyncio.run(scenario())
    unknown = [row for row in live["requests"] if states[int(row["id"])] in ("queued", "prefilling")]
    assert sum(row["queue"] > 0 for row in unknown) == live["waiting"] == waiting
    assert all(row["queue"] + row["prefill"] == pytest.approx(row["age"]) for row in unknown)


def test_failures_refusals_and_percentiles_are_told() -> None:
    async def scenario() -> dict[str, Any]:
        recorder = Recorder(StubClient(), "m")  # type: ignore[arg-type]
        for place in range(100):
            answer = make_answer()
            answer.requests[0].first_token = answer.requests[0].arrived + (place + 1) / 100
            recorder.started(answer, "chat")
            recorder.finished(answer, 200)
        broken = make_answer(reason=None)
        recorder.started(broken, "chat")
        recorder.finished(broken, "error")
        for status in (200, 400, 429, 503, 499, 500):
            recorder.count_http("/v1/chat/completions", status)
        recorder.count_http("unknown", 404)
        return recorder.live()

    live = asyncio.run(scenario())
    assert (live["refused"], live["failed"]) == (3, 2)
    assert live["latency"]["ttft"] == pytest.approx({"p50": 0.505, "p99": 0.99})
    assert live["latency"]["tpot"].keys() == {"p50", "p99"}
    assert len(live["prefill_rate"]) == len(live["generation_rate"])


async def get(*paths: str) -> list[httpx.Response]:
    app = make_app(StubClient(), ServerSettings(served_model_names=("m",)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return [await client.get(path) for path in paths]


def test_paths_that_clients_make_up_become_no_labels() -> None:
    *_, last = asyncio.run(get("/live", "/nothing/1", "/nothing/2", "/page/app.css", "/metrics"))
    counted = samples(last.content)["http_requests_total"]
    assert counted == {(("route", "/live"), ("status", "200")): 1, (("route", "unknown"), ("status", "404")): 2,
                       (("route", "/page/{name}"), ("status", "404")): 1}


def test_what_clients_are_told_is_what_is_counted(null_server: Server) -> None:
    names = ("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "request_success")
    before = {name: null_server.metrics_total(f"{name}_total") for name in names}
    usages = []
    for stream in (False, True):
        for _ in range(3):
            answer = null_server.openai().completions.create(
                model="default", prompt="the same words again " * 12, max_tokens=9, n=2, stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}))
            usages.append([chunk.usage for chunk in answer if chunk.usage][-1] if stream else answer.usage)
    grown = {name: null_server.metrics_total(f"{name}_total") - before[name] for name in names}
    assert grown["generation_tokens"] == sum(usage.completion_tokens for usage in usages) == 6 * 2 * 9
    assert grown["prompt_tokens"] == 2 * sum(usage.prompt_tokens for usage in usages)  # each of n counts, as in vLLM
    assert grown["prompt_tokens_by_source"] == grown["prompt_tokens"]
    assert grown["prompt_tokens_cached"] >= sum(usage.prompt_tokens_details.cached_tokens for usage in usages) > 0
    assert grown["request_success"] == 12


def test_routers_are_told_what_they_predict_with(null_server: Server) -> None:
    with null_server.http() as http:
        http.post("/v1/completions", json={"prompt": [7] * 512, "max_tokens": 1}).raise_for_status()
        until(lambda: http.get("/kv/info").json()["prefill_token_seconds"] is not None)  # sent with the next numbers
        told = http.get("/kv/info").json()
        assert http.get("/kv/info").json()["instance"] == told["instance"]
    assert (told["block_size"], told["windows"], told["events"], told["tiers"]) == (16, [None], None, [])
    assert len(bytes.fromhex(told["model_identity"])) == 16
    assert 0 < told["prefill_token_seconds"] < 1
    assert 0 < told["device_blocks_used"] <= told["device_blocks"]
    assert told["waiting_prompt_tokens"] == told["num_running"] == 0
    assert len(told["tokenizer_digest"]) == 32


def test_counters_go_on_when_the_engine_has_been_killed_and_started_again() -> None:
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "engine_steps",
             "request_success", "prompt_tokens_by_source")

    with running("--load-format", "null", "--max-model-len", "256") as server:

        def ask() -> dict[str, float]:
            for _ in range(2):
                server.openai().completions.create(model="default", prompt="the same words " * 12, max_tokens=9)
            return {name: server.metrics_total(f"{name}_total") for name in names}

        before = ask()
        [engine] = psutil.Process(server.process.pid).children()
        engine.kill()
        deadline = time.monotonic() + 60
        while not (server.metrics_total("engine_restarts_total") and httpx.get(f"{server.url}/health").is_success):
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.1)
        after = ask()
        for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "request_success"):
            assert after[name] == 2 * before[name], name
        assert all(after[name] > before[name] for name in names)


def test_the_page_is_served_with_a_policy_that_allows_nothing_from_elsewhere() -> None:
    page, script, style, outside = asyncio.run(get("/", "/page/dashboard.js", "/page/style.css",
                                                   "/page/..%2fmetrics.py"))
    for response, kind in ((page, "text/html"), (script, "text/javascript"), (style, "text/css")):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    assert outside.status_code == 404
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_weights_that_move_are_counted() -> None:
    client = StubClient()
    client.info.plan.placement = SimpleNamespace(predicted=SimpleNamespace(
        decode_tokens_per_second=12.5, prefill_tokens_per_second=700.0))
    metrics = Metrics("m")
    stats = LiveStats(time=2.0, weight_bytes_moved=1000, expert_hits=3, expert_misses=2, expert_hosted=1,
                      weight_bytes_back=500, weight_faults=7)
    shown = metrics.render(stats, client.info, TokenCounts()).decode()
    assert 'spillover:weight_bytes_moved_total{model_name="m"} 1000.0' in shown
    assert 'spillover:expert_misses_total{model_name="m"} 2.0' in shown
    assert 'spillover:weight_bytes_back_total{model_name="m"} 500.0' in shown
    assert 'spillover:weight_faults_total{model_name="m"} 7.0' in shown
    assert 'spillover:predicted_decode_tokens_per_second{model_name="m"} 12.5' in shown
