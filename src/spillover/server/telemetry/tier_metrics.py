"""Prometheus metrics of the KV tiers below the device: their blocks, the bytes moved, the rates, and the hits.

`in` is to the tier (spilled), `out` is from it (restored). Rates cover only the time in which bytes were moving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spillover.memory.spill.report import TierReport

PREFIX = "spillover:"
# vLLM's names for the two directions between the device and host memory.
TRANSFER_TYPES = {"in": "GPU_to_CPU", "out": "CPU_to_GPU"}


def tier_families(model: str, tiers: Sequence[TierReport], slot_bytes: int, queries: int, found: int
                  ) -> Iterator[Metric]:
    """Yield the metrics of tiers. `slot_bytes`: size of a block below the device, 0 if unknown; `queries`: prompt
    tokens that were looked up; `found`: those of them found on the device."""
    yield from _external(model, tiers, queries, found)
    moved = Families(model, "kv_transfer", ("tier", "direction"))
    held = Families(model, "kv_tier", ("tier",))
    for tier in tiers:
        for way, count, seconds, rate, link in (
            ("in", tier.bytes_in, tier.seconds_in, tier.rate_in, tier.link_in),
            ("out", tier.bytes_out, tier.seconds_out, tier.rate_out, tier.link_out),
        ):
            label = (tier.name, way)
            moved.counter("bytes", "Bytes of KV moved to (in) and from (out) a tier.", label, count)
            moved.counter("seconds", "Time that moving KV to (in) and from (out) a tier took.", label, seconds)
            moved.counter("blocks", "Blocks spilled to (in) and restored from (out) a tier.", label,
                          count // slot_bytes if slot_bytes else 0)
            moved.gauge("bytes_per_second", "Rate of a tier while it moved bytes.", label, rate)
            moved.gauge("link_bytes_per_second", "Measured rate of the path to a tier.", label, link)
            moved.gauge("link_usage_perc", "Reached rate as a share of the measured rate of the path, 0 to 1.", label,
                        rate / link if rate is not None and link else None)
        held.counter("hit_tokens", "Prompt tokens that came from a tier.", (tier.name,), tier.hit_tokens)
        held.gauge("hit_rate", "Share of all prompt tokens that came from a tier, 0 to 1.", (tier.name,),
                   tier.hit_tokens / queries if queries else 0.0)
        held.counter("failures", "Stores and loads that failed or missed their deadline.", (tier.name,), tier.failures)
        held.counter("dropped_blocks", "Blocks that a tier should have stored and did not.", (tier.name,), tier.dropped)
        held.gauge("available", "1 while a tier is available.", (tier.name,), int(tier.available))
    yield from moved
    yield from held


def _external(model: str, tiers: Sequence[TierReport], queries: int, found: int) -> Iterator[Metric]:
    """Yield metrics with vLLM's names, in which everything below the device is external."""
    labels = ["model_name"]
    queried = CounterMetricFamily(PREFIX + "external_prefix_cache_queries", "Tokens looked up in the tiers below the "
                                  "device.", labels=labels)
    queried.add_metric([model], queries - found if tiers else 0)
    hits = CounterMetricFamily(PREFIX + "external_prefix_cache_hits", "Tokens restored from the tiers below the "
                               "device.", labels=labels)
    hits.add_metric([model], sum(tier.hit_tokens for tier in tiers))
    moved = CounterMetricFamily(PREFIX + "kv_offload_total_bytes", "Bytes of KV between device and host memory.",
                                labels=["model_name", "transfer_type"])
    seconds = CounterMetricFamily(PREFIX + "kv_offload_total_time", "Seconds that these copies of KV took.",
                                  labels=["model_name", "transfer_type"])
    for tier in tiers:
        if tier.name == "host":
            moved.add_metric([model, TRANSFER_TYPES["in"]], tier.bytes_in)
            moved.add_metric([model, TRANSFER_TYPES["out"]], tier.bytes_out)
            seconds.add_metric([model, TRANSFER_TYPES["in"]], tier.seconds_in)
            seconds.add_metric([model, TRANSFER_TYPES["out"]], tier.seconds_out)
    yield from (queried, hits, moved, seconds)


class Families:
    """Metrics that share a name prefix and labels."""

    def __init__(self, model: str, begin: str, labels: tuple[str, ...]) -> None:
        self._model, self._begin, self._labels = model, begin, labels
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def counter(self, name: str, text: str, label: tuple[str, ...], value: float) -> None:
        self._add(CounterMetricFamily, name, text, label, value)

    def gauge(self, name: str, text: str, label: tuple[str, ...], value: float | None) -> None:
        """Add a gauge; None means unknown and exports no value rather than 0."""
        if value is not None:
            self._add(GaugeMetricFamily, name, text, label, value)

    def _add(self, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str,
             label: tuple[str, ...], value: float) -> None:
        if name not in self._families:
            self._families[name] = kind(f"{PREFIX}{self._begin}_{name}", text, labels=["model_name", *self._labels])
        self._families[name].add_metric([self._model, *label], value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())
