"""Odd streams, failures, sessions and limits: how the load generator handles them."""

from __future__ import annotations

import itertools
import math
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from spillover.bench.records import RequestRecord, Run
from spillover.bench.serving.flight import Flight
from spillover.bench.serving.http_client import Connection
from spillover.bench.serving.load import Chain, Live, LoadOptions, Share
from spillover.bench.serving.load_processes import automatic_processes, health, run_load
from spillover.bench.serving.openai_api import Dialect, Kind
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import measure
from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError
from support.servers.mock_server import MockServer

COMPLETIONS, CHAT = Dialect("completions", "mock"), Dialect("chat", "mock")


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(ttft=0.02, itl=0.004) as server:
        yield server


def one(mock: MockServer, dialect: Dialect = COMPLETIONS, output: int = 8, **how: Any) -> Run:
    prompt = tuple(range(8)) if dialect.kind == "completions" else "say it"
    request = ServeRequest(prompt, 8, output, extra={"mock": how})
    return run_load([request], LoadOptions(mock.url, Arrivals(max_concurrency=1), dialect, keep_text=True))


@pytest.mark.parametrize("usage", ["own", "last", "each", "none"])
@pytest.mark.parametrize("shape", ["plain", "empty", "crlf", "cut"])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_chunks_of_every_shape_bring_the_same_answer(mock: MockServer, kind: Kind, shape: str, usage: str) -> None:
    run = one(mock, CHAT if kind == "chat" else COMPLETIONS, shape=shape, usage=usage)
    (record,) = run.records
    assert record.error is None
    assert record.output_tokens == 8
    assert [count for _, count in record.chunks] == [1] * 8
    assert record.text == " 0 1 2 3 4 5 6 7"
    assert record.prompt_tokens == (8 if kind == "completions" or usage == "none" else len("say it"))
    # The chunk with only a role arrives at once; it is not the first token.
    assert measure(run).ttft.median > 0.015


@pytest.mark.parametrize("usage", ["own", "last", "each"])
def test_a_chunk_of_several_tokens_counts_them(mock: MockServer, usage: str) -> None:
    (record,) = one(mock, output=9, per_chunk=3, usage=usage).records
    assert [count for _, count in record.chunks] == [3, 3, 3]


