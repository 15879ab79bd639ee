"""The examples find all that an oracle knows of, and say what the same calls say by hand."""

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
    """Hold the engine until n requests wait for it: on a busy machine they would come, and be served, one by one."""
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
    assert backend.counts.device >= 0.98 * findable(backend.asked, backend.gate.block_size) > 0
    llm.reset_prefix_cache()
    hand = calls.Calls(llm)
    with held(llm, together):
        written = example.by_hand(hand)
    assert backend.counts.computed < hand.counts.computed
    # Half a character that this model of bytes generates does not come back from its text, so later turns differ.
    if name in ("few_shot", "json_by_fields"):
        assert said == written
