"""`spill bench tiers`, `restart` and `throughput` on a tiny model: bytes really move, tokens stay the same."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spillover.bench import tiers
from spillover.bench.target import Completion
from spillover.cli.bench import redis_server, targets
from spillover.cli.main import main
from spillover.engine.output.outputs import RequestOutput
from spillover.plan import measure
from spillover.plan.rates import Rates

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
          "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
          "tie_word_embeddings": False, "torch_dtype": "float32"}
CHATS = ("--conversations", "14", "--rounds", "3", "--prefix-len", "96", "--question-len", "8", "--answer-len", "3")
RANDOM = ("--num-prompts", "2", "--input-len", "40", "--output-len", "6", "--repeats", "2")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "measure_rates", lambda *_, **__: Rates("cpu", 1e10, 1e11))


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return [str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


def bench(command: str, model: list[str], *arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", command, *model, *arguments])


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_tiers_side_by_side(model: list[str], tmp_path: Path) -> None:
    out, disk = tmp_path / "out.json", tmp_path / "disk"
    disk.mkdir()
    result = bench("tiers", model, *CHATS, *RANDOM, "--arms", "off,host,host+disk", "--restore", "always", "--disk",
                   f"{disk}:1GB", "--output-json", str(out))
    assert result.exit_code == 0, result.output + result.stderr
    assert "Same greedy tokens everywhere" in result.stdout
    document = written(out)
    assert {"command", "commit", "versions", "hardware", "engine"} <= document.keys()
    # Two repeats of two prompts in each further arm; 14 chats in two rounds with the first arm, and one round without.
    assert document["same_tokens"] == {"requests_compared": 2 * 4 + 2 * 28 + 14, "different": []}
    arms = {(each["workload"], each["arm"]): each for each in document["results"]}
    assert len(arms) == 6
    for arm in ("host", "host+disk"):
        cold, warm = arms["no-reuse", arm], arms["multi-turn", arm]
        assert cold["tokens_by_source"] == {"computed": 160, "device": 0, "host": 0, "pool": 0, "disk": 0, "remote": 0}
        assert cold["traffic"][0]["in"]["bytes"] > 0
        assert warm["num_warm_requests"] == 28
        assert warm["hit_rate"] > 0
        assert warm["traffic"][0]["out"]["bytes"] > 0
        assert warm["recompute_over_this"]["count"] == 14
    assert arms["multi-turn", "off"]["tokens_by_source"]["computed"] == 14 * 115  # 96 + two questions and an answer
    assert arms["multi-turn", "host"]["tokens_by_source"]["host"] > 0
    assert arms["multi-turn", "host+disk"]["tokens_by_source"]["disk"] > 0
    assert not list(disk.iterdir())  # the run's folders were removed


def test_an_arm_with_other_tokens_ends_in_exit_code_1(model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = targets._completion, itertools.count()

    def sometimes_wrong(output: RequestOutput) -> Completion:
        done = real(output)
        return replace(done, token_ids=(next(count), *done.token_ids[1:]))

    monkeypatch.setattr(targets, "_completion", sometimes_wrong)
    result = bench("tiers", model, *RANDOM, "--workload", "no-reuse", "--arms", "off,host")
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout


def test_without_a_server_the_row_says_what_to_install(model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_server", lambda: None)
    result = bench("tiers", model, *RANDOM, "--workload", "no-reuse", "--arms", "off,host+remote")
    assert result.exit_code == 0, result.stderr
    assert "install valkey-server or redis-server" in result.stdout
    first = bench("tiers", model, *RANDOM, "--workload", "no-reuse", "--arms", "host+remote,off")
    assert first.exit_code == 2
    assert "--arms begins with host+remote" in first.stderr


@pytest.mark.skipif(redis_server.find_server() is None, reason="no valkey-server or redis-server is installed")
def test_a_server_is_started_for_the_run(model: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = bench("tiers", model, *CHATS, "--workload", "multi-turn", "--arms", "off,host+remote", "--restore",
                   "always", "--output-json", str(out))
    assert result.exit_code == 0, result.output + result.stderr
    remote = written(out)["results"][1]
    assert remote["tokens_by_source"]["remote"] > 0
    assert remote["traffic"][1]["out"]["percent_of_link"] > 0


@pytest.mark.parametrize(("arguments", "words"), [
    (("--pool-share", "5%", *CHATS), "raise --conversations to at least"),
    (("--pool-share", "0"), "--pool-share takes a share such as 10% or 0.1; got '0'"),
    (("--num-gpu-blocks-override", "9"), "--num-gpu-blocks-override is set by the workload"),
    (("--disk", "/nowhere/at/all:1GB", *CHATS), "/nowhere/at/all is not a folder"),
    (("--repeats", "0"), "--repeats must be at least 1"),
    (("--input-len", "0"), "--input-len must be at least 1"),
])
def test_what_cannot_be_is_refused_before_anything_runs(model: list[str], arguments: tuple[str, ...],
                                                        words: str) -> None:
    result = bench("tiers", model, "--workload", "multi-turn", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_throughput_takes_the_workloads_that_can_be_sent_at_once(model: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = bench("throughput", model, "--dataset-name", "prefix-repetition", "--num-prompts", "6", "--input-len",
                   "20", "--output-len", "4", "--prefix-repetition-num-prefixes", "2",
                   "--prefix-repetition-prefix-len", "32", "--output-json", str(out))
    assert result.exit_code == 0, result.output + result.stderr
    document = written(out)
    assert (document["total_prompt_tokens"], document["total_output_tokens"]) == (6 * 52, 6 * 4)
    refused = bench("throughput", model, "--dataset-name", "multi-turn")
    assert refused.exit_code == 2
    assert "it is for spill bench serve" in refused.stderr


@pytest.mark.parametrize("end", [(), ("--kill",)], ids=["closed", "killed"])
def test_blocks_are_found_again_after_a_restart(model: list[str], tmp_path: Path, end: tuple[str, ...]) -> None:
    out = tmp_path / "out.json"
    result = bench("restart", model, "--num-prompts", "2", "--prefix-len", "64", "--input-len", "70", "--output-len",
                   "3", "--block-size", "16,64", "--restore", "always", "--disk", f"{tmp_path}:1GB", "--output-json",
                   str(out), *end)
    assert result.exit_code == 0, result.output + result.stderr
    document = written(out)
    assert document["same_tokens"] == {"requests_compared": 2 * 5, "different": []}
    assert document["killed"] is bool(end)
    for size, each in zip((16, 64), document["results"], strict=True):
        cold, warm, restart = (stage["tokens_by_source"] for stage in each["stages"])
        stored = 133 // size * size  # the last of 134 tokens is always computed
        assert cold == {"computed": 268 - 64, "device": 64, "host": 0, "pool": 0, "disk": 0, "remote": 0}
        assert warm["device"] == 2 * stored
        assert restart["disk"] + restart["device"] == 2 * stored
        assert restart["disk"] >= stored
        assert each["blocks_on_disk"] == (64 + 2 * (stored - 64)) // size
        assert each["bytes_on_disk"] >= each["blocks_on_disk"] * size * 256  # bytes of KV per token, in float32
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_latency_says_where_the_time_of_a_step_goes(model: list[str], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "measure_rates", lambda *_, **__: Rates("cpu", 1e10, 1e11))
    run = ("--batch-size", "2,3", "--input-len", "24", "--output-len", "6", "--num-iters", "1", "--device", "cpu")
    result = bench("latency", model, *run, "--profile", "--output-json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    for batch, found in zip((2, 3), written(tmp_path / "out.json")["results"], strict=True):
        prefill, decode = found["profile"]["prefill"], found["profile"]["decode"]
        assert (prefill["tokens"], decode["tokens"]) == (24 * batch, batch)
        for step in (prefill, decode):
            parts = step["parts"]
            assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
            assert sum(part["us"] for part in parts.values()) == pytest.approx(step["profiled_step_us"])
            assert parts["down"]["limit_us"] == pytest.approx(
                2 * max(4 * (48 * 32 + step["tokens"] * 80) / 1e10, 2 * step["tokens"] * 48 * 32 / 1e11) * 1e6)
            assert set(step["host_us"]) == {"scheduler", "layout", "launch", "results", "waiting"}
        assert "A decode step, batch 2, 24 in, 2 tokens" in result.output
    assert "Trace for" not in result.output
    with_trace = bench("latency", model, *run[2:], "--batch-size", "1", "--profile", str(tmp_path / "traces"))
    assert with_trace.exit_code == 0, with_trace.output
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["latency-1x24+6.json.gz"]
