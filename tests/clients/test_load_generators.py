"""Three third-party load generators drive the server; by their own count, no request fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_process import ServerProcess

from support.servers.client_process import OFFLINE, run_client

pytestmark = pytest.mark.clients


def test_vllm_bench_serve_completions(server: ServerProcess, tokenizer_folder: Path, tmp_path: Path) -> None:
    result = vllm_bench(server, tokenizer_folder, tmp_path, "--backend", "openai", "--endpoint", "/v1/completions",
                        "--logprobs", "2")
    assert result["total_output_tokens"] == 12 * 16, "usage comes in a chunk of its own, so it counts exactly"
    assert result["total_input_tokens"] == pytest.approx(12 * 64, rel=0.1)


def test_vllm_bench_serve_chat(server: ServerProcess, tokenizer_folder: Path, tmp_path: Path) -> None:
    result = vllm_bench(server, tokenizer_folder, tmp_path, "--backend", "openai-chat",
                        "--endpoint", "/v1/chat/completions")
    assert result["total_output_tokens"] == 12 * 16


def vllm_bench(server: ServerProcess, tokenizer_folder: Path, folder: Path, *arguments: str) -> dict[str, float]:
    run_client("vllm", [
        "bench", "serve", "--base-url", server.url, "--model", "default", "--tokenizer", str(tokenizer_folder),
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "12",
        "--max-concurrency", "4", "--ignore-eos", "--save-result", "--result-filename", "result.json",
        "--disable-tqdm", *arguments], folder, OFFLINE)
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert 0 < result["mean_ttft_ms"] < 60_000
    assert result["mean_tpot_ms"] > 0
    return result


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(server: ServerProcess, tokenizer_folder: Path, tmp_path: Path, route: str) -> None:
    run_client("guidellm", [
        "run", "--backend", f"kind=openai_http,target={server.url},model=default,request_format={route}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer_folder}", "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", "kind=json,path=result.json", "--disable-console"], tmp_path, OFFLINE)
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == pytest.approx(16)


@pytest.mark.parametrize("kind", ["completions", "chat", "responses"])
def test_aiperf(server: ServerProcess, tokenizer_folder: Path, tmp_path: Path, kind: str) -> None:
    run_client("aiperf", [
        "profile", "--model", "default", "--url", server.url, "--endpoint-type", kind, "--streaming",
        "--tokenizer", str(tokenizer_folder), "--request-count", "8", "--concurrency", "2",
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true",
        "--output-artifact-dir", str(tmp_path / "artifacts"), "--ui", "none"], tmp_path)
    (file,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    assert result["request_count"]["avg"] == 8
    assert not result.get("error_summary")
    assert result.get("error_request_count", {"avg": 0})["avg"] == 0
    assert result["output_sequence_length"]["avg"] == pytest.approx(16, abs=1)
