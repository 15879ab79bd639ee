"""The examples reach all cache hits that an oracle knows of, and give the texts of the same calls made by hand."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spillover import LLM
from spillover.programs.recording import RecordingBackend, findable

sys.path.append(str(Path(__file__).parents[2] / "examples" / "programs"))


@contextmanager
def held(llm: LLM, requests: int) -> Iterator[None]:
    """Stop the engine until `requests` requests wait: on a busy machine they would arrive and run one by one."""
    thread, holding = llm._thread, threading.Event()

    def hold() -> None:
        holding.set()
        deadline = time.monotonic() + 30
        while thread._inbox.qsize() < requests and time.monotonic() < deadline:
            time.sleep(0.001)

    waiting = threading.Thread(target=thread.run, args=(hold,))
    waiting.start()
    assert holding.wait(30)
    yield
    waiting.join()


@pytest.mark.parametrize(("name", "together"), [("tree_of_thought", 3), ("few_shot", 16), ("multi_turn", 4),
                                               ("json_by_fields", 8)])
def test_an_example_finds_what_can_be_found(llm: LLM, backend: RecordingBackend, name: str, together: int) -> None:
    example, calls = importlib.import_module(name), importlib.import_module("calls")
    said = example.run(backend)
    assert backend.counts.device >= 0.98 * findable(backend.requests, backend.gate.block_size) > 0
    llm.reset_prefix_cache()
    hand = calls.Calls(llm)
    with held(llm, together):
        written = example.by_hand(hand)
    assert backend.counts.computed < hand.counts.computed
    # Half a character, which this byte model may generate, is lost in its text, so later turns differ.
    if name in ("few_shot", "json_by_fields"):
        assert said == written
