"""A real server with too small a device pool: its metrics and its page report what its tiers moved."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from support.models.hf_reference import VOCAB, save_checkpoint, tiny_model
from support.pool_process import PoolProcess
from support.servers.running_server import SPILL, Server, running, until
from support.valkey import Valkey

POOL = 24  # blocks of 16 tokens; each conversation below takes 8
CONVERSATIONS = 6


def tier_values(server: Server, name: str) -> dict[str, float]:
    """Return the values by tier, or by tier and direction."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if sample.name == f"spillover:{name}":
                labels = [sample.labels[label] for label in ("tier", "direction") if label in sample.labels]
                found[" ".join(labels)] = sample.value
    return found


def ask(server: Server, prompt: list[int]) -> Any:
    return server.openai().completions.create(model="default", prompt=prompt, max_tokens=4, temperature=0,
                                              extra_body={"ignore_eos": True})


def test_restored_tokens_are_counted_by_tier_with_bytes_rates_and_share_of_link(tmp_path: Path) -> None:
    prompts = [list(range(1000 * number, 1000 * number + 130)) for number in range(1, 1 + CONVERSATIONS)]
    with running("--num-gpu-blocks-override", str(POOL), "--max-model-len", "256", "--host-memory", "100MB", "--disk",
                 f"{tmp_path / 'kv'}:300MB", "--restore", "always", "--spill", "eager") as server:
        first = [ask(server, prompt).choices[0].text for prompt in prompts]
        again = [ask(server, prompt) for prompt in prompts]
        assert [answer.choices[0].text for answer in again] == first
        assert sum(answer.usage.prompt_tokens_details.cached_tokens for answer in again) >= 3 * 128
        assert server.metrics_total("request_restore_time_seconds_sum") > 0

        # The engine reports its statistics a moment after its last answer.
        until(lambda: server.metrics_total("prefix_cache_queries_total") == 2 * CONVERSATIONS * 130)
        moved = tier_values(server, "kv_transfer_bytes_total")
        assert moved["host in"] > 0
        assert moved["host out"] > 0
        assert moved["disk in"] > 0
        blocks = tier_values(server, "kv_transfer_blocks_total")
        assert blocks["host in"] >= CONVERSATIONS * 8
        hits = tier_values(server, "kv_tier_hit_tokens_total")
        assert hits["host"] >= 128
        sources = {sample.labels["source"]: sample.value
                   for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
                   for sample in family.samples if sample.name == "spillover:prompt_tokens_by_source_total"}
        assert sources["host"] == hits["host"]
        assert sources["disk"] == hits["disk"]
        assert sum(sources.values()) == 2 * CONVERSATIONS * 130
        assert server.metrics_total("external_prefix_cache_hits_total") == hits["host"] + hits["disk"]
        assert tier_values(server, "kv_tier_hit_rate")["host"] == hits["host"] / sum(sources.values())
        assert 0 < tier_values(server, "kv_transfer_bytes_per_second")["host out"] < 1e12
        assert tier_values(server, "kv_transfer_link_bytes_per_second")["disk out"] > 0
        assert tier_values(server, "kv_transfer_link_usage_perc")["host in"] > 0
        assert tier_values(server, "kv_tier_available") == {"host": 1, "disk": 1}
        assert tier_values(server, "kv_tier_failures_total") == {"host": 0, "disk": 0}
        assert 0 < tier_values(server, "kv_cache_usage_perc")["host"] <= 1

        tiers = {tier["name"]: tier for tier in httpx.get(f"{server.url}/live").json()["tiers"]}
        assert tiers["host"]["kept"] > 0
        assert tiers["host"]["traffic"]["in"]["bytes"] == moved["host in"]
        assert tiers["disk"]["traffic"]["available"]
        assert "traffic" not in tiers["remote"]


def test_a_remote_store_that_dies_while_nobody_asks_is_told(valkey: Valkey) -> None:
    with running("--load-format", "dummy", "--max-model-len", "256", "--remote", valkey.url) as server:
        until(lambda: tier_values(server, "kv_tier_available") == {"remote": 1})
        valkey.kill()
        until(lambda: tier_values(server, "kv_tier_available") == {"remote": 0}, seconds=60)
        valkey.start()
        until(lambda: tier_values(server, "kv_tier_available") == {"remote": 1}, seconds=60)


def test_an_engine_that_is_killed_finds_its_kv_in_the_shared_pool(tmp_path: Path) -> None:
    model = save_checkpoint(tiny_model("llama", seed=3)[0], tmp_path)
    prompt = [number % VOCAB for number in range(7, 137)]
    with PoolProcess(16 << 20) as pool, running(
            str(model), "--skip-tokenizer-init", "--served-model-name", "default", "--max-model-len", "256",
            "--host-pool", str(pool.path), "--spill", "eager", "--restore", "always") as server:

        def tokens() -> tuple[list[int], dict[str, int]]:
            body = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True, "return_timings": True}
            answer = server.http().post("/v1/completions", json=body)
            assert answer.is_success, answer.text
            return answer.json()["choices"][0]["token_ids"], answer.json()["timings"][0]["tokens"]

        first, sources = tokens()
        assert sources["computed"] == 130
        until(lambda: sum(model.blocks for model in pool.report().models) == 8)
        [engine] = psutil.Process(server.process.pid).children()
        engine.kill()
        until(lambda: server.metrics_total("engine_restarts_total") > 0
              and httpx.get(f"{server.url}/health").is_success, seconds=120)
        again, sources = tokens()
        assert again == first
        assert sources == {"computed": 2, "device": 0, "host": 0, "pool": 128, "disk": 0, "remote": 0}
        until(lambda: tier_values(server, "kv_tier_hit_tokens_total") == {"pool": 128})
        assert tier_values(server, "kv_transfer_bytes_total")["pool out"] > 0
        pool.kill()
        until(lambda: tier_values(server, "kv_tier_available") == {"pool": 0}, seconds=60)
        assert tokens()[0] == first
        pool.start()
        until(lambda: tier_values(server, "kv_tier_available") == {"pool": 1}, seconds=60)


def test_a_disk_that_the_engine_cannot_use_is_refused_at_the_start() -> None:
    """A folder is rejected at the start if only a write shows that it is unusable, which the plan cannot see."""
    ended = subprocess.run([*SPILL, "serve", "--load-format", "dummy", "--port", "0", "--disk",
                            "/proc/nowhere/kv:100MB"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "--disk /proc/nowhere/kv cannot be used: " in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
