"""The entry point of the load generator: one run, from a list of requests to a `Run`.

Uses several client processes where one is too slow, and explains in `Run.client.saturated` if the client's own limits
still affect the results. All processes share one clock (`time.perf_counter` is the machine's monotonic one).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from spillover.bench.records import ClientHealth, Run
from spillover.bench.serving import server_facts
from spillover.bench.serving.load import Chain, Live, LoadOptions, Share, chains, run_share
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import e2el, steady_window, tpot
from spillover.errors import SpilloverError

# Rates at which one process is about half busy on a slow core: 250 us per request and 40 us per chunk.
REQUESTS_PER_PROCESS = 1000.0  # requests per second
TOKENS_PER_PROCESS = 12_000.0  # tokens per second, in chunks of one token
STREAMS_PER_PROCESS = 512  # concurrent streams

SATURATED_BUSY = 0.9
SATURATED_DELAY = (0.020, 1.0)  # p99 lateness of the event loop: seconds, and share of the median time per token
SATURATED_LAG = (0.020, 0.05)  # p99: seconds, and share of the median latency; both must be exceeded


def run_load(requests: Sequence[ServeRequest], options: LoadOptions,
             progress: Callable[[Live], None] | None = None) -> Run:
    """Send all requests and wait for all answers. `progress` is called a few times per second."""
    if not requests:
        raise SpilloverError("the workload has no requests; ask for at least one with --num-prompts")
    options.address()  # raises before anything is sent
    requests, options = _within(requests, options)
    arrivals = options.arrivals
    work = chains(requests, arrivals)
    closed = work[0].at is None
    headers = dict(options.headers)
    server = (options.base_url, headers, options.insecure)
    before = server_facts.counters(*server) if options.read_counters else {}
    count = min(len(work), options.processes or automatic_processes(options, work))
    if arrivals.static_batch_size is not None and count > 1:
        raise SpilloverError("--static-batch-size needs a single client process, which sees when a whole batch has "
                             "finished; leave --client-processes out")
    start, shares = _run(work, options, count, progress or (lambda live: None))
    after = server_facts.counters(*server) if before else {}
    records = sorted((record for share in shares for record in share.records), key=lambda record: record.index)
    own = [chain.turns[0][1].at for chain in work]
    stopped = next((share.stopped for share in shares if share.stopped), None)
    details = {**options.details, **arrivals.describe(own), "url": options.base_url, "endpoint": options.path,
               "model": options.dialect.model, "offered": len(requests), "not_sent": len(requests) - len(records),
               "stopped": stopped, "server_version": server_facts.version(*server) if options.read_counters else None}
    return Run(
        records=tuple(records),
        start_unix=time.time() + (start - time.perf_counter()),
        duration=(max(record.done for record in records) - min(record.sent for record in records)) if records else 0.0,
        client=health(shares),
        window=steady_window([record for record in records if record.ok] or records, closed),
        counters=server_facts.difference(after, before),
        details=details,
    )


def _within(requests: Sequence[ServeRequest], options: LoadOptions) -> tuple[Sequence[ServeRequest], LoadOptions]:
    """Return the requests that the rate sends in time: cutting a random schedule by the clock would miss its rate."""
    rate, seconds = options.arrivals.rate, options.seconds
    if seconds is None or math.isinf(rate) or any(request.session is not None for request in requests):
        return requests, options
    count = max(1, round(rate * seconds))
    return (requests[:count], replace(options, seconds=None)) if count < len(requests) else (requests, options)


def automatic_processes(options: LoadOptions, work: Sequence[Chain]) -> int:
    """Choose the number of processes by rate and concurrency, at most half of the cores: the server needs some."""
    arrivals = options.arrivals
    if arrivals.static_batch_size is not None:
        return 1
    rate = arrivals.ramp_up_end if arrivals.ramp_up is not None else arrivals.rate
    streams = arrivals.max_concurrency or (len(work) if math.isinf(rate) else 1)
    wanted = streams / STREAMS_PER_PROCESS
    if not math.isinf(rate):
        lengths = [request.output_len for chain in work for _, request in chain.turns]
        tokens = rate * sum(lengths) / max(1, len(lengths))
        wanted = max(wanted, rate / REQUESTS_PER_PROCESS, tokens / TOKENS_PER_PROCESS)
    return max(1, min(math.ceil(wanted), (os.cpu_count() or 1) // 2))


def _run(work: Sequence[Chain], options: LoadOptions, count: int,
         report_progress: Callable[[Live], None]) -> tuple[float, list[Share]]:
    if count == 1:
        started = [0.0]

        def begin() -> float:
            started[0] = time.perf_counter() + 0.005
            return started[0]

        share = run_share(work, options, begin, report_progress)
        return started[0], [share]
    return _run_processes(work, options, count, report_progress)


def _run_processes(work: Sequence[Chain], options: LoadOptions, count: int,
                   report_progress: Callable[[Live], None]) -> tuple[float, list[Share]]:
    """Distribute chains over processes in round-robin order, and the concurrency limit likewise."""
    limit = options.arrivals.max_concurrency
    count = count if limit is None else min(count, limit)
    clients = [_Client() for _ in range(count)]
    pipes = [client.pipe for client in clients]
    try:
        for index, pipe in enumerate(pipes):
            process_options = options
            if limit is not None:
                process_limit = limit // count + (index < limit % count)
                process_options = replace(options, arrivals=replace(options.arrivals, max_concurrency=process_limit))
            pipe.send(([_plain(chain) for chain in work[index::count]], process_options))
        for pipe in pipes:
            _receive(pipe)
        start = time.perf_counter() + 0.1
        for pipe in pipes:
            pipe.send(start)
        return start, _collect(pipes, report_progress)
    finally:
        for client in clients:
            client.close()


class _Client:
    """A client process controlled over a socket; `multiprocessing` would run the caller's main module again."""

    def __init__(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            program = f"from spillover.bench.serving.load_processes import serve; serve({child_end.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
        self.pipe = Connection(parent_end.detach())

    def close(self) -> None:
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._process.kill()
        self._process.wait()


def _plain(chain: Chain) -> Chain:
    """Return the chain in a form that can be pickled for another process."""
    return replace(chain, turns=tuple((index, replace(request, extra=dict(request.extra)))
                                      for index, request in chain.turns))


def serve(descriptor: int) -> None:
    """Run a client process that communicates over an inherited socket."""
    pipe: Connection = Connection(descriptor)

    def begin() -> float:
        pipe.send(("ready", None))
        start: float = pipe.recv()
        return start

    try:
        work, options = pipe.recv()
        share = run_share(work, options, begin, lambda live: pipe.send(("live", live)))
        pipe.send(("share", share))
    except SpilloverError as error:
        pipe.send(("error", str(error)))
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        pass  # the parent has exited and reports the reason itself


def _collect(pipes: Sequence[Connection], report_progress: Callable[[Live], None]) -> list[Share]:
    lives: dict[Any, Live] = {pipe: Live() for pipe in pipes}
    shares: dict[Any, Share] = {}
    while len(shares) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in shares]):
            kind, value = _receive(pipe)
            if kind == "share":
                shares[pipe] = value
            else:
                lives[pipe] = value
        report_progress(reduce(Live.plus, lives.values()))
    return [shares[pipe] for pipe in pipes]


