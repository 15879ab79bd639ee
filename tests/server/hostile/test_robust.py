"""Abuse and load: each bad input gets a 4xx in OpenAI's format, and the server works as before."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.servers.running_server import SPILL, Server, running, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(null_server: Server) -> Iterator[httpx.Client]:
    with null_server.http() as made:
        yield made


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields).encode()


ABUSE: list[tuple[str, bytes, int, str]] = [
    (COMPLETIONS, b"", 400, "not valid JSON"),
    (COMPLETIONS, b"{", 400, "not valid JSON"),
    (COMPLETIONS, b"[]", 400, "JSON object"),
    (COMPLETIONS, b"null", 400, "JSON object"),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, "UTF-8"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "surrogate"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": Infinity}', 400, "Infinity"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', 400, "out of range"),
    (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, "given twice"),
    (COMPLETIONS, b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", 400, "not valid JSON"),
    (COMPLETIONS, body(metadata={"a": json.loads(deep(100))}), 200, ""),
    (COMPLETIONS, b'{"prompt": "a", "metadata": ' + deep(4_000).encode() + b"}", 400, "nested"),
    (COMPLETIONS, b'{"prompt": "a", "metadata": ' + deep(200_000).encode() + b"}", 400, "objects and arrays"),
    (COMPLETIONS, body(logit_bias={str(i): 1 for i in range(3000)}), 400, "an object has 3000 fields"),
    (COMPLETIONS, body(metadata=[0] * 300_000), 400, "--max-json-values"),
    (COMPLETIONS, body(metadata=[{str(i): 0 for i in range(600)}] * 100), 400, "fields; at most 32768 are allowed"),
    (COMPLETIONS, body(guided_choice=[1] * 5000), 400, "guided_choice.0"),
    (CHAT, chat(messages=[{"role": "user", "content": ""}] * 2049), 400, "--max-messages"),
    (CHAT, chat(messages=[{"role": "user", "content": [1] * 5000}]), 400, "messages.0.content.0"),
    ("/v1/responses", json.dumps({"input": [{"role": "user", "content": ""}] * 2049}).encode(), 400, "--max-messages"),
    (COMPLETIONS, body(temprature=1), 400, "did you mean 'temperature'"),
    (COMPLETIONS, body(stream_options={"include_use": True}), 400, "unknown field 'include_use' in stream_options"),
    (COMPLETIONS, body(stop=[""]), 400, "stop.0: String should have at least 1 character"),
    (COMPLETIONS, body(stop=["a"] * 65), 400, "stop: Input should be a valid string; or List should have at most 64"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema: Field required"),
    (COMPLETIONS, body(prompt=None), 400, "prompt"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "needs content"),
    (COMPLETIONS, body(prompt=[]), 400, "prompt"),
    (COMPLETIONS, body(prompt=""), 400, "empty"),
    (COMPLETIONS, body(prompt=["a", 1]), 400, "prompt"),
    (COMPLETIONS, body(prompt=[1, "a"]), 400, "prompt"),
    (COMPLETIONS, body(prompt=[1, True]), 400, "prompt"),
    (COMPLETIONS, body(prompt=[-1]), 400, "prompt"),
    (COMPLETIONS, body(prompt=[10**9]), 400, "out of range"),
    (COMPLETIONS, body(prompt=[2**70]), 400, "prompt"),
    (COMPLETIONS, body(prompt={"a": 1}), 400, "a list of strings"),
    (COMPLETIONS, body(prompt=[1] * 2000), 400, "1024"),
    (COMPLETIONS, body(prompt="ab " * 1_000_000), 400, "at least"),
    (COMPLETIONS, body(prompt="ab " * 2_000_000), 413, "--max-request-bytes"),
    (CHAT, chat(messages=[{"role": "user", "content": "ab " * 1_000_000}]), 400, "at least"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a", "description": "ab " * 1_000_000}}]), 400,
     "at least"),
    (CHAT, chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
        {"function": {"name": "a", "arguments": json.dumps({"a": "ab " * 1_000_000})}}]}]), 400, "at least"),
    (COMPLETIONS, b'"' + b'\\"' * 1_000_000, 400, "not valid JSON"),
    (COMPLETIONS, body(prompt=["a"] * 1000, n=256), 400, "256000 sequences"),
    (COMPLETIONS, body(max_tokens=-1), 400, "max_tokens"),
    (COMPLETIONS, body(max_tokens="1"), 400, "max_tokens"),
    (COMPLETIONS, body(max_tokens=1.5), 400, "max_tokens"),
    (COMPLETIONS, body(max_tokens=5000), 400, "5001 were requested"),
    (COMPLETIONS, body(n=0), 400, "n:"),
    (COMPLETIONS, body(n=10**9), 400, "n:"),
    (COMPLETIONS, body(n=True), 400, "n:"),
    (COMPLETIONS, body(seed=2**64), 400, "seed"),
    (COMPLETIONS, body(seed=-(2**63)), 200, ""),
    (COMPLETIONS, body(temperature=-1), 400, "temperature"),
    (COMPLETIONS, body(top_p=0), 400, "top_p"),
    (COMPLETIONS, body(logprobs=1000), 400, "logprobs"),
    (COMPLETIONS, body(logit_bias={"a": 1}), 400, "logit_bias"),
    (COMPLETIONS, body(logit_bias={"999999999": 1}), 400, "logit_bias"),
    (COMPLETIONS, body(stop=""), 400, "stop"),
    (COMPLETIONS, body(stop=["a"] * 100), 400, "stop"),
    (COMPLETIONS, body(stop_token_ids=[10**8]), 400, "stop_token_ids"),
    (COMPLETIONS, body(structured_outputs={}), 400, "exactly one"),
    (COMPLETIONS, body(structured_outputs={"regex": "("}), 400, "regex"),
    (COMPLETIONS, body(structured_outputs={"regex": "("}, stream=True), 400, "regex"),
    (COMPLETIONS, body(structured_outputs={"choice": []}), 400, "choice"),
    (COMPLETIONS, body(guided_json={"type": "nonsense"}), 400, "json"),
    (COMPLETIONS, body(guided_regex="a", guided_choice=["b"]), 400, "give one of them"),
    (COMPLETIONS, body(use_beam_search=True), 400, "use_beam_search"),
    (COMPLETIONS, body(model="gpt-4"), 404, "'default'"),
    (COMPLETIONS, body(model=7), 400, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=[{"role": "king", "content": "a"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user", "content": 7}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "contents": "a"}]), 400, "unknown field 'contents' in messages.0"),
    (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]), 400,
     "JSON object"),
    (CHAT, chat(top_logprobs=2), 400, "needs logprobs"),
    (CHAT, chat(max_tokens=0), 400, "at least 1"),
    (CHAT, chat(tool_choice="required"), 400, "the request has no tools"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a"}}],
                tool_choice={"type": "function", "function": {"name": "b"}}), 400, "names 'b'"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), 400, "schema"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format"),
    (CHAT, chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), 400, "give one of them"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": json.loads(
        '{"items":' * 100 + "{}" + "}" * 100)}}), 400, "deep"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    ("/v1/responses", b'{"input": "a", "tools": [{"type": "web_search"}]}', 400, "tools"),
    ("/v1/responses", b'{"input": []}', 400, "input"),
    ("/v1/embeddings", b'{"input": "a", "model": "m"}', 404, "makes no embeddings"),
    ("/tokenize", b'{"prompt": 7}', 400, "prompt"),
    ("/tokenize", b"{}", 400, "prompt"),
    ("/detokenize", b'{"tokens": [99999999]}', 400, "out of range"),
    ("/v1/nothing", b"{}", 404, "There is no"),
    ("/health", b"{}", 405, "does not accept POST"),
]


def test_each_abuse_is_refused_and_the_next_request_served(http: httpx.Client, null_server: Server) -> None:
    for path, content, status, words in ABUSE:
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, (path, content[:200], response.text)
        if status != 200:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, content[:200]
            assert words in error["message"], (content[:200], error)
            assert "Traceback" not in response.text
        assert http.post(COMPLETIONS, content=body(), headers={"Content-Type": "application/json"}).status_code == 200
    assert "Traceback" not in null_server.log()


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    refused = http.post(COMPLETIONS, content=body(), headers={"Content-Type": "text/plain"})
    assert refused.status_code == 415
    assert "application/json" in refused.json()["error"]["message"]
    assert "access-control-allow-origin" not in http.get("/version", headers={"Origin": "http://evil.example"}).headers


def test_only_a_site_that_is_let_in_may_call(guarded_server: Server) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    with httpx.Client(base_url=guarded_server.url) as http:  # a browser's preflight request has no key
        allowed = http.options(CHAT, headers=ask | {"Origin": "http://page.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        other = http.options(CHAT, headers=ask | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_prompt_text_is_logged(http: httpx.Client, null_server: Server) -> None:
    http.post(COMPLETIONS, json={"prompt": "xylophone secret", "max_tokens": 1})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "xylophone"}], "max_tokens": 1})
    line = r"POST /v1/chat/completions 200 \d+ ms id=\w+ prompt=\d+ cached=\d+ output=1 ended=length"
    until(lambda: re.search(line, null_server.log()) is not None)
    assert "xylophone" not in null_server.log()


def test_large_bodies_are_refused_with_the_limit_and_the_size(guarded_server: Server) -> None:
    with guarded_server.http() as http:
        for size in (200_000, 2_000_000):
            refused = http.post(COMPLETIONS, json={"prompt": "a" * size})
            assert refused.status_code == 413
            assert "100000 bytes" in refused.json()["error"]["message"]
            assert str(size)[:2] in refused.json()["error"]["message"]

        def parts() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 10_000

        assert http.post(COMPLETIONS, content=parts(),
                         headers={"Content-Type": "application/json"}).status_code == 413
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_full_queue_says_when_to_come_back_and_a_second_signal_hurries() -> None:
    with running("--load-format", "null", "--max-queue", "2", "--max-num-seqs", "1",
                 "--enable-admin-routes") as busy, busy.http() as http:
        assert http.post("/sleep").status_code == 200  # so that requests wait
        streams = [http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) for _ in range(3)]
        threads = [threading.Thread(target=_enter, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        until(lambda: sum(row["running"] for row in http.get("/live").json()["requests"]) == 3)
        refused = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert http.get("/health").status_code == 503
        assert http.get("/health").json()["error"]["code"] == "engine_sleeping"
        busy.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # the first signal waits for running requests
            busy.process.wait(0.5)
        busy.process.send_signal(signal.SIGINT)
        assert busy.process.wait(10) == 0
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def _enter(stream: Any) -> None:
    with contextlib.suppress(httpx.HTTPError), stream as response:
        for _ in response.iter_lines():
            pass


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    def idle() -> bool:
        return server.metrics_total("num_requests_running") == server.metrics_total("num_requests_waiting") == 0

    asked = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    with server.http() as http:
        with http.stream("POST", COMPLETIONS, json=asked | {"stream": True, "n": 3}) as response:
            lines = response.iter_lines()  # a reference keeps the client connected
            next(lines)
            until(lambda: not idle())
        until(idle, 2)
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json=asked, timeout=0.7)
        until(idle, 2)
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json=asked | {"prompt": ["a", "b", "c"]}, timeout=0.7)
        until(idle, 2)
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert sum(value for name, value in server.metrics().items()
                   if "kv_blocks" in name and 'state="protected"' in name) == 0


def test_the_front_does_without_torch(server: Server) -> None:
    """The front starts at once and stays small: only the engine process loads torch."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", timeout=60, json={
        "model": "default", "messages": [{"role": "user", "content": "1"}], "max_tokens": 4,
        "response_format": {"type": "json_object"}})
    assert answer.status_code == 200, answer.text
    engines = psutil.Process(server.process.pid).children()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert any("libtorch" in Path(f"/proc/{engine.pid}/maps").read_text() for engine in engines)


