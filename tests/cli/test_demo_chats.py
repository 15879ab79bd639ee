"""The demo's chats, shortened: KV is restored from host memory and the text stays the same."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from spillover.cli.demo import demo_chats
from spillover.engine.config import EngineConfig


def test_chats_come_back_from_host_memory_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_chats, "MODULES", ("json", "csv", "re"))
    monkeypatch.setattr(demo_chats, "TEXT_TOKENS", 100)
    monkeypatch.setattr(demo_chats, "ANSWER_TOKENS", (4, 4))
    monkeypatch.setattr(demo_chats, "MODEL_LEN", 224)
    out = io.StringIO()
    demo_chats.show_chats(Console(file=out, width=120), EngineConfig())
    text = out.getvalue()
    assert "same text with and without: 3 of 3" in text
    total = next(line for line in text.splitlines() if "all" in line and "ms" in line)
    host = int(total.split("│")[-2].strip().replace(",", ""))
    assert host > 0
