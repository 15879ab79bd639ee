"""The load generator with a server whose token times are known: every metric within 1 ms or 1% of the truth.

The truth is the server's own log of when it sent each token, by the same monotonic clock in another process. The
statistic is the median (p50) over requests, or over gaps for ITL: single samples depend on whatever else the machine
does.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from spillover.bench.records import Run
from spillover.bench.serving.load import LoadOptions
from spillover.bench.serving.load_processes import run_load
from spillover.bench.serving.openai_api import Dialect
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import measure
from spillover.bench.workloads.arrivals import Arrivals
from spillover.errors import SpilloverError
from support.servers.mock_server import MockServer

pytestmark = pytest.mark.alone

TOKENS, FIRST, GAP = 16, 0.3, 0.08  # an answer takes 1.5 s
ATTEMPTS = 3  # a machine that is otherwise busy for a second or two is not the client's fault


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(ttft=FIRST, itl=GAP) as server:
        yield server


def requests(count: int, output: int = TOKENS, **how: Any) -> list[ServeRequest]:
    return [ServeRequest(tuple(range(24)), 24, output, extra={"mock": {"id": index, **how}}) for index in range(count)]


def near(measured: float, true: float) -> bool:
    return abs(measured - true) <= max(0.001, 0.01 * abs(true))


def errors(run: Run, log: list[dict[str, Any]], per_chunk: int = 1) -> dict[str, tuple[float, float]]:
    """Return the metrics that are wrong, with (measured, true)."""
    whole = measure(run)
    entries = {entry["id"]: entry for entry in log}  # the last entry of each id belongs to this run
    truth = [entries[record.index] for record in run.records]
    written = [np.array(entry["written"]) for entry in truth]
    start = run.start_unix - (time.time() - time.perf_counter())  # the run's time 0 by the clock that both use
    sent = [start + record.sent for record in run.records]
    assert all(entry["read"] > when - 0.001 for entry, when in zip(truth, sent, strict=True)), "sent before it is read"
    gaps = np.concatenate([np.repeat(np.diff(times) / per_chunk, per_chunk) for times in written])
    span = max(times[-1] for times in written) - min(entry["read"] for entry in truth)
    output = sum(record.output_tokens for record in run.records)
    pairs = {
        "ttft": (whole.ttft.median, float(np.median([times[0] - when
                                                     for times, when in zip(written, sent, strict=True)]))),
        "tpot": (whole.tpot.median, float(np.median([(times[-1] - times[0]) / (output / len(truth) - 1)
                                                     for times in written]))),
        "itl": (float(np.median(np.concatenate([np.repeat(np.diff([at for at, _ in record.chunks]) / per_chunk,
                                                          per_chunk) for record in run.records]))),
                float(np.median(gaps))),
        "e2el": (whole.e2el.median, float(np.median([times[-1] - when
                                                     for times, when in zip(written, sent, strict=True)]))),
        "duration": (run.duration, span),
    }
    off = {name: pair for name, pair in pairs.items() if not near(*pair)}
    rate = (whole.output_throughput, output / span)
    return off | ({} if abs(rate[0] / rate[1] - 1) <= 0.01 else {"throughput": rate})


@pytest.mark.parametrize("streams", [1, 32, 256])
def test_every_metric_is_within_1_ms_or_1_percent_of_the_truth(mock: MockServer, streams: int) -> None:
    life = FIRST + (TOKENS - 1) * GAP
    count = max(2, 3 * streams // 2)
    for _attempt in range(ATTEMPTS):
        # Evenly spaced, so that `streams` run at once and no two start together.
        run = run_load(requests(count), LoadOptions(mock.url, Arrivals(streams / life, math.inf), Dialect(model="m")))
        off = errors(run, mock.log())
        assert not run.failed
        assert [record.output_tokens for record in run.records] == [TOKENS] * count
        assert measure(run).peak_concurrency == pytest.approx(streams, rel=0.1, abs=1)
        if not off:
            break
    assert not off


def test_several_tokens_a_chunk(mock: MockServer) -> None:
    for _attempt in range(ATTEMPTS):
        run = run_load(requests(8, per_chunk=4),
                       LoadOptions(mock.url, Arrivals(20.0, math.inf), Dialect(return_token_ids=True)))
        off = errors(run, mock.log(), per_chunk=4)
        if not off:
            break
    assert not off
    assert all(count == 4 for record in run.records for _, count in record.chunks)
    assert measure(run).itl.count == 8 * (TOKENS - 1)


def test_a_closed_loop_keeps_as_many_under_way_as_asked(mock: MockServer) -> None:
    run = run_load(requests(24, 4, ttft=0.05, itl=0.01), LoadOptions(mock.url, Arrivals(max_concurrency=8), Dialect()))
    whole = measure(run)
    assert whole.peak_concurrency == 8
    assert whole.mean_concurrency == pytest.approx(8, rel=0.2)
    assert run.details["arrival"] == "closed"


def test_a_static_batch_ends_before_the_next_one_is_sent(mock: MockServer) -> None:
    """Each batch of a static load is sent after the previous one has finished, also the last one, of two."""
    asked = requests(10, 4, ttft=0.05, itl=0.01)
    run = run_load(asked, LoadOptions(mock.url, Arrivals(static_batch_size=4), Dialect()))
    batches = [run.records[first:first + 4] for first in range(0, 10, 4)]
    assert all(record.ok for record in run.records)
    for batch, after in itertools.pairwise(batches):
        assert max(record.done for record in batch) <= min(record.sent for record in after)
    for batch in batches:
        assert max(record.sent for record in batch) < min(record.done for record in batch)
    assert run.details["arrival"] == "static batches"


def test_static_batches_of_several_processes_are_refused(mock: MockServer) -> None:
    with pytest.raises(SpilloverError, match="leave --client-processes out"):
        run_load(requests(8, 4), LoadOptions(mock.url, Arrivals(static_batch_size=4), Dialect(), processes=2))


@pytest.mark.parametrize("processes", [1, 2])
def test_poisson_is_delivered_at_200_requests_a_second(mock: MockServer, processes: int) -> None:
    count = 400
    for _attempt in range(ATTEMPTS):
        run = run_load(requests(count, 2, ttft=0.02, itl=0.01),
                       LoadOptions(mock.url, Arrivals(200.0, seed=3), Dialect(), processes=processes))
        scheduled = np.array([record.scheduled for record in run.records])
        sent = np.array([record.sent for record in run.records])
        delivered = (count - 1) / (sent.max() - sent.min())
        planned = (count - 1) / (scheduled.max() - scheduled.min())
        if abs(delivered / planned - 1) <= 0.01:
            break
    assert delivered == pytest.approx(planned, rel=0.01)
    assert scheduled.max() == pytest.approx(count / 200.0)
    assert np.median(sent - scheduled) < 0.005, "times are absolute: being late once delays nothing after it"
    assert len(run.records) == count
    assert not run.failed
    assert run.client.processes == processes
