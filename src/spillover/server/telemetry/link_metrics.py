"""The link between the device and host memory, as Prometheus reads it: who uses it, who waits, how busy it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from spillover.memory.transfer.link_queue import LinkReport
from spillover.server.telemetry.tier_metrics import Families


def link_families(model: str, link: LinkReport, host_pool: Mapping[str, int]) -> Iterator[Metric]:
    """`host_pool`: bytes of host memory by use."""
    copies, ways = Families(model, "link", ("direction", "priority")), Families(model, "link", ("direction",))
    for each in link.transfers:
        label = (each.direction, each.priority)
        copies.counter("copies", "Copies between the device and host memory.", label, each.copies)
        copies.counter("bytes", "Bytes of these copies.", label, each.bytes)
        copies.counter("seconds", "Time of the link that they took; taken from its rate where copies run in the order "
                       "of a step.", label, each.seconds)
        copies.gauge("waiting", "Copies that wait for more urgent ones.", label, each.waiting)
        copies.gauge("running", "Copies that the host waits for.", label, each.running)
    for direction, share in (link.busy or {}).items():
        ways.gauge("busy_perc", "Share of the last second or so that the link was busy, 0 to 1.", (direction,), share)
        ways.gauge("rate_bytes_per_second", "Rate that copies reach.", (direction,), (link.rates or {})[direction])
    pool = Families(model, "host_pool", ("use",))
    for use, nbytes in host_pool.items():
        pool.gauge("bytes", "Host memory of the engine by what it is for.", (use,), nbytes)
    yield from copies
    yield from ways
    yield from pool
