"""The attacks that attack.py runs. Each yields '' while it makes progress, and a sentence for each problem it finds.

To add one, write a function and decorate it with @attack(...), which registers it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from server_process import HOST, ServerProcess

MiB = 1 << 20
LARGEST = 4 * MiB - 4096  # just below --max-request-bytes
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
Steps = Iterator[str]


@dataclass(frozen=True)
class Attack:
    name: str
    about: str
    run: Callable[[Target], Steps]
    allowed: frozenset[int]  # 5xx statuses that the attack may cause; 0 stands for no answer
    flags: tuple[str, ...]  # flags that the server is started with


ATTACKS: dict[str, Attack] = {}


def attack(name: str, about: str, allowed: tuple[int, ...] = (),
           flags: tuple[str, ...] = ()) -> Callable[[Callable[[Target], Steps]], Callable[[Target], Steps]]:
    def register(run: Callable[[Target], Steps]) -> Callable[[Target], Steps]:
        ATTACKS[name] = Attack(name, about, run, frozenset(allowed), flags)
        return run

    return register


class Target:
    """A server under attack, and the number of its answers by status; status 0 stands for no answer."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.statuses: Counter[int] = Counter()
        self._lock = threading.Lock()

    def count(self, status: int, n: int = 1) -> None:
        with self._lock:
            self.statuses[status] += n

    def post(self, path: str, body: Any, timeout: float = 60, **headers: str) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.request("POST", path, content, {name: text for name, text in given.items() if text}, timeout)

    def request(self, method: str, path: str, content: bytes, headers: dict[str, str], timeout: float = 60) -> int:
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=timeout)
        try:
            connection.request(method, path, content, headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        self.count(status)
        return status

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection((HOST, self.server.port), 30) as made:
            yield made

    def many(self, n: int, work: Callable[[], Any], threads: int = 4) -> Steps:
        """Call `work` n times in a few threads; yield while they run, so that the caller can sample memory."""
        left = iter(range(n))

        def loop() -> None:
            while True:
                with self._lock:
                    if next(left, None) is None:
                        return
                work()

        running = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
        for thread in running:
            thread.start()
        deadline = time.monotonic() + 180
        while any(thread.is_alive() for thread in running):
            if time.monotonic() > deadline:
                yield "the attack was not over after 180 s"
                return
            time.sleep(0.05)
            yield ""


def _refused(target: Target, path: str, content: bytes, n: int = 32) -> Steps:
    expected = (400, 413, 429)
    yield from target.many(n, lambda: target.post(path, content))
    odd = {status: count for status, count in target.statuses.items() if status not in expected}
    yield f"not refused: {odd}" if odd else ""


# Bodies that are small to send and expensive to process

_MESSAGE = b'{"role":"user","content":""},'


@attack("many-messages", "a chat of as many empty messages as fit in 4 MiB")
def many_messages(target: Target) -> Steps:
    yield from _refused(target, CHAT, b'{"messages":[' + _MESSAGE * (LARGEST // len(_MESSAGE)) + _MESSAGE[:-1] + b"]}")


@attack("most-messages", "chats of the maximum number of messages, which must be answered")
def most_messages(target: Target) -> Steps:
    content = b'{"max_tokens":1,"messages":[' + _MESSAGE * 2047 + _MESSAGE[:-1] + b"]}"
    yield from target.many(48, lambda: target.post(CHAT, content))


@attack("many-input-messages", "the same for /v1/responses")
def many_input_messages(target: Target) -> Steps:
    content = b'{"input":[' + _MESSAGE * (LARGEST // len(_MESSAGE)) + _MESSAGE[:-1] + b"]}"
    yield from _refused(target, RESPONSES, content)


@attack("tool-description", "a tool whose description has 4 MB")
def tool_description(target: Target) -> Steps:
    body = {"messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "a", "description": "ab " * (LARGEST // 3)}}]}
    yield from _refused(target, CHAT, json.dumps(body).encode())


@attack("tool-arguments", "an earlier tool call whose arguments have 4 MB")
def tool_arguments(target: Target) -> Steps:
    arguments = json.dumps({"a": "ab " * (LARGEST // 3 - 1000)})
    body = {"messages": [{"role": "user", "content": "a"},
                         {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}]}
    yield from _refused(target, CHAT, json.dumps(body).encode())


@attack("brackets", "4 MB of brackets")
def brackets(target: Target) -> Steps:
    yield from _refused(target, COMPLETIONS, b'{"prompt":' + b"[" * LARGEST)


@attack("oversized", "bodies of 12 MB, beyond --max-request-bytes")
def oversized(target: Target) -> Steps:
    yield from _refused(target, CHAT, b'{"messages":[' + _MESSAGE * 400_000 + _MESSAGE[:-1] + b"]}", n=24)


@attack("long-prompt", "prompts of 4 MB of text, and of characters that JSON escapes")
def long_prompt(target: Target) -> Steps:
    for text in ("ab " * (LARGEST // 3), '"' * (LARGEST // 2), "\n" * (LARGEST // 2), "é😀" * (LARGEST // 18)):
        yield from _refused(target, COMPLETIONS, json.dumps({"prompt": text}).encode(), n=12)


@attack("many-values", "the maximum number of values in a body, all of them invalid")
def many_values(target: Target) -> Steps:
    wrong: list[Any] = [{"prompt": [-1] * 262_000}, {"prompt": "a", "guided_choice": [1] * 262_000},
                        {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(2000)}},
                        {"prompt": "a"} | {f"unknown_{i}": 1 for i in range(2000)},
                        {"prompt": "a", "stop": [1] * 262_000}]
    for body in wrong:
        yield from _refused(target, COMPLETIONS, json.dumps(body).encode(), n=12)
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "txt": ""}] * 8000}]}
    yield from _refused(target, CHAT, json.dumps(parts).encode(), n=12)


@attack("endless-bodies", "bodies of the maximum size that stop just before their end and stay open")
def endless_bodies(target: Target) -> Steps:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            one = stack.enter_context(target.connected())
            one.settimeout(0.3)
            with contextlib.suppress(OSError):
                one.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                            f"Content-Length: {LARGEST}\r\n\r\n".encode() + b" " * (LARGEST - 100))
            yield ""
        status = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        yield "" if status == 200 else f"a small request sent at the same time was answered with {status}"


# Grammars that take long to compile

_BOMBS: list[dict[str, Any]] = [
    {"json": {"type": "integer", "multipleOf": 4_999_999}},
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 99_991 + i}
                                               for i in range(20)}, "required": [f"p{i}" for i in range(20)]}},
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(" + "|".join(f"[a-z]{{{i},{i + 500}}}x{i}" for i in range(50)) + ")*"},
    {"json": {"anyOf": [{"type": "string", "pattern": f"^(a|b){{{i},400}}$"} for i in range(1, 60)]}},
    {"json": {"enum": [f"value {i} " * 8 for i in range(4000)]}},
    {"choice": [f"choice {i} " * 8 for i in range(4000)]},
    {"grammar": "start: " + " | ".join(f'"{"a" * i}" start' for i in range(1, 300)) + ' | "b"'},
]


