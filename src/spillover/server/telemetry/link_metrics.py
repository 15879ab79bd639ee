"""Prometheus metrics of copies and ranks: the use of the link between the device and host memory by kind of copy,
waiting copies and how busy it is; and the collective operations of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from spillover.engine.parallel.report import RanksReport
from spillover.memory.transfer.link_queue import LinkReport
from spillover.server.telemetry.tier_metrics import Families


def link_families(model: str, link: LinkReport, host_pool: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the metrics of the link. `host_pool` has the bytes of host memory by use."""
    copies, by_direction = Families(model, "link", ("direction", "priority")), Families(model, "link", ("direction",))
    for each in link.transfers:
        label = (each.direction, each.priority)
        copies.counter("copies", "Copies between the device and host memory.", label, each.copies)
        copies.counter("bytes", "Bytes copied between the device and host memory.", label, each.bytes)
        copies.counter("seconds", "Time that copies used the link; derived from its rate if copies run in the order "
                       "of a step.", label, each.seconds)
        copies.gauge("waiting", "Copies that wait for more urgent ones.", label, each.waiting)
        copies.gauge("running", "Copies that the host waits for.", label, each.running)
    for direction, share in (link.busy or {}).items():
        key = (direction,)
        by_direction.gauge("busy_perc", "Share of the last second or so that the link was busy, 0 to 1.", key, share)
        by_direction.gauge("rate_bytes_per_second", "Measured rate of the link.", key, (link.rates or {})[direction])
    pool = Families(model, "host_pool", ("use",))
    for use, nbytes in host_pool.items():
        pool.gauge("bytes", "Host memory of the engine by use.", (use,), nbytes)
    yield from copies
    yield from by_direction
    yield from pool


def rank_families(model: str, ranks: RanksReport) -> Iterator[Metric]:
    """Yield the metrics of the ranks' communication; nothing if there is only one rank."""
    if ranks.size == 1:
        return
    group, each = Families(model, "ranks", ()), Families(model, "rank", ("rank",))
    group.gauge("size", "Ranks, each with a part of the model.", (), ranks.size)
    group.counter("calls", "Collective operations of ranks: for sums, logits and sampled tokens.", (), ranks.calls)
    group.counter("bytes", "Bytes that rank 0 sent to the other ranks.", (), ranks.bytes)
    group.counter("seconds", "Time that rank 0 waited for the other ranks.", (), ranks.seconds)
    for rank, rows in enumerate(ranks.expert_rows):
        each.counter("expert_rows", "Rows routed to the rank's experts, with expert parallelism.", (str(rank),), rows)
    yield from group
    yield from each


def ranks_live(ranks: RanksReport) -> dict[str, Any] | None:
    """Return the same values for the page; None if there is only one rank."""
    if ranks.size == 1:
        return None
    return {"size": ranks.size, "calls": ranks.calls, "bytes": ranks.bytes, "seconds": ranks.seconds,
            "expert_rows": list(ranks.expert_rows)}
