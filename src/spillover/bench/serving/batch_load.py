"""Load for an engine without a server: `spill bench batches` accepts all requests of a run in one body.

It reports when each request began, gave its first token and finished, by the engine's own clock: no HTTP is in those
times. Tokens between the first and the last are not observed, so every gap between tokens of a request is its mean gap.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.bench.serving.load import LoadOptions
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.serving_metrics import steady_window
from spillover.errors import SpilloverError

PATH = "/batch"


def check_batch(options: LoadOptions, requests: Sequence[ServeRequest] = ()) -> int | None:
    """Return the maximum number of concurrent requests, None for all; refuse options that a batch cannot have."""
    arrivals = options.arrivals
    if (not math.isinf(arrivals.rate) or arrivals.ramp_up is not None or arrivals.static_batch_size is not None
            or options.seconds is not None):
        raise SpilloverError("an engine in process takes all requests at once, or one after another (max-concurrency: "
                             "1); leave request-rate, ramp-up, static-batch-size and max-seconds out")
    if any(request.session is not None or not isinstance(request.prompt, tuple) for request in requests):
        raise SpilloverError("an engine in process takes independent prompts of token ids; conversations and text "
                             "prompts need a server")
    at_once = arrivals.max_concurrency
    if at_once is None or at_once == 1:
        return at_once
    if requests and at_once < len(requests):
        raise SpilloverError(f"an engine in process takes all requests at once or one after another; got "
                             f"max-concurrency {at_once} for {len(requests)} requests")
    return None


def run_batch(requests: Sequence[ServeRequest], options: LoadOptions) -> Run:
    at_once = check_batch(options, requests)
    body = {"prompts": [list(request.prompt) for request in requests],
            "output_lens": [request.output_len for request in requests], "one_by_one": at_once == 1,
            "sampling": dict(options.dialect.extra_body), "ignore_eos": options.dialect.ignore_eos is not False}
    began = time.time()
    report = _post(options.base_url + PATH, body, options.timeout)
    records = [_record(index, request, each) for index, (request, each) in
               enumerate(zip(requests, report["requests"], strict=True))]
    details = {**options.details, "arrival": "closed" if at_once == 1 else "burst", "url": options.base_url,
               "endpoint": PATH, "offered": len(requests), "not_sent": 0, "stopped": None}
    return Run(tuple(records), began, float(report["seconds"]), ClientHealth(),
               steady_window(records, at_once == 1), report["counters"], details)


def _record(index: int, request: ServeRequest, report: Mapping[str, Any]) -> RequestRecord:
    count = int(report["output_tokens"])
    later = ((float(report["done"]), count - 1),) if count > 1 else ()
    return RequestRecord(index, float(report["sent"]), float(report["sent"]), ((float(report["first"]), 1), *later),
                         float(report["done"]), request.prompt_len, count, request.output_len,
                         sources=report["sources"], timings=report["timings"])


def _post(url: str, body: Mapping[str, Any], timeout: float) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise SpilloverError(f"{url} answered {error.code}: {error.read(2000).decode(errors='replace')}") from error
    except OSError as error:
        raise SpilloverError(f"{url} did not answer: {error}") from error
