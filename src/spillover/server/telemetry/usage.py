"""The usage of each API key since the server's start, by the key's name: for /metrics and /usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from spillover.engine.requests.request import Request
from spillover.server.telemetry.tier_metrics import PREFIX


@dataclass
class KeyUsage:
    """The totals of one key. A request counts once it was sent to the engine, whatever its outcome."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # those of the prompt tokens that came from a cache
    generation_tokens: int = 0


class Usage:
    """The usage of all keys."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_key = {name: KeyUsage() for name in names}

    def add(self, key: str, prompts: Iterable[list[Request]]) -> None:
        """Count a finished HTTP request; `prompts` has the sequences of each of its prompts."""
        used = self._by_key.setdefault(key, KeyUsage())
        used.requests += 1
        for requests in prompts:
            first = requests[0]
            if first.sources is not None:  # the request was scheduled; n sequences share one prompt
                used.prompt_tokens += first.num_prompt
                used.cached_tokens += first.sources.cached
            used.generation_tokens += sum(len(request.token_ids) - request.num_prompt for request in requests)

    def report(self, key: str | None = None) -> dict[str, dict[str, int]]:
        """Return the totals by name; with `key`, only those of that key."""
        return {name: asdict(used) for name, used in self._by_key.items() if key in (None, name)}

    def families(self) -> Iterator[Metric]:
        """Yield the totals as Prometheus metrics."""
        requests = CounterMetricFamily(PREFIX + "key_requests", "Requests by the name of their API key.",
                                       labels=["key"])
        prompt = CounterMetricFamily(PREFIX + "key_prompt_tokens", "Prompt tokens by the name of the API key, computed "
                                     "or cached.", labels=["key", "source"])
        output = CounterMetricFamily(PREFIX + "key_generation_tokens", "Tokens generated, by the name of the API key.",
                                     labels=["key"])
        for name, used in self._by_key.items():
            requests.add_metric([name], used.requests)
            prompt.add_metric([name, "computed"], used.prompt_tokens - used.cached_tokens)
            prompt.add_metric([name, "cached"], used.cached_tokens)
            output.add_metric([name], used.generation_tokens)
        yield from (requests, prompt, output)