def _receive(pipe: Any) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionError):
        raise SpilloverError("a client process exited unexpectedly; its error is printed above") from None
    if kind == "error":
        raise SpilloverError(value)
    return kind, value


def health(shares: Sequence[Share]) -> ClientHealth:
    lags = np.array([lag for share in shares for lag in share.lags] or [0.0])
    delays = np.array([delay for share in shares for delay in share.delays] or [0.0])
    completed = [record for share in shares for record in share.records if record.ok]
    latency = float(np.median([e2el(record) for record in completed] or [0.0]))
    per_token = float(np.median([value for record in completed if (value := tpot(record)) is not None] or [0.0]))
    p50, p99 = (float(value) for value in np.percentile(lags, [50, 99]))
    busy, delay = max(share.busy for share in shares), float(np.percentile(delays, 99))
    reasons = []
    if busy > SATURATED_BUSY:
        reasons.append(f"a client process was busy {busy:.0%} of the time")
    if delay > max(SATURATED_DELAY[0], SATURATED_DELAY[1] * per_token):
        reasons.append(f"its event loop answered {delay * 1e3:.0f} ms late at p99")
    if p99 > max(SATURATED_LAG[0], SATURATED_LAG[1] * latency):
        reasons.append(f"requests were sent {p99 * 1e3:.0f} ms late at p99")
    if reasons:
        reasons.append("add --client-processes" if busy > SATURATED_BUSY / 2 else
                       f"it was busy only {busy:.0%} of the time: other programs used the cores")
    return ClientHealth(p50, p99, float(lags.max()), busy, delay, len(shares), "; ".join(reasons) or None)