@pytest.mark.parametrize("piece", [1, 5])
def test_an_interrupt_is_heard_wherever_it_comes(mock: MockServer, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """An interrupt is raised even inside the parser's callback, which would treat an exception as its own error."""
    pieces, before, handler = itertools.count(1), Flight._stream, signal.getsignal(signal.SIGINT)

    def stream(flight: Flight, at: float, data: bytes) -> None:
        if next(pieces) == piece:
            signal.raise_signal(signal.SIGINT)
        before(flight, at, data)

    monkeypatch.setattr(Flight, "_stream", stream)
    with pytest.raises(KeyboardInterrupt):
        one(mock, output=500)
    assert next(pieces) < 100  # the run does not wait for the end of the answer
    assert signal.getsignal(signal.SIGINT) is handler


def test_token_ids_count_exactly(mock: MockServer) -> None:
    (record,) = one(mock, Dialect(return_token_ids=True), output=10, per_chunk=4, usage="none").records
    assert [count for _, count in record.chunks] == [4, 4, 2]
    assert record.output_tokens == 10


def test_text_held_back_is_no_token(mock: MockServer) -> None:
    (record,) = one(mock, shape="held").records
    assert [count for _, count in record.chunks] == [1] * 8 + [0]
    assert record.output_tokens == 8
    assert measure(one(mock, shape="held")).itl.count == 7


def test_tokens_without_text_are_an_answer(mock: MockServer) -> None:
    (record,) = one(mock, shape="silent").records
    assert record.error is None
    assert record.output_tokens == 8


@pytest.mark.parametrize(("how", "said"), [
    ({"fail_at": 3}, "as asked"),
    ({"drop_at": 3}, "the connection broke before the answer was complete"),
    ({"status": 500}, "HTTP 500: as asked"),
    ({"status": 429}, "HTTP 429: as asked"),
])
def test_a_failure_is_counted_and_never_averaged_in(mock: MockServer, how: dict[str, Any], said: str) -> None:
    good = [ServeRequest((1, 2), 2, 4) for _ in range(3)]
    bad = ServeRequest((1, 2), 2, 400, extra={"mock": how | {"itl": 0.01}})
    run = run_load([*good, bad], LoadOptions(mock.url, Arrivals(max_concurrency=4), COMPLETIONS))
    whole = measure(run, {"ttft": 10.0})
    assert [record.error for record in run.records] == [None, None, None, said]
    assert (whole.completed, whole.failed, whole.output_tokens, whole.ttft.count) == (3, 1, 12, 3)
    assert whole.attainment == 0.75


def test_a_stream_without_its_end_is_no_answer(mock: MockServer) -> None:
    (record,) = one(mock, drop_at=0).records
    assert record.error is not None
    assert record.chunks == ()
    (record,) = one(mock, done=False).records
    assert record.error is None, "a finish reason ends it as well as [DONE] does"


def test_a_request_that_takes_too_long_fails(mock: MockServer) -> None:
    request = ServeRequest((1,), 1, 4, extra={"mock": {"ttft": 5.0}})
    run = run_load([request], LoadOptions(mock.url, Arrivals(max_concurrency=1), COMPLETIONS, timeout=0.1))
    assert run.records[0].error == "not finished within 0.1 s"


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        run = run_load([ServeRequest((1,), 1, 1)], LoadOptions(url, dialect=COMPLETIONS))
    assert "refused" in (run.records[0].error or "") or "Connect call failed" in (run.records[0].error or "")


def session(turns: int, number: int = 0, text: bool = False, think: float = 0.0) -> list[ServeRequest]:
    prompts: list[Any] = [f"question {turn};" if text else (100 + turn, 200 + turn) for turn in range(turns)]
    return [ServeRequest(prompt, 2, 3, session=number, turn=turn, think=think if turn else 0.0,
                         extra={"mock": {"id": f"{number}.{turn}"}}) for turn, prompt in enumerate(prompts)]


def prompts_of(mock: MockServer, count: int) -> list[Any]:
    return [entry["prompt"] for entry in mock.log()[-count:]]


def test_a_turn_begins_with_all_that_was_said_before(mock: MockServer) -> None:
    run = run_load(session(3, think=0.05), LoadOptions(mock.url, Arrivals(max_concurrency=1), COMPLETIONS))
    assert not run.failed
    assert prompts_of(mock, 3) == [[100, 200], [100, 200, 0, 1, 2, 101, 201],
                                   [100, 200, 0, 1, 2, 101, 201, 0, 1, 2, 102, 202]]
    for before, after in itertools.pairwise(run.records):
        assert after.sent >= before.done + 0.05


def test_a_chat_session_repeats_its_messages(mock: MockServer) -> None:
    run_load(session(2, text=True), LoadOptions(mock.url, Arrivals(max_concurrency=1), CHAT))
    assert prompts_of(mock, 2)[1] == [{"role": "user", "content": "question 0;"},
                                      {"role": "assistant", "content": " 0 1 2"},
                                      {"role": "user", "content": "question 1;"}]


def test_a_text_session_goes_on_in_its_text(mock: MockServer) -> None:
    run_load(session(2, text=True), LoadOptions(mock.url, Arrivals(max_concurrency=1), COMPLETIONS))
    assert prompts_of(mock, 2)[1] == "question 0; 0 1 2question 1;"


def test_a_session_ends_with_its_first_failure(mock: MockServer) -> None:
    first, second, third = session(3)
    broken = ServeRequest(second.prompt, 2, 3, session=0, turn=1, extra={"mock": {"status": 503}})
    run = run_load([first, broken, third], LoadOptions(mock.url, Arrivals(max_concurrency=2), COMPLETIONS))
    assert run.records[0].error is None
    assert run.records[1].error == "HTTP 503: as asked"
    assert (run.records[2].error or "").startswith("not sent, because the previous turn failed: HTTP 503")


def test_sessions_take_turns_under_a_limit(mock: MockServer) -> None:
    chats = [request for number in range(3) for request in session(2, number)]
    run = run_load(chats, LoadOptions(mock.url, Arrivals(max_concurrency=1), COMPLETIONS))
    by_time = sorted(run.records, key=lambda record: record.sent)
    assert [(record.session, record.turn) for record in by_time] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_token_ids_of_a_chat_are_refused_in_words(mock: MockServer) -> None:
    with pytest.raises(SpilloverError, match="--backend openai"):
        run_load([ServeRequest((1, 2), 2, 2)], LoadOptions(mock.url, dialect=CHAT))


def test_waiting_in_the_client_shows_in_the_scheduled_time_only(mock: MockServer) -> None:
    slow = [ServeRequest((1,), 1, 2, extra={"mock": {"ttft": 0.1, "itl": 0.0}}) for _ in range(5)]
    run = run_load(slow, LoadOptions(mock.url, Arrivals(1000.0, math.inf, max_concurrency=1), COMPLETIONS))
    whole = measure(run)
    assert whole.ttft.median == pytest.approx(0.1, abs=0.05)
    assert whole.ttft_scheduled.median == pytest.approx(0.3, abs=0.1)
    assert run.client.lag_p99 < 0.1, "the limit is no fault of the client"


def test_a_trace_keeps_its_times_and_a_rate_replaces_them(mock: MockServer) -> None:
    trace = [ServeRequest((1,), 1, 2, at=at) for at in (0.0, 0.05, 0.3)]
    run = run_load(trace, LoadOptions(mock.url, Arrivals(), COMPLETIONS))
    assert [record.scheduled for record in run.records] == pytest.approx([0.0, 0.05, 0.3])
    assert run.details["arrival"] == "trace"
    run = run_load(trace, LoadOptions(mock.url, Arrivals(100.0, math.inf), COMPLETIONS))
    assert [record.scheduled for record in run.records] == pytest.approx([0.01, 0.02, 0.03])


def test_nothing_is_sent_after_the_time_is_over(mock: MockServer) -> None:
    many = [ServeRequest((1,), 1, 4) for _ in range(200)]
    run = run_load(many, LoadOptions(mock.url, Arrivals(max_concurrency=1), COMPLETIONS, seconds=0.5))
    assert 0 < len(run.records) < 40
    assert run.details["not_sent"] == 200 - len(run.records)
    assert run.details["stopped"] == "the time limit of 0.5 s was reached"


def test_a_rate_is_offered_exactly_in_the_time_there_is(mock: MockServer) -> None:
    many = [ServeRequest((1,), 1, 4) for _ in range(200)]
    run = run_load(many, LoadOptions(mock.url, Arrivals(50.0), COMPLETIONS, seconds=0.5))
    assert (len(run.records), run.details["offered"], run.details["not_sent"]) == (25, 25, 0)
    assert max(record.scheduled for record in run.records) == pytest.approx(0.5)


def test_counters_and_details_come_with_the_run(mock: MockServer) -> None:
    told: list[Live] = []
    many = [ServeRequest((1, 2, 3), 3, 4) for _ in range(10)]
    run = run_load(many, LoadOptions(mock.url, Arrivals(max_concurrency=2), COMPLETIONS, details={"workload": "mine"}),
                   told.append)
    assert run.counters["prompt_tokens"] == 30
    assert run.counters["prefix_cache_queries"] == 30
    assert (run.details["server_version"], run.details["workload"]) == ("mock 1", "mine")
    assert run.records[0].sources == {"computed": 3, "cached": 0}
    assert (told[-1].completed, told[-1].running, told[-1].output_tokens) == (10, 0, 40)
    assert Run.from_json(run.to_json()) == run


def test_processes_follow_the_rate_and_leave_cores_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    short, long = ([Chain(((0, ServeRequest((1,), 1, output)),), 0.0)] for output in (1, 256))
    assert automatic_processes(LoadOptions(arrivals=Arrivals(10.0)), short) == 1
    assert automatic_processes(LoadOptions(arrivals=Arrivals(2500.0)), short) == 3
    assert automatic_processes(LoadOptions(arrivals=Arrivals(100.0)), long) == 3
    assert automatic_processes(LoadOptions(arrivals=Arrivals(max_concurrency=2048)), short) == 4
    assert automatic_processes(LoadOptions(arrivals=Arrivals(max_concurrency=20_480)), short) == 8
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert automatic_processes(LoadOptions(arrivals=Arrivals(2500.0)), short) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://somewhere", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(SpilloverError, match="--base-url is like"):
        run_load([ServeRequest((1,), 1, 1)], LoadOptions(url))


def test_a_client_that_does_not_keep_up_says_so() -> None:
    def share(busy: float = 0.1, lag: float = 0.0, delay: float = 0.0) -> Share:
        record = RequestRecord(0, 0.0, 0.0, ((0.1, 1), (0.12, 1)), 0.12, 1, 2, 2)
        return Share((record,) * 100, (lag,) * 100, (delay,) * 100, busy)

    assert health([share()]).saturated is None
    assert "busy 97% of the time" in (health([share(), share(busy=0.97)]).saturated or "")
    assert "sent 50 ms late" in (health([share(lag=0.05)]).saturated or "")
    assert "answered 30 ms late" in (health([share(delay=0.03)]).saturated or "")
    assert "other programs used the cores" in (health([share(delay=0.03)]).saturated or "")


def test_a_rate_opens_no_more_connections_than_it_needs(mock: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run opens only the connections it needs: a server with a thread per connection would run out of threads."""
    opened, before = [0], Connection._open

    async def count(connection: Connection) -> Any:
        opened[0] += 1
        return await before(connection)

    monkeypatch.setattr(Connection, "_open", count)
    options = LoadOptions(mock.url, Arrivals(rate=5, burstiness=math.inf), COMPLETIONS, processes=1,
                          read_counters=False)
    run = run_load([ServeRequest(tuple(range(8)), 8, 2) for _ in range(5)], options)
    assert len(run.completed) == 5
    assert 1 <= opened[0] <= 2
