"""A server's Prometheus page as numbers by sample name: `vllm:prefix_cache_hits_total{engine="0"}` -> 1024.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def parse_metrics(text: str) -> dict[str, float]:
    """Keys as the server writes them. Read beside a run many times, so it does no more than is needed. ValueError where
    it is no such text."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        line = line.partition(" # {")[0]  # an exemplar
        end = line.rfind("}") + 1 or line.find(" ")
        if end <= 0:
            raise ValueError(f"no sample of a Prometheus page: {line[:80]!r}")
        samples[line[:end]] = float(line[end:].split()[0])  # a time may follow
    return samples


def bare(key: str) -> str:
    """The name without its labels."""
    return key.partition("{")[0]


def total(samples: Mapping[str, float], name: str) -> float | None:
    """Summed over labels; a counter may be given without its `_total`. None where there is no such metric."""
    values = [value for key, value in samples.items() if bare(key) in (name, f"{name}_total")]
    return sum(values) if values else None


def counters_from(samples: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Each of our names as the sum of the engine's; left out where the engine lacks one of them."""
    found = {ours: [total(samples, name) for name in theirs] for ours, theirs in names.items()}
    return {ours: sum(value for value in values if value is not None) for ours, values in found.items()
            if None not in values}


def label_of(samples: Mapping[str, float], name: str, label: str) -> str | None:
    """A label's value in the first sample of a metric that carries facts as labels."""
    for key in samples:
        if bare(key) == name:
            for found, value in labels_of(key):
                if found == label:
                    return value
    return None


def labels_of(key: str) -> Iterator[tuple[str, str]]:
    """The labels of a key, unescaped."""
    rest = key[len(bare(key)) + 1:-1]
    while rest:
        label, _, rest = rest.partition('="')
        value, at = "", 0
        while at < len(rest) and rest[at] != '"':
            escaped = rest[at] == "\\"
            at += escaped
            value += "\n" if escaped and rest[at] == "n" else rest[at]
            at += 1
        rest = rest[at + 1:].removeprefix(",")
        yield label.strip(), value
