"""Real servers for the tests, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.running_server import Server, running
from support.valkey import valkey, valkey_program  # noqa: F401


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Yield a server with the default model."""
    with running("--max-model-len", "1024", "--enable-admin-routes") as started:
        yield started


@pytest.fixture(scope="session")
def null_server() -> Iterator[Server]:
    """Yield a server with the null model: it answers at once, with arbitrary tokens."""
    with running("--load-format", "null", "--max-model-len", "1024") as started:
        yield started


@pytest.fixture(scope="session")
def guarded_server() -> Iterator[Server]:
    """Yield a server with the null model, two keys, two names, small requests, logged prompts and an allowed origin."""
    with running("--load-format", "null", "--api-key", "right", "--api-key", "other", "--served-model-name", "first",
                 "--served-model-name", "second", "--max-request-bytes", "100KB", "--log-prompts",
                 "--cors-origin", "http://page.example", key="right") as started:
        yield started


@pytest.fixture(scope="session")
def edge_server() -> Iterator[Server]:
    """Yield a server with few connections, short timeouts, its own host name, an allowed origin and an admin key."""
    with running("--load-format", "null", "--max-model-len", "1024", "--client-timeout", "1", "--max-connections", "16",
                 "--allowed-host", "models.example", "--cors-origin", "http://page.example",
                 "--admin-api-key", "admin") as started:
        yield started
