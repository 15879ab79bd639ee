"""Measures how many of a layer's missing experts the host should compute while the device fetches the others."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from spillover.kernels.moe.host_expert_queue import PAIR
from spillover.kernels.moe.host_experts import HostExperts
from spillover.kernels.moe.page_table import Resolution
from spillover.kernels.moe.paging import gather

log = logging.getLogger("spillover.engine")

ROUNDS = 20  # timed rounds; the lower quartile counts, as other work of a starting process only slows rounds down
ROWS = (1, 4, 8, 16)  # numbers of rows per expert that are timed on the host for streaming steps
SHARES = 32  # the host's share is a multiple of 1 / SHARES: coarse, so that steps of similar size share a plan
POST = 12e-6  # seconds that a request to the host and its answer take in addition to the computation


def split_table(records: Sequence[Tensor], buffer: Tensor, host: HostExperts, most: int) -> Tensor | None:
    """Return int32 [most + 1]: how many of n missing experts the host computes; None if the host is never worth using.

    At least one missing expert is always fetched to the device, so that slots follow the routing. `records`: each
    layer's experts in host memory [experts, record]; `buffer`: slots of the device to measure copies into.
    """
    link, alone = _link_seconds(records, buffer), _host_seconds(host, len(records))
    table = [best_split(missing, link, alone) for missing in range(most + 1)]
    log.info("a missing expert takes %.0f us over the link and %.0f us on %d cores; of 1, 2, 3, 4 missing the host "
             "computes %s", 1e6 * link, 1e6 * alone, host.threads, table[1:5])
    return torch.tensor(table, dtype=torch.int32, device=buffer.device) if any(table) else None


def streaming_share(records: Sequence[Tensor], buffer: Tensor, host: HostExperts, k: int) -> Callable[[int], float]:
    """Return a function that gives, for the number of rows of a streaming step, each routed to k experts, the fraction
    of missing experts that the host should compute so that host and link finish together."""
    link = _copy_seconds(records, buffer)
    alone = [_host_seconds(host, len(records), rows) for rows in ROWS]
    log.info("streaming: an expert takes %.0f us over the link, and on the host %s us with %s rows", 1e6 * link,
             ", ".join(f"{1e6 * each:.0f}" for each in alone), ", ".join(map(str, ROWS)))

    def share(rows: int) -> float:
        found = float(np.interp(rows * k / host.layout.experts, ROWS, alone))
        return round(SHARES * link / (link + found)) / SHARES

    return share


def best_split(missing: int, link: float, host: float) -> int:
    """Return how many of the missing experts the host should compute. Host and link work at the same time, so the
    slower of the two counts; of equal choices, the one that fetches more is returned."""
    return min(range(max(1, missing)), key=lambda hosted: (max((missing - hosted) * link,
                                                               hosted * host + (POST if hosted else 0.0)), hosted))


def _link_seconds(records: Sequence[Tensor], buffer: Tensor) -> float:
    """Return the seconds per expert when the device reads experts from host memory into slots."""
    device, count = buffer.device, min(4, len(buffer), records[0].shape[0])
    target = buffer[len(buffer) - count :]
    pairs = torch.stack([torch.arange(count), torch.arange(count)], 1).to(torch.int32).to(device)
    nothing = torch.zeros(count, PAIR, dtype=torch.int32, device=device)
    wanted = Resolution(torch.tensor([count, 0], dtype=torch.int32, device=device), pairs, nothing, pairs[:, 0])
    return _device_seconds(lambda index: gather(wanted, records[index % len(records)], target)) / count


def _copy_seconds(records: Sequence[Tensor], buffer: Tensor) -> float:
    """Return the seconds per expert when several are copied in one run, as streaming steps do."""
    count = min(len(buffer), records[0].shape[0])
    target = buffer[len(buffer) - count :]
    return _device_seconds(
        lambda index: target.copy_(records[index % len(records)][:count], non_blocking=True)) / count


def _device_seconds(work: Callable[[int], object]) -> float:
    times = []
    for index in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(index)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times[1:], n=4)[0]


def _host_seconds(host: HostExperts, layers: int, rows: int = 1) -> float:
    """Return the seconds that the host takes for one expert with `rows` tokens, its weights not in a CPU cache."""
    x = torch.randn(rows, host.layout.hidden)
    count = min(4, host.layout.experts)
    times = []
    for index in range(ROUNDS + 1):
        first = (index * count) % (host.layout.experts - count + 1)
        pairs = torch.tensor([[row, first + i, 0, 0] for i in range(count) for row in range(rows)], dtype=torch.int32)
        host.wake()
        start = time.perf_counter()
        host.run(index % layers, x, pairs)
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times[1:], n=4)[0] / count
