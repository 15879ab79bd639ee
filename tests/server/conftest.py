"""Real servers that the tests share, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model."""
    with running("--max-model-len", "1024") as started:
        yield started


@pytest.fixture(scope="session")
def null_server() -> Iterator[Server]:
    """No model behind it: answers at once, with whatever tokens."""
    with running("--load-format", "null", "--max-model-len", "1024") as started:
        yield started
