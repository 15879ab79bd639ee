"""Traces are replayed as recorded: times, lengths, and for Mooncake the prefixes that prompts share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spillover.bench.serving.served_model import ServedModel
from spillover.bench.workloads.make_workload import make_workload
from spillover.bench.workloads.traces import Replay, TraceRow, read_azure, read_burstgpt, read_mooncake, trace_shapes
from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.bench.workloads.workloads import Vocabulary
from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
from spillover.errors import SpilloverError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,879,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
118.5,GPT-4,417,276,693,API log
185,ChatGPT,1360,0,1360,API log
"""


def mooncake(at: int, length: int, output: int, *blocks: int) -> str:
    return json.dumps({"timestamp": at, "input_length": length, "output_length": output, "hash_ids": list(blocks)})


@pytest.fixture
def mooncake_file(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([mooncake(9000, 600, 10, 1, 2), mooncake(3000, 1100, 20, 1, 3, 4),
                               mooncake(12000, 1300, 30, 1, 3, 5)]) + "\n")
    return str(file)


def test_mooncake_says_what_prompts_share(mooncake_file: str) -> None:
    rows = read_mooncake(mooncake_file)
    assert rows[0] == TraceRow(9.0, 600, 10, (1, 2))
    shapes, notes = trace_shapes(rows, Replay())
    assert notes == ()
    assert [(shape.at, shape.prompt_len, shape.output_len) for shape in shapes] == [
        (0.0, 1100, 20), (6.0, 600, 10), (9.0, 1300, 30)]
    stats = SyntheticWorkload("mooncake", shapes).stats()
    assert stats.shared_tokens == 512 + 1024
    assert stats.duration == 9.0
    first, second, third = SyntheticWorkload("mooncake", shapes, Vocabulary(5000)).requests(0)
    assert first.prompt[:512] == second.prompt[:512] == third.prompt[:512]
    assert first.prompt[:1024] == third.prompt[:1024]
    assert first.prompt[1024:1030] != third.prompt[1024:1030]
    assert first.prompt[512:518] != second.prompt[512:518]


def test_faster_shorter_and_only_the_first(mooncake_file: str) -> None:
    shapes, notes = trace_shapes(read_mooncake(mooncake_file), Replay(limit=2, speedup=3, length_scale=0.125))
    assert [(shape.at, shape.prompt_len, shape.output_len) for shape in shapes] == [
        (0.0, 64 + 64 + round(76 / 8), 2), (2.0, 64 + round(88 / 8), 1)]
    assert SyntheticWorkload("mooncake", shapes).stats().shared_tokens == 64
    assert len(notes) == 2


def test_what_the_model_cannot_take_is_left_out_and_said(mooncake_file: str) -> None:
    shapes, notes = trace_shapes(read_mooncake(mooncake_file), Replay(max_model_len=1200))
    assert [shape.prompt_len for shape in shapes] == [1100, 600]
    assert notes == ("Left out: 1 of 3 requests, longer than the model's 1,200 tokens",)
    with pytest.raises(SpilloverError, match="--trace-length-scale"):
        trace_shapes(read_mooncake(mooncake_file), Replay(max_model_len=100))


def test_azure_and_burstgpt(tmp_path: Path) -> None:
    azure, burst = tmp_path / "azure.csv", tmp_path / "burst.csv"
    azure.write_text(AZURE)
    burst.write_text(BURSTGPT)
    rows = read_azure(str(azure))
    assert [(row.prompt_len, row.output_len) for row in rows] == [(374, 44), (396, 109)]
    assert rows[1].at - rows[0].at == pytest.approx(4.314579, abs=1e-6)
    assert [(row.at, row.prompt_len, row.output_len) for row in read_burstgpt(str(burst))] == [
        (5, 472, 18), (45, 1087, 230), (118.5, 417, 276)]
    assert len(read_burstgpt(str(burst), "GPT-4")) == 2
    with pytest.raises(SpilloverError, match="GPT-7"):
        read_burstgpt(str(burst), "GPT-7")
    options = WorkloadOptions.from_mapping({"dataset-name": "burstgpt", "dataset-path": str(burst),
                                            "trace-model": "GPT-4", "trace-speedup": 2})
    stats = make_workload(options).stats()
    assert (stats.count, stats.duration, stats.shared_tokens) == (2, 36.75, 0)


@pytest.mark.parametrize(("reader", "content", "said"), [
    (read_mooncake, '{"timestamp": 1}', "row 1"),
    (read_mooncake, mooncake(0, 600, 1, 1), "do not make 600"),
    (read_azure, "a,b\n1,2\n", "TIMESTAMP"),
    (read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "row 1"),
    (read_burstgpt, "Timestamp,Model,Request tokens,Response tokens\n1,m,x,1\n", "row 1"),
])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, reader: object, content: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    assert callable(reader)
    with pytest.raises(SpilloverError, match=said):
        reader(str(file))
    with pytest.raises(SpilloverError, match="cannot read"):
        reader(str(tmp_path / "absent"))
    file.write_bytes(b"\x1f\x8b\xff\xfe")
    with pytest.raises(SpilloverError, match="not a text file"):
        reader(str(file))


@pytest.mark.parametrize("changed", [{"speedup": 0}, {"length_scale": -1}, {"limit": 0}])
def test_impossible_replays_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(SpilloverError, match="--trace-"):
        Replay(**changed)


def test_the_real_mooncake_trace(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation_trace.jsonl"
    shapes, _ = trace_shapes(read_mooncake(str(path)), Replay())
    stats = SyntheticWorkload("mooncake", shapes).stats()
    # As published by its authors: 12,031 requests, on average 12,035 input and 343 output tokens, about 40% reusable.
    assert (stats.count, round(stats.prompt.mean), round(stats.output.mean)) == (12_031, 12_035, 343)
    assert 0.36 < stats.sharing < 0.41
    assert stats.duration == pytest.approx(3537, abs=5)


def test_the_real_azure_traces(shared_data: Path) -> None:
    for kind, count in (("conv", 19_366), ("code", 8_819)):
        path = str(shared_data / "traces" / f"AzureLLMInferenceTrace_{kind}.csv")
        options = WorkloadOptions.from_mapping({"dataset-name": "azure", "dataset-path": path})
        workload = make_workload(options, ServedModel("m"))
        assert workload.stats().count == count
        assert workload.stats().duration == pytest.approx(3500, rel=0.03)
