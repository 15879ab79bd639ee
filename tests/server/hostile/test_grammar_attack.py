"""Grammars that take minutes to compile, sent at once: each is rejected, and other requests are served."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.servers.running_server import running

BOMBS: list[dict[str, Any]] = [
    *({"json": {"type": "integer", "multipleOf": 4_999_999 - 2 * i}} for i in range(6)),
    {"regex": "a?" * 8000}, {"grammar": 'start: %json {"type": "integer", "multipleOf": 4999999}'},
    {"json": {"enum": list(range(100_000))}},
]


def test_bombs_are_refused_while_others_are_served() -> None:
    with (running("--load-format", "null", "--max-model-len", "512", "--grammar-timeout", "0.3") as server,
          server.http() as http, ThreadPoolExecutor(len(BOMBS)) as pool):

        def ask(**fields: Any) -> Any:
            return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields}, timeout=300)

        assert ask(structured_outputs={"choice": ["first"]}).status_code == 200
        bombs = [pool.submit(ask, structured_outputs=bomb) for bomb in BOMBS]
        served = 0
        while not all(bomb.done() for bomb in bombs):
            assert http.get("/health", timeout=60).status_code == 200
            assert ask().status_code == 200
            assert ask(structured_outputs={"choice": [f"small {served}"]}).status_code == 200
            served += 1
            time.sleep(0.02)
        for bomb in bombs:
            assert bomb.result().status_code == 400, bomb.result().text
        said = [bomb.result().json()["error"]["message"] for bomb in bombs]
        assert sum("--grammar-timeout" in message for message in said) >= 7
        assert served > 1  # small grammars were compiled concurrently
        metrics = http.get("/metrics").text

    def value(pattern: str) -> float:
        found = re.search(rf"^spillover:{pattern} (\S+)$", metrics, re.MULTILINE)
        assert found is not None, pattern
        return float(found[1])

    assert value(r'grammars_refused_total\{.*reason="time"\}') >= 7
    assert value(r'requests_refused_total\{reason="grammar_size"\}') == 1
    assert value(r"grammars_compiled_total\{.*\}") >= served
    assert 0 < value(r"grammar_cache_bytes\{.*\}") < 256e6
