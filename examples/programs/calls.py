"""Plain calls without the language of programs: text or messages in, text out, with an LLM or a URL."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from spillover import LLM, SamplingParams
from spillover.bench.serving.served_model import JsonServer
from spillover.programs import TokenCounts

Item = TypeVar("Item")
Result = TypeVar("Result")


class Calls:
    """Plain requests to an LLM or a URL, with counts of the sources of their prompt tokens."""

    def __init__(self, backend: LLM | str, concurrent: bool = True) -> None:
        """Send requests to an LLM or a URL. `concurrent`: whether `map` sends its requests concurrently."""
        self._llm = backend if isinstance(backend, LLM) else None
        self._server = JsonServer(backend, {"X-Spillover-Timings": "1"}, 600) if isinstance(backend, str) else None
        self._concurrent = concurrent
        self._lock = threading.Lock()
        self.counts = TokenCounts()
        self.requests = 0

    def complete(self, prompt: str, **options: Any) -> str:
        if self._llm is not None:
            return self._text(self._llm.generate(prompt, SamplingParams(**options), False)[0])
        return str(self._post("/v1/completions", {"prompt": prompt, **options})["text"])

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        if self._llm is not None:
            return self._text(self._llm.chat(list(messages), SamplingParams(**options), False)[0])
        return str(self._post("/v1/chat/completions", {"messages": list(messages), **options})["message"]["content"])

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the result of `work` for each item, computed concurrently or one after another."""
        if not self._concurrent:
            return [work(item) for item in items]
        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(work, items))

    def _text(self, output: Any) -> str:
        self._count(TokenCounts(**asdict(output.sources)))
        return str(output.outputs[0].text)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._server is not None
        constraint = body.pop("structured_outputs", None)
        answer = self._server.post(path, {**body, **({"structured_outputs": constraint} if constraint else {})})
        timings = answer.get("timings") or [{"tokens": {"computed": answer["usage"]["prompt_tokens"]}}]
        self._count(TokenCounts(**timings[0]["tokens"]))
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def _count(self, counts: TokenCounts) -> None:
        with self._lock:
            self.counts += counts
            self.requests += 1


def backend_of_arguments(about: str | None) -> LLM | str:
    """Return the backend of --url or --model; without either, load the default model in this process."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="a model to load in this process")
    given = parser.parse_args()
    return given.url or LLM(given.model, max_model_len=4096)
