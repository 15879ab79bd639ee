"""A server's Prometheus page as numbers by sample name: `vllm:prefix_cache_hits_total{engine="0"}` -> 1024.0.

prometheus_client's parser takes 90 ms for a page of 2,000 lines, 25 times as long: too much for use during a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import parse_labels


def parse_metrics(text: str) -> dict[str, float]:
    """Return values by key as the server writes it; raise ValueError if the text is not a Prometheus page."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        line = line.partition(" # {")[0]  # drop an exemplar
        end = line.rfind("}") + 1 or line.find(" ")
        if end <= 0:
            raise ValueError(f"no sample of a Prometheus page: {line[:80]!r}")
        samples[line[:end]] = float(line[end:].split()[0])  # a timestamp may follow the value
    return samples


def bare(key: str) -> str:
    """Return the name without its labels."""
    return key.partition("{")[0]


def total(samples: Mapping[str, float], name: str) -> float | None:
    """Sum a metric over labels; a counter may be named without its `_total`. None if there is no such metric."""
    values = [value for key, value in samples.items() if bare(key) in (name, f"{name}_total")]
    return sum(values) if values else None


def counters_from(samples: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Return each of our names as the sum of the engine's; left out if the engine lacks one of them."""
    found = {ours: [total(samples, name) for name in theirs] for ours, theirs in names.items()}
    return {ours: sum(value for value in values if value is not None) for ours, values in found.items()
            if None not in values}


def label_of(samples: Mapping[str, float], name: str, label: str) -> str | None:
    """Return a label's value in the first sample of a metric that carries facts as labels."""
    found = (labels_of(key).get(label) for key in samples if bare(key) == name)
    return next((value for value in found if value is not None), None)


def labels_of(key: str) -> dict[str, str]:
    """Return the labels of a key, unescaped."""
    return parse_labels(key[len(bare(key)) + 1:-1])
