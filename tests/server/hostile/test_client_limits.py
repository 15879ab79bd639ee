"""What the server accepts from an unknown client is bounded: bytes, headers, requests, connections and time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from spillover.server.api.errors import ApiError
from spillover.server.api.requests.json_scan import MAX_DEPTH, VALUES_PER_CONTAINER, VALUES_PER_FIELD, check_shape
from spillover.server.app import make_app
from spillover.server.front import INLINE_BYTES, LARGE_BYTES, prepare
from spillover.server.settings import ServerSettings
from support.servers.running_server import Server, until
from support.servers.stub_client import StubClient

SMALL = {"prompt": "a", "max_tokens": 1}
ADMIN = {"Authorization": "Bearer admin"}
MiB = 1 << 20


def refused(server: Server, reason: str) -> float:
    return server.metrics()[f'spillover:requests_refused_total{{reason="{reason}"}}']


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), 30) as made:
        yield made


def post(body: Any = None, **headers: str) -> bytes:
    content = json.dumps(SMALL if body is None else body).encode()
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode() + content


def everything(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def error_in(answer: bytes) -> dict[str, Any]:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# The shape of a body, before it is parsed


def counts(value: Any) -> tuple[int, int, int, int]:
    """Count values, fields, containers and depth by recursion."""
    if not isinstance(value, list | dict):
        return 1, 0, 0, 0
    inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    values, fields, containers, _ = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0, 0)
    return (values + 1, fields + (len(value) if isinstance(value, dict) else 0), containers + 1,
            1 + max((row[3] for row in inner), default=0))


def refusal(body: bytes, limit: int) -> str | None:
    try:
        check_shape(body, limit)
    except ApiError as error:
        return error.code
    return None


texts = st.text(st.sampled_from('a"\\[]{},: \n\u00e9\U0001f600'), max_size=12)
values = st.recursive(st.none() | st.integers() | texts,
                      lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
                      max_leaves=60)


@settings(max_examples=300, deadline=None)
@given(value=values, limit=st.integers(1, 2000), ascii_only=st.booleans())
def test_the_count_before_parsing_is_that_of_the_parsed_value(value: Any, limit: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    found, fields, containers, _ = counts(value)
    # Values are separated by commas and enclosed by brackets: each empty container may make the count too high by one.
    many = found > limit + containers
    many = many or fields > max(1, limit // VALUES_PER_FIELD) or containers > max(1, limit // VALUES_PER_CONTAINER)
    few = found + containers <= limit and fields <= limit // VALUES_PER_FIELD
    few = few and containers <= limit // VALUES_PER_CONTAINER
    assert many <= (refusal(body, limit) == "too_many_values") <= (not few)


@settings(max_examples=50, deadline=None)
@given(depth=st.integers(1, 2 * MAX_DEPTH), wide=st.integers(0, 300), text=texts)
def test_nesting_is_counted_outside_strings_only(depth: int, wide: int, text: str) -> None:
    value: Any = [text + "[" * 500] + [[]] * wide
    for _ in range(depth - 2 if wide else depth - 1):
        value = {text: value}
    body = json.dumps(value).encode()
    deep = counts(value)[3] > MAX_DEPTH
    with pytest.raises(ApiError, match="nested") if deep else contextlib.nullcontext():
        check_shape(body, 10**9)


# Large bodies


@pytest.mark.parametrize("nbytes", [0, INLINE_BYTES, INLINE_BYTES + 1, LARGE_BYTES, LARGE_BYTES + 1, 4 * MiB])
def test_only_small_bodies_are_worked_on_by_the_event_loop(nbytes: int) -> None:
    app = make_app(StubClient(), ServerSettings(served_model_names=("m",)))  # type: ignore[arg-type]
    request = HttpRequest({"type": "http", "app": app, "spillover.body_bytes": nbytes})

    async def thread_names() -> list[str]:
        return await asyncio.gather(*(prepare(request, lambda: threading.current_thread().name) for _ in range(8)))

    names = set(asyncio.run(thread_names()))
    app.state.front.close()
    assert (names == {threading.current_thread().name}) == (nbytes <= INLINE_BYTES)
    assert nbytes <= LARGE_BYTES or len(names) == 1  # the largest are parsed one at a time


def test_the_largest_bodies_are_refused_within_a_bound_of_memory(null_server: Server) -> None:
    largest = 4 * MiB - 1024
    message, call = '{"role":"user","content":""},', '{"function":{"name":"a","arguments":"{}"}},'
    bodies = [
        ("/v1/chat/completions", '{"messages":[' + message * (largest // len(message)) + message[:-1] + "]}"),
        ("/v1/responses", '{"input":[' + message * (largest // len(message)) + message[:-1] + "]}"),
        ("/v1/chat/completions", '{"messages":[{"role":"assistant","tool_calls":[' + call * (largest // len(call))
         + call[:-1] + "]}]}"),
        ("/v1/completions", '{"prompt":' + "[" * largest),
        ("/v1/completions", json.dumps({"prompt": "ab " * (largest // 3)})),
        ("/v1/completions", json.dumps({"prompt": '"' * (largest // 2 - 100)})),
    ]
    memory = psutil.Process(null_server.process.pid).memory_info
    with null_server.http() as http:
        before = memory().rss
        for path, content in bodies:
            answer = http.post(path, content=content.encode(), headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
        assert memory().rss - before < 300 * MiB


def test_bodies_together_are_bounded(null_server: Server) -> None:
    """Unfinished bodies hold memory up to a limit; above it, other clients are told to retry."""
    before = refused(null_server, "bodies_busy")
    with contextlib.ExitStack() as stack:
        for _ in range(17):
            one = stack.enter_context(connected(null_server))
            one.settimeout(0.2)
            head = post({}, **{"Content-Length": str(4 * MiB)})
            with contextlib.suppress(OSError):
                one.sendall(head + b" " * (4 * MiB - 1000))
        until(lambda: refused(null_server, "bodies_busy") > before)
        assert httpx.post(f"{null_server.url}/v1/completions", timeout=60, json=SMALL).status_code == 200
    large = {"prompt": "a" * MiB}
    until(lambda: httpx.post(f"{null_server.url}/v1/completions", timeout=60, json=large).status_code == 400)


# Before there is a request


def test_headers_are_bounded_in_bytes_and_in_number(null_server: Server) -> None:
    process = psutil.Process(null_server.process.pid)
    for head in (b"a: " + b"b" * 100_000, b"x" * 100_000, b"".join(b"a%d: b\r\n" % i for i in range(300))):
        before = refused(null_server, "headers_too_large")
        with connected(null_server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + head)
            assert error_in(everything(connection))["code"] == "headers_too_large"
        assert refused(null_server, "headers_too_large") == before + 1
    before = process.memory_info().rss
    for start in (b"GET /health HTTP/1.1\r\na: ",
                  b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: "):
        with connected(null_server) as connection, contextlib.suppress(OSError):
            connection.sendall(start)
            for _ in range(64):
                connection.sendall(b"b" * MiB)
    assert process.memory_info().rss - before < 32 * MiB
    assert httpx.get(f"{null_server.url}/health", headers={"x-long": "a" * 30_000}).status_code == 200


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                                  b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
                                  b"CONNECT a:80 HTTP/1.1\r\n\r\n"])
def test_what_is_not_http_is_refused_in_the_shape_of_every_error(null_server: Server, sent: bytes) -> None:
    before = refused(null_server, "malformed_http")
    with connected(null_server) as connection:
        connection.sendall(sent)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert error_in(answer)["code"] == "malformed_http"
    assert refused(null_server, "malformed_http") == before + 1


def test_what_follows_a_request_does_not_spoil_its_answer(null_server: Server) -> None:
    with connected(null_server) as connection:
        connection.sendall(post() + b"\x00 this is not HTTP\r\n\r\n")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_pipelined_requests_are_answered_in_order_and_wait_as_bytes(null_server: Server) -> None:
    process = psutil.Process(null_server.process.pid)
    before = process.memory_info().rss
    paths = [b"/version", b"/health", b"/v1/models", b"/nothing"] * 500
    sizes = {b"/version": b'"version"', b"/health": b'"status"', b"/v1/models": b'"list"', b"/nothing": b'"error"'}
    requests = b"".join(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path for path in paths)
    with connected(null_server) as connection:
        received = b""
        connection.setblocking(False)
        sent, deadline = 0, time.monotonic() + 60
        while received.count(b"HTTP/1.1 ") < len(paths) or not received.endswith(b"}"):
            assert time.monotonic() < deadline
            select.select([connection], [connection] if sent < len(requests) else [], [], 1)
            with contextlib.suppress(BlockingIOError):
                sent += connection.send(requests[sent:sent + 65536]) if sent < len(requests) else 0
            with contextlib.suppress(BlockingIOError):
                received += connection.recv(1 << 20)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert all(sizes[path] in body for path, body in zip(paths, bodies, strict=True))
    assert process.memory_info().rss - before < 32 * MiB


def test_a_request_that_does_not_arrive_is_ended(edge_server: Server) -> None:
    before = refused(edge_server, "client_timeout")
    whole = post({"prompt": "a" * 100, "max_tokens": 1})
    for part in (whole[:20], whole[:-50]):
        with connected(edge_server) as connection:
            connection.sendall(part)
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert error_in(answer)["code"] == "client_timeout"
    with connected(edge_server) as connection:  # one byte at a time is also too slow
        end = time.monotonic() + 10
        connection.sendall(whole[:-90])
        with contextlib.suppress(OSError):
            for byte in whole[-90:]:
                time.sleep(0.1)
                connection.sendall(bytes([byte]))
        assert time.monotonic() < end
    assert refused(edge_server, "client_timeout") == before + 3


def test_idle_connections_make_room_for_others(edge_server: Server) -> None:
    before = refused(edge_server, "idle_connection")
    with contextlib.ExitStack() as stack:
        for index in range(40):
            one = stack.enter_context(connected(edge_server))
            if index % 2:
                one.sendall(b"GET /health HTTP/1.1\r\n")  # never completed
        with edge_server.http() as http:
            assert http.post("/v1/completions", json=SMALL).status_code == 200
    assert refused(edge_server, "idle_connection") > before


def test_connections_in_use_are_not_closed_for_others(edge_server: Server) -> None:
    with edge_server.http() as http:
        assert http.post("/sleep", headers=ADMIN).status_code == 200  # so that requests wait
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(edge_server)) for _ in range(16)]
        for one in waiting:
            one.sendall(post())
        time.sleep(0.5)  # until they count as requests
        with connected(edge_server) as other:
            assert error_in(everything(other))["code"] == "too_many_connections"
        for one in waiting[:2]:
            one.close()

        def woken() -> bool:
            return httpx.post(f"{edge_server.url}/wake_up", headers=ADMIN).status_code == 200

        until(woken)
        assert all(one.recv(65536).startswith(b"HTTP/1.1 200 ") for one in waiting[2:])


# Clients that close their half of the connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_ended_its_half_gets_its_answer(server: Server, stream: bool) -> None:
    asked = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": stream}
    with connected(server) as connection:
        connection.sendall(post(asked))
        connection.shutdown(socket.SHUT_WR)
        answer = everything(connection)
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in answer


def test_a_client_that_has_gone_after_its_request_does_not_hold_the_engine(server: Server) -> None:
    asked = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    with connected(server) as connection:
        connection.sendall(post(asked))
        until(lambda: server.metrics_total("num_requests_running") > 0)
    until(lambda: server.metrics_total("num_requests_running") == 0, 5)