@attack("grammar-bombs", "grammars that take long to compile, and a trivial one at the same time", allowed=(0,))
def grammar_bombs(target: Target) -> Steps:
    left = iter(_BOMBS * 2)
    trivial = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}

    def bomb() -> None:
        target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4, "structured_outputs": next(left)}, timeout=60)

    start, waited = time.monotonic(), 0.0
    for step in target.many(2 * len(_BOMBS), bomb, threads=3):
        yield step
        if time.monotonic() - start > 1 and waited == 0:
            begun = time.monotonic()
            status = target.post(COMPLETIONS, trivial, timeout=60)
            waited = time.monotonic() - begun
            yield "" if status == 200 else f"the trivial grammar was answered with {status}"
            yield "" if waited < 20 else f"the trivial grammar took {waited:.0f} s"


# Requests from pages of other sites


@attack("foreign-page", "every route, requested as a page of another site would")
def foreign_page(target: Target) -> Steps:
    routes = (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile")
    for route in routes:
        for kind in ("application/json", "text/plain", ""):
            for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
                status = target.post(route, {"prompt": "a"}, Content_Type=kind, **headers)
                yield "" if status == 403 else f"{route} as {kind} with {headers} was answered with {status}"
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status = target.post(COMPLETIONS, {"prompt": "a"}, Content_Type=kind)
        yield "" if status == 415 else f"a body of type '{kind}' was answered with {status}"
    for route in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        status = target.post(route, b"")
        yield "" if status == 403 else f"{route} was answered with {status}"
    status = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    yield "" if status == 200 else f"afterwards a request was answered with {status}"


# Floods of headers, pipelined requests and connections


def _flood(target: Target, start: bytes, nbytes: int) -> None:
    with target.connected() as connection:
        try:
            connection.sendall(start)
            for _ in range(nbytes // MiB):
                connection.sendall(b"b" * MiB)
            connection.sendall(b"\r\n\r\n")
        except OSError:
            pass  # the server closed the connection
        target.count(_status(connection))


def _status(connection: socket.socket) -> int:
    """Return the status of the received answer; a reset counts as 431, because it may have discarded the answer."""
    try:
        line = connection.recv(65536)[:32].split(b" ")
        return int(line[1]) if len(line) > 1 else 400
    except ConnectionResetError:
        return 431
    except OSError:
        return 0


@attack("header-flood", "400 MB of headers on one connection, and of trailers on another")
def header_flood(target: Target) -> Steps:
    for start in (b"GET /health HTTP/1.1\r\na: ", b"GET /", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
                  b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: "):
        yield from target.many(2, lambda start=start: _flood(target, start, 400 * MiB), threads=2)  # type: ignore[misc]


@attack("pipelined", "300,000 requests on one connection, for 30 s")
def pipelined(target: Target) -> Steps:
    request = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    n = 300_000
    everything, sent, answers, deadline = request * n, 0, 0, time.monotonic() + 30
    with target.connected() as connection, selectors.DefaultSelector() as selector:
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while answers < n and time.monotonic() < deadline:
            for _, events in selector.select(1):
                if events & selectors.EVENT_WRITE and sent < len(everything):
                    with contextlib.suppress(BlockingIOError):
                        sent += connection.send(everything[sent:sent + MiB])
                if events & selectors.EVENT_READ:
                    with contextlib.suppress(BlockingIOError):
                        answers += connection.recv(MiB).count(b"HTTP/1.1 200")
            yield ""
    target.count(200, answers)
    yield "" if answers else "nothing was answered"


@attack("half-sent", "1,000 connections whose headers never end")
def half_sent(target: Target) -> Steps:
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            one = stack.enter_context(target.connected())
            one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 8000)
            target.count(200, 0)
            yield ""
        last, deadline = one, time.monotonic() + 45
        last.settimeout(1)
        while time.monotonic() < deadline:
            try:
                target.count(int(last.recv(64).split(b" ")[1]))
            except TimeoutError:
                yield ""
            except (OSError, IndexError):
                target.count(408)
                return
            else:
                return
        yield "a request that never ended was waited for longer than 45 s"


@attack("connection-flood", "6,000 connections at once")
def connection_flood(target: Target) -> Steps:
    with contextlib.ExitStack() as stack:
        for _ in range(6000):
            try:
                stack.enter_context(target.connected())
            except OSError as error:
                yield f"a connection was not accepted: {error}"
                return
            yield ""
        status = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        yield "" if status == 200 else f"a request sent at the same time was answered with {status}"


# An engine that hangs


@attack("hung-engine", "the engine stopped for 20 s: /health must report it within 10 s and recover afterwards",
        allowed=(503,))
def hung_engine(target: Target) -> Steps:
    engine = target.server.engine()
    engine.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    noticed = None
    try:
        while time.monotonic() - start < 20:
            if noticed is None and target.server.status() == 503:
                noticed = time.monotonic() - start
            time.sleep(0.1)
            yield ""
    finally:
        with contextlib.suppress(Exception):  # the server may have replaced the engine
            engine.send_signal(signal.SIGCONT)
    if noticed is None or noticed > 10:
        yield "/health did not report within 10 s that the engine hangs"
    deadline = time.monotonic() + 60
    while target.server.status() != 200:
        if time.monotonic() > deadline:
            yield "/health did not recover within 60 s"
            return
        time.sleep(0.1)
    status = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    yield "" if status == 200 else f"afterwards a request was answered with {status}"


# Chat templates that loop or use much memory


def _template(name: str, about: str, text: str) -> None:
    @attack(f"template-{name}", about, flags=("--chat-template", text + "{{ messages[0].content }}"))
    def hostile(target: Target) -> Steps:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        yield from target.many(4, lambda: target.post(CHAT, body, timeout=60), threads=2)
        odd = {status: n for status, n in target.statuses.items() if status != 400}
        yield f"not refused: {odd}" if odd else ""
        status = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        yield "" if status == 200 else f"a completion sent afterwards was answered with {status}"


_template("loops", "a chat template of nested loops",
          "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
_template("power", "a chat template that computes 10**(10**8)", "{{ 10**(10**8) }}")
_template("bloat", "a chat template that makes 10 GB of text", "{{ 'a' * 10**10 }}")
