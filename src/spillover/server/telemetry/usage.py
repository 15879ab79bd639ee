"""What each API key has used since the server's start, by the key's name: for /metrics, and for /usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from spillover.engine.requests.request import Request
from spillover.server.telemetry.tier_metrics import PREFIX


@dataclass
class KeyUsage:
    """Totals of one key. A request counts once it was handed to the engine, whatever became of it."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    generation_tokens: int = 0


class Usage:
    """The usage of all keys."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_key = {name: KeyUsage() for name in names}

    def add(self, key: str, prompts: Iterable[list[Request]]) -> None:
        """Count an HTTP request that is over: of each of its prompts, the sequences."""
        used = self._by_key.setdefault(key, KeyUsage())
        used.requests += 1
        for requests in prompts:
            first = requests[0]
            if first.sources is not None:  # it was scheduled; n sequences share one prompt
                used.prompt_tokens += first.num_prompt
                used.cached_tokens += first.sources.cached
            used.generation_tokens += sum(len(request.token_ids) - request.num_prompt for request in requests)

    def report(self, key: str | None = None) -> dict[str, dict[str, int]]:
        """Return the totals by name; with `key`, of that one alone."""
        return {name: asdict(used) for name, used in self._by_key.items() if key in (None, name)}

    def families(self) -> Iterator[Metric]:
        """Yield the totals as Prometheus reads them."""
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
