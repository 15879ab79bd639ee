"""All requests derived from the OpenAPI document, valid and invalid, are answered or rejected, never with a 5xx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from server_process import ServerProcess
from soak import is_error, total

EXAMPLES = 8  # per operation, valid and invalid
# A sleeping engine makes every other request wait.
LEFT_OUT = ("/sleep", "/wake_up")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--load-format", "null", "--max-model-len", "256",
                       "--num-gpu-blocks-override", "512") as process:
        yield process


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_breaks_it(server: ServerProcess, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) > 10
    refused = answered = 0
    for operation in operations:
        if operation.path in LEFT_OUT:
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))
        def check(case: Case) -> None:
            nonlocal refused, answered
            response = case.call(timeout=30)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                refused += 1
                assert is_error(response.content), f"{response.status_code} {response.text[:300]}"
            else:
                answered += 1

        with contextlib.suppress(Unsatisfiable):  # an operation without parameters has no invalid requests
            check()
    print(f"{mode.value}: {answered} answered, {refused} refused")
    assert answered if mode is GenerationMode.POSITIVE else refused


def test_nothing_is_left_running(server: ServerProcess) -> None:
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert total(metrics, f"spillover:{name}") == 0
    assert "Traceback" not in server.log, server.log[-4000:]
