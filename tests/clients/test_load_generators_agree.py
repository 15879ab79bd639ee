"""`spill bench serve` and third-party load generators agree on the same server: within 2% on the medians of equally
defined metrics.

The server has no model and sends tokens at fixed times, so that two runs can be compared; how accurate both are is
another test. vLLM's TTFT and E2EL start before it builds the request, which takes its client 3 to 6 ms, and its answers
end some 10 ms after their last token: the server is slow enough that this is within the 2%. guidellm's ITL is our TPOT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spillover.bench.serving.load import LoadOptions
from spillover.bench.serving.load_processes import run_load
from spillover.bench.serving.openai_api import Dialect
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import ServingMetrics, measure
from spillover.bench.workloads.arrivals import Arrivals
from support.servers.client_process import OFFLINE, run_client
from support.servers.mock_server import MockServer

pytestmark = pytest.mark.clients
COUNT, INPUT, OUTPUT, STREAMS = 24, 64, 32, 4


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(ttft=0.5, itl=0.05) as server:
        yield server


def ours(mock: MockServer, dialect: Dialect) -> ServingMetrics:
    prompt = tuple(range(INPUT)) if dialect.kind == "completions" else "x" * INPUT
    requests = [ServeRequest(prompt, INPUT, OUTPUT) for _ in range(COUNT)]
    run = run_load(requests, LoadOptions(mock.url, Arrivals(max_concurrency=STREAMS), dialect))
    assert not run.failed
    return measure(run)


def test_vllm_bench_serve_agrees(mock: MockServer, tokenizer_folder: Path, tmp_path: Path) -> None:
    run_client("vllm", [
        "bench", "serve", "--base-url", mock.url, "--model", "mock", "--tokenizer", str(tokenizer_folder),
        "--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT),
        "--num-prompts", str(COUNT), "--max-concurrency", str(STREAMS), "--ignore-eos", "--save-result",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--result-filename", "result.json", "--disable-tqdm"],
        tmp_path, OFFLINE)
    theirs = json.loads((tmp_path / "result.json").read_text())
    mine = ours(mock, Dialect(model="mock"))
    pairs = {"ttft": (mine.ttft.median * 1e3, theirs["median_ttft_ms"]),
             "tpot": (mine.tpot.median * 1e3, theirs["median_tpot_ms"]),
             "itl": (mine.itl.median * 1e3, theirs["median_itl_ms"]),
             "e2el": (mine.e2el.median * 1e3, theirs["median_e2el_ms"]),
             "request throughput": (mine.request_throughput, theirs["request_throughput"]),
             "output throughput": (mine.output_throughput, theirs["output_throughput"]),
             "output tokens": (mine.output_tokens, theirs["total_output_tokens"])}
    print(pairs)
    assert {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=0.02)} == {}


def test_guidellm_agrees(mock: MockServer, tokenizer_folder: Path, tmp_path: Path) -> None:
    run_client("guidellm", [
        "run", "--backend", f"kind=openai_http,target={mock.url},model=mock,request_format=/v1/chat/completions",
        "--tokenizer", f"kind=hf_auto,model={tokenizer_folder}", "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={COUNT}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "--output", "kind=json,path=result.json", "--disable-console"], tmp_path, OFFLINE)
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    theirs = {name: benchmark["metrics"][name]["successful"]["median"] for name in
              ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")}
    mine = ours(mock, Dialect("chat", "mock"))
    pairs = {"ttft": (mine.ttft.median * 1e3, theirs["time_to_first_token_ms"]),
             "tpot": (mine.tpot.median * 1e3, theirs["inter_token_latency_ms"]),
             "e2el": (mine.e2el.median, theirs["request_latency"])}
    print(pairs)
    assert {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=0.02)} == {}
