"""The console block and JSON keys that parsers of `vllm bench serve` expect."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.bench.serving.serving_report import Report, ReportOptions, parse_goodput
from spillover.errors import SpilloverError

# The output of `vllm bench serve` 0.32 for the run below.
BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         1         
Maximum request concurrency:             4         
Request rate configured (RPS):           8.00      
Benchmark duration (s):                  1.00      
Total input tokens:                      20        
Total generated tokens:                  6         
Request throughput (req/s):              2.00      
Request goodput (req/s):                 1.00      
Output token throughput (tok/s):         6.00      
Peak output token throughput (tok/s):    5.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          26.00     
---------------Time to First Token----------------
Mean TTFT (ms):                          150.00    
Median TTFT (ms):                        150.00    
P99 TTFT (ms):                           199.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          225.00    
Median TPOT (ms):                        225.00    
P99 TPOT (ms):                           249.50    
---------------Inter-token Latency----------------
Mean ITL (ms):                           225.00    
Median ITL (ms):                         225.00    
P99 ITL (ms):                            250.00    
=================================================="""

# The parser of a course on serving systems.
PARSER = [(r"Throughput:\s+([\d.]+)\s+requests/s", 2.0), (r"Mean TTFT.*?:\s+([\d.]+)\s+ms", 150.0),
          (r"P99 TTFT.*?:\s+([\d.]+)\s+ms", 199.0), (r"Mean ITL.*?:\s+([\d.]+)\s+ms", 225.0),
          (r"P99 ITL.*?:\s+([\d.]+)\s+ms", 250.0)]


def a_run() -> Run:
    first = RequestRecord(0, 0.0, 0.0, ((0.1, 1), (0.3, 1), (0.5, 1)), 0.5, 10, 3, 3,
                          sources={"computed": 4, "host": 6}, text="abc",
                          timings={"queue": 0.01, "prefill": 0.05, "decode": 0.4})
    second = RequestRecord(1, 0.3, 0.3, ((0.5, 1), (0.75, 1), (1.0, 1)), 1.0, 10, 3, 4)
    failed = RequestRecord(2, 0.5, 0.5, (), 0.6, 10, 0, 3, error="HTTP 500: no")
    details = {"request_rate": 8.0, "burstiness": 1.0, "max_concurrency": 4, "model": "m", "offered": 3,
               "stopped": None, "not_sent": 0}
    return Run((first, second, failed), 1e9, 1.0, ClientHealth(), (0.1, 0.5),
               {"prefix_cache_queries": 20.0, "prefix_cache_hits": 5.0}, details)


def a_report() -> Report:
    return Report(a_run(), ReportOptions(goodput={"ttft": 0.15}, metadata={"gpu": "none"}))


def test_the_block_is_vllms() -> None:
    assert a_report().block() == BLOCK


def test_a_parser_that_wants_units_behind_numbers_finds_them() -> None:
    report = a_report()
    text = "\n".join([report.block(), *report.notes()])
    for pattern, value in PARSER:
        match = re.search(pattern, text)
        assert match is not None, pattern
        assert float(match.group(1)) == pytest.approx(value)


def test_notes_tell_what_vllm_does_not() -> None:
    notes = "\n".join(a_report().notes())
    for said in ("computed 4 (40.0%), host 6 (60.0%)", "5 of 20 tokens looked up were found (25.0%)",
                 "queue 10.00 ms, prefill 50.00 ms, decode 400.00 ms", "1 x HTTP 500: no",
                 "1 of 2 answers do not have the requested length", "Objectives met by 33.3%"):
        assert said in notes
    tired = replace(a_run(), client=ClientHealth(saturated="a client process was busy 97% of the time"))
    assert any(note.startswith("CLIENT SATURATED") for note in Report(tired, ReportOptions()).notes())


def test_json_has_vllms_keys() -> None:
    result = json.loads(json.dumps(a_report().to_json(), allow_nan=False))
    assert {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
            "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
            "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
            "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "mean_ttft_ms",
            "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms",
            "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms", "mean_e2el_ms"} <= set(result)
    assert (result["gpu"], result["num_prompts"], result["p99_ttft_ms"]) == ("none", 3, pytest.approx(199.0))
    assert "itls" not in result
    detailed = a_report().to_json(detailed=True)
    assert detailed["itls"][0] == pytest.approx([0.2, 0.2])
    assert detailed["generated_texts"][0] == "abc"
    assert detailed["errors"] == ["", "", "HTTP 500: no"]
    assert RequestRecord.from_json(detailed["records"][0]) == a_run().records[0]


def test_a_run_without_answers_can_be_shown() -> None:
    run = replace(a_run(), records=a_run().records[2:])
    report = Report(run, ReportOptions())
    assert "Successful requests:                     0" in report.block()
    json.dumps(report.to_json(), allow_nan=False)
    assert report.notes()


def test_objectives_are_milliseconds() -> None:
    assert parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    for wrong in ("ttft", "speed:5", "ttft:fast", "e2el:-1"):
        with pytest.raises(SpilloverError, match="ttft:500 tpot:50"):
            parse_goodput([wrong])
