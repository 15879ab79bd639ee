"""Counters have the same names for all engines."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spillover.bench.serving import server_facts
from spillover.errors import SpilloverError
from support.servers.mock_server import MockServer

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
        assert server_facts.post(mock.url + "/start_profile") == {}
        with pytest.raises(SpilloverError, match="404"):
            server_facts.post(mock.url + "/absent")
    with pytest.raises(SpilloverError, match="spill serve"):
        server_facts.wait_until_ready(mock.url, 0)
    assert server_facts.counters(mock.url) == {}
    assert server_facts.version(mock.url) is None


@contextlib.contextmanager
def starting(answers: list[tuple[int, str]], port: int = 0) -> Iterator[str]:
    """Serve these answers at /health, repeating the last one."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, message = answers.pop(0) if len(answers) > 1 else answers[0]
            body = json.dumps({"error": {"message": message}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_starting_server_is_waited_for_and_what_it_says_is_told() -> None:
    said: list[str] = []
    with starting([(503, "The engine is not ready (loading 40%).")] * 2 + [(200, "")]) as url:
        server_facts.wait_until_ready(url, None, say=said.append)
    assert len(said) == 2
    assert "The engine is not ready (loading 40%)): 0 s of at most 600 s" in said[0]


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    said: list[str] = []
    with starting([(200, "")]) as url:
        port = int(url.rpartition(":")[2])
    waiter = threading.Thread(target=server_facts.wait_until_ready, args=(url, None), kwargs={"say": said.append})
    waiter.start()
    while not said:
        time.sleep(0.01)
    assert "no server answers yet" in said[0]
    assert "at most 30 s" in said[0]
    with starting([(200, "")], port):
        waiter.join(20)
    assert not waiter.is_alive()


def test_what_waiting_will_not_change_is_told_at_once() -> None:
    with starting([(401, "An API key is needed.")]) as url, pytest.raises(SpilloverError, match="An API key is needed"):
        server_facts.wait_until_ready(url, 600)
    with starting([(503, "loading")]) as url, pytest.raises(SpilloverError, match="not ready: loading"):
        server_facts.wait_until_ready(url, 0)
