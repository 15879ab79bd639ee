"""Counters by the same names whichever engine counts them."""

from __future__ import annotations

import pytest
from mock_server import MockServer

from spillover.bench import server_facts
from spillover.errors import SpilloverError

VLLM = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 20.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 22.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 5.0
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 4.0
"""
SPILLOVER = """\
# TYPE spillover:prompt_tokens_by_source_total counter
spillover:prompt_tokens_by_source_total{model_name="a \\"b\\", {c}",source="host"} 1.2e+03
"""
LLAMACPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 7
"""


def test_counters_of_three_engines() -> None:
    assert server_facts.parse_counters(VLLM) == {"prefix_cache_queries": 42.0, "request_success/stop": 1.0}
    assert server_facts.parse_counters(SPILLOVER) == {"prompt_tokens_by_source/host": 1200.0}
    assert server_facts.parse_counters(LLAMACPP) == {"prompt_tokens": 7.0}
    assert server_facts.parse_counters("<html>not found</html>") == {}
    assert server_facts.difference({"a": 3.0, "b": 1.0}, {"a": 1.0}) == {"a": 2.0, "b": 1.0}


def test_what_a_server_tells() -> None:
    with MockServer() as mock:
        server_facts.wait_until_ready(mock.url, 5)
        assert server_facts.version(mock.url) == "mock 1"
        assert server_facts.counters(mock.url)["prompt_tokens"] == 0
        assert server_facts.post(mock.url + "/start_profile")
        assert not server_facts.post(mock.url + "/absent")
    with pytest.raises(SpilloverError, match="spill serve"):
        server_facts.wait_until_ready(mock.url, 0)
    assert server_facts.counters(mock.url) == {}
    assert server_facts.version(mock.url) is None