def test_a_slow_reader_does_not_hold_up_others(server: Server) -> None:
    with server.http() as http, http.stream("POST", COMPLETIONS, json={
            "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}) as slow:
        lines = slow.iter_lines()
        next(lines)
        start = time.monotonic()
        with server.http() as other:
            assert other.post(COMPLETIONS, json={"prompt": "b", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - start < 10


# Starting and stopping


def spill(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SPILL, *arguments], capture_output=True, text=True, timeout=seconds, check=False)


def test_a_port_in_use_is_said_before_anything_is_loaded(null_server: Server) -> None:
    port = null_server.url.rpartition(":")[2]
    start = time.monotonic()
    done = spill("serve", "--port", port)
    assert done.returncode == 2
    assert re.fullmatch(rf"spill: port {port} is in use( by .+ \(process {null_server.process.pid}\))?; stop that, or "
                        rf"choose another, as in --port \d+\n", done.stderr)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(("arguments", "words"), [
    (["no/such-model-anywhere/here"], "no/such-model-anywhere/here"),
    (["--max-num-seq", "3"], "did you mean --max-num-seqs?"),
    (["--host", "no.such.host.invalid"], "not an address"),
    (["--gpu-memory", "100MB"], "--gpu-memory"),
    (["--max-request-bytes", "lots"], "not a size"),
])
def test_a_start_that_cannot_be_is_one_sentence(arguments: list[str], words: str) -> None:
    done = spill("serve", "--port", "0", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("spill: ")
    assert "Traceback" not in done.stderr


def test_a_signal_drains_then_stops_and_leaves_nothing() -> None:
    with running("--max-model-len", "1024", "--no-log-requests") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        port = int(server.url.rpartition(":")[2])
        with server.http() as http, http.stream("POST", COMPLETIONS, json={
                "prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        assert server.process.wait(20) == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), 1):
            pass
