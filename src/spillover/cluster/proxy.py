"""The path of one request through the router: read, routed, sent, and sent to another replica if the first fails before
the first token. The client gets nothing before a replica has begun to answer, so such a failure is never visible."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from spillover.cluster.disaggregate import split
from spillover.cluster.fleet import Decision, Fleet, Prompt
from spillover.cluster.keys import awaiting_kv, prompt_only, read_prompt
from spillover.cluster.metrics import RouterMetrics
from spillover.cluster.replica import Flight, Replica
from spillover.cluster.settings import RouterSettings
from spillover.cluster.upstream import Answer, Headers
from spillover.cluster.watch import Spaces, Watcher, clock
from spillover.http_wire import BrokenOff, NoAnswer
from spillover.server.api.errors import ApiError, error_body

log = logging.getLogger("spillover.router")

ROUTED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
RETRIED = (408, 429, 500, 502, 503, 504)  # statuses after which another replica is tried
OVERLOADED = (429, 503)  # statuses that do not count as the replica's failure
WHOLE_BYTES = 8 << 20  # an answer that is not streamed is sent on once it is complete, up to this size
INLINE_BYTES = 8192  # larger bodies are read in a thread, as they would stall every stream
BACKOFF_SECONDS = 0.05  # before a third attempt; doubled for each further one
MOST_RESPONSES = 65_536  # maximum number of /v1/responses answers whose replica is remembered

_HOP = frozenset((b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
                  b"transfer-encoding", b"upgrade", b"host", b"content-length", b"date", b"server", b"expect"))
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
_RESPONSE_ID = re.compile(rb'"(resp[_-][A-Za-z0-9_-]{1,128})"')


@dataclass
class Route:
    """The replica that a request was sent to, for the log."""

    replica: str = "-"
    attempts: int = 0


class Proxy:
    def __init__(self, fleet: Fleet, watchers: list[Watcher], spaces: Spaces, settings: RouterSettings,
                 metrics: RouterMetrics) -> None:
        self.fleet = fleet
        self.in_flight = 0
        self._watchers = watchers
        self._spaces = spaces
        self._settings = settings
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(2, "spillover-router-prepare")
        self._changed = asyncio.Event()  # set when a replica has become ready or free, or has gone
        self._responses: OrderedDict[str, int] = OrderedDict()  # id of a stored response -> replica

    def changed(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Routed requests

    async def route(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Answer a request that generates tokens."""
        if self.in_flight >= self._settings.max_in_flight:
            self._metrics.refused.labels("in_flight").inc()
            raise ApiError(429, f"{self.in_flight} requests are in progress, and the limit is "
                                f"{self._settings.max_in_flight} (--max-in-flight); try again later.",
                           code="queue_full", headers={"Retry-After": "1"})
        self.in_flight += 1
        work = asyncio.ensure_future(self._route(scope, send, body))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self.in_flight -= 1
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    async def _route(self, scope: Scope, send: Send, body: bytes) -> None:
        arrived = clock()
        prompt = await self._read(scope, body)
        self._metrics.prepare.observe(clock() - arrived)
        bound = self._bound(scope, body)
        tried: list[Replica] = []
        refusal: tuple[Answer, bytes] | None = None
        reason, counted = "no replica answered", False
        for attempt in range(self._settings.retries + 1):
            if attempt > 1:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 2))
            decision = await self._decide(prompt, tried, bound, arrived, wait=refusal is None)
            if decision is None:
                break
            if not counted:
                self.fleet.count(prompt, decision)
                counted = True
            decision = await self._prefill(scope, body, prompt, decision, tried)
            scope["spillover.route"] = Route(decision.replica.name, attempt + 1)
            kind = "no_answer"
            try:
                sent = awaiting_kv(body) if decision.remote_prefill else body
                answer = await self._attempt(scope, send, sent, prompt, decision, arrived)
                if answer is None:
                    return
                refusal, reason = answer, f"it answered {answer[0].status}"
                kind = str(answer[0].status)
            except NoAnswer as error:
                reason = str(error)
                if bound is None and "cannot be reached" in reason:
                    self._watchers[decision.replica.index].mark_gone(reason)
            if bound is not None:
                break
            tried.append(decision.replica)
            self._metrics.retries.labels(kind).inc()
            log.info("%s is sent to another server, because %s did not accept it: %s", scope["request_id"],
                     decision.replica.name, reason)
        if refusal is not None:
            await self._send_whole(send, *refusal)
            return
        self._metrics.refused.labels("no_replica").inc()
        raise ApiError(503, f"No server could take this request ({reason}); GET /replicas lists them.",
                       code="no_replica", headers={"Retry-After": "2"})

    async def _read(self, scope: Scope, body: bytes) -> Prompt:
        header = self._settings.session_header.encode()
        session = next((value.decode("latin-1") for name, value in scope["headers"] if name == header), None)
        spaces, path = self._spaces.used(self.fleet), scope["path"]
        if len(body) <= INLINE_BYTES and path != "/v1/chat/completions":
            return read_prompt(path, body, session, spaces)
        return await asyncio.get_running_loop().run_in_executor(self._pool, read_prompt, path, body, session, spaces)

    async def _decide(self, prompt: Prompt, tried: list[Replica], bound: Replica | None, arrived: float,
                      wait: bool) -> Decision | None:
        """Choose a replica; wait for a usable one, unless another replica has already refused the request."""
        while True:
            now = clock()
            others = tried if bound is None else [each for each in self.fleet.replicas if each is not bound]
            decision = self.fleet.decide(prompt, now, others)
            if decision is None and bound is None and tried and wait:
                decision = self.fleet.decide(prompt, now)  # every replica has failed it once; retry one
            self._metrics.decision.observe(clock() - now)
            left = arrived + self._settings.wait_seconds - now
            if decision is not None or not wait or left <= 0:
                return decision
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.5)):
                    await self._changed.wait()

    async def _prefill(self, scope: Scope, body: bytes, prompt: Prompt, decision: Decision,
                       tried: list[Replica]) -> Decision:
        """Have another replica compute the prompt first if that is sooner. Continue whatever the outcome: blocks that
        did not reach the shared store are computed by the decoding replica."""
        if self._settings.disaggregation == "never" or tried:
            return decision
        chosen = split(self.fleet, prompt, decision, clock(), self._settings.disaggregation)
        request = prompt_only(body) if chosen is not None else None
        if chosen is None or request is None:
            return decision
        replica = chosen.prefill.replica
        flight, outcome = self.fleet.send(replace(prompt, session=None), chosen.prefill, clock()), "failed"
        try:
            answer, _ = await self._watchers[replica.index].upstream.fetch(
                "POST", _target(scope), self._headers(scope), request, timeout=chosen.timeout)
            if answer.status == 200:
                outcome = "computed"
                self.fleet.begin(flight, clock())
        except NoAnswer as error:
            log.info("%s: %s did not compute the prompt: %s", scope["request_id"], replica.name, error)
        finally:
            self.fleet.end(flight, clock())
            self._changed.set()
        self._metrics.remote_prefills.labels(replica.name, outcome).inc()
        return chosen.decode if outcome == "computed" and chosen.decode.replica.usable(clock()) else decision

    async def _attempt(self, scope: Scope, send: Send, body: bytes, prompt: Prompt, decision: Decision,
                       arrived: float) -> tuple[Answer, bytes] | None:
        """Send a request to its replica and the answer to the client. Return an answer that another replica may improve
        on; raise NoAnswer if there is none."""
        replica = decision.replica
        upstream = self._watchers[replica.index].upstream
        flight = self.fleet.send(prompt, decision, clock())
        tail: bytes = b""
        events = 0
        failed: bool | None = True  # whether the replica failed; None if that is unknown
        try:
            answer = await upstream.request(scope["method"], _target(scope), self._headers(scope), body,
                                            timeout=self._settings.answer_seconds)
            try:
                if answer.status != 200 or not answer.is_stream:
                    whole = await self._gather(answer)
                    failed = answer.status in RETRIED and answer.status not in OVERLOADED
                    if answer.status in RETRIED:
                        return answer, whole
                    self._began(flight, arrived)
                    self._remember(scope, whole, replica)
                    tail = whole
                    await self._send_whole(send, answer, whole, replica)
                    return None
                tail, events = await self._stream(scope, send, answer, flight, replica, arrived)
                failed = False
                return None
            finally:
                answer.close()
        except BrokenOff:  # the client has already got the error
            return None
        except asyncio.CancelledError:
            failed = None
            raise
        finally:
            now = clock()
            self._update_breaker(replica, failed, now)
            self._ended(flight, now, tail, events)

    async def _stream(self, scope: Scope, send: Send, answer: Answer, flight: Flight, replica: Replica,
                      arrived: float) -> tuple[bytes, int]:
        """Forward a stream; return its last bytes and event count. NoAnswer if it fails before the first chunk."""
        chunks, events, last, tail = answer.chunks(self._settings.answer_seconds), 0, b"", b""
        try:
            first = await anext(chunks, b"")
        except BrokenOff as error:
            raise NoAnswer(str(error)) from None
        self._began(flight, arrived)
        self._remember(scope, first, replica)
        await send({"type": "http.response.start", "status": answer.status,
                    "headers": _answer_headers(answer, replica)})
        chunk = first
        try:
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                events += chunk.count(b"data: ")
                last, tail = tail, chunk
                chunk = await anext(chunks, b"")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BrokenOff as error:
            self._metrics.broken.labels(replica.name).inc()
            log.warning("%s: %s interrupted an answer: %s", scope["request_id"], replica.name, error)
            text = error_body(ApiError(502, f"The server behind the router interrupted its answer ({error}); "
                                            "send the request again.", code="replica_lost"))
            await send({"type": "http.response.body", "body": b"\n\ndata: " + text + b"\n\n", "more_body": False})
            raise
        return last + tail, events

    async def _gather(self, answer: Answer) -> bytes:
        whole = bytearray()
        try:
            async for chunk in answer.chunks(self._settings.answer_seconds):
                whole += chunk
                if len(whole) > WHOLE_BYTES:
                    raise ApiError(502, f"The server's answer has more than {WHOLE_BYTES >> 20} MiB; set stream: true.",
                                   code="answer_too_large")
        except BrokenOff as error:
            raise NoAnswer(str(error)) from None
        return bytes(whole)

    async def _send_whole(self, send: Send, answer: Answer, body: bytes, replica: Replica | None = None) -> None:
        headers = [*_answer_headers(answer, replica), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # Bookkeeping

    def _began(self, flight: Flight, arrived: float) -> None:
        now = clock()
        self.fleet.begin(flight, now)
        self._metrics.first.observe(now - arrived)
        self._metrics.error.observe((now - flight.sent) / max(flight.prediction.first_token, 1e-4))
        name = self.fleet.replicas[flight.replica].name
        self._metrics.cached.labels(name, "prediction").inc(flight.prediction.cached_tokens)

    def _ended(self, flight: Flight, now: float, tail: bytes, events: int) -> None:
        cached, output = _CACHED.search(tail), _OUTPUT.search(tail)
        found = None if cached is None else int(cached[1])
        self.fleet.end(flight, now, int(output[1]) if output is not None else events or None, found)
        if found is not None:
            self._metrics.cached.labels(self.fleet.replicas[flight.replica].name, "answer").inc(found)
        self._changed.set()

    def _update_breaker(self, replica: Replica, failed: bool | None, now: float) -> None:
        opened = replica.breaker.is_open
        if failed is None:
            replica.breaker.cancelled()
        elif failed:
            replica.breaker.failed(now)
        else:
            replica.breaker.succeeded()
        if replica.breaker.is_open and not opened:
            log.warning("%s failed too many requests; it gets no requests for a while", replica.name)

    def _remember(self, scope: Scope, body: bytes, replica: Replica) -> None:
        """Record which replica stores a response, so that requests that continue from it go there."""
        if scope["path"] != "/v1/responses" or (found := _RESPONSE_ID.search(body[:4096])) is None:
            return
        self._responses[found[1].decode()] = replica.index
        if len(self._responses) > MOST_RESPONSES:
            self._responses.popitem(last=False)

    def _bound(self, scope: Scope, body: bytes) -> Replica | None:
        """Return the only replica that can answer: the one that stores the response to continue from; or None."""
        if not scope["path"].startswith("/v1/responses"):
            return None
        named = scope["path"].rpartition("/")[2].encode()
        if b'"previous_response_id"' in body:
            found = re.search(rb'"previous_response_id"\s*:\s*"([^"]{1,140})"', body)
            named = found[1] if found is not None else b""
        index = self._responses.get(named.decode(errors="replace"))
        return None if index is None else self.fleet.replicas[index]

    def _headers(self, scope: Scope) -> Headers:
        kept = [(name, value) for name, value in scope["headers"] if name not in _HOP and name != b"x-request-id"
                and (name != b"authorization" or self._settings.pass_keys)]
        return [*kept, (b"x-request-id", scope["request_id"].encode())]

    # Other routes

    async def forward(self, scope: Scope, send: Send, body: bytes) -> None:
        """Send a request that any replica can answer to a ready one, and to the next if that fails."""
        bound = self._bound(scope, body)
        ready = [bound] if bound is not None else sorted(
            (replica for replica in self.fleet.replicas if replica.ready),
            key=lambda replica: (replica.draining, len(replica.flights)))
        for replica in ready[:self._settings.retries + 1]:
            with contextlib.suppress(NoAnswer):
                answer, whole = await self._watchers[replica.index].upstream.fetch(
                    scope["method"], _target(scope), self._headers(scope), body, timeout=30.0)
                await self._send_whole(send, answer, whole)
                return
        raise ApiError(503, "No server answers; GET /replicas lists them.", code="no_replica",
                       headers={"Retry-After": "2"})


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(scope: Scope) -> str:
    path: str = scope["raw_path"].decode("latin-1").partition("?")[0]
    query: str = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _answer_headers(answer: Answer, replica: Replica | None) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in answer.headers if name not in _HOP and name != b"x-request-id"]
    return kept if replica is None else [*kept, (b"x-spillover-replica", replica.name.encode())]

