"""Whatever follows from the OpenAPI document, and from its negation, is answered or refused; never with a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from server_process import ServerProcess
from soak import is_error, total


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--load-format", "null", "--max-model-len", "256",
                       "--num-gpu-blocks-override", "512") as process:
        yield process


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


# A sleeping engine makes every other request wait; tests/server covers it by itself.
operations = schemathesis.pytest.from_fixture("document").exclude(path_regex="^/(sleep|wake_up)$")


@operations.parametrize()
@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_it(case: schemathesis.Case) -> None:
    response = case.call(timeout=30)
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and case.method.upper() != "HEAD":
        assert is_error(response.content), f"{response.status_code} {response.text[:300]}"


def test_nothing_is_left_running(server: ServerProcess) -> None:
    """Runs last in this file, after all of the above."""
    import httpx

    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert total(metrics, f"spillover:{name}") == 0
    assert "Traceback" not in server.log, server.log[-4000:]
