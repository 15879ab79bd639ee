"""The plan of a step that streams: which experts of every layer are copied, and which the host computes concurrently.

It depends only on the page table and on the host's share, so one plan serves every step until one of them changes;
until then the steps can be captured together with their copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.cuda.stream_buffers import Group, grouped
from spillover.kernels.moe.page_table import NONE


@dataclass(frozen=True)
class StreamPlan:
    groups: tuple[Group, ...]  # groups of all layers, in the order in which they are copied
    groups_of: tuple[int, ...]  # number of groups, by layer
    rows: Tensor  # int32 [groups, E]: expert -> slot of the stream buffers
    hosted: Tensor | None  # int32 [L, E]: 1 where the host computes an expert; None if it computes none
    num_hosted: int
    copies: int
    bytes_moved: int


def stream_plan(slot_of: npt.NDArray[np.int32], runs: Sequence[Tensor], share: float, size: int, places: int,
                first_slot: int, device: torch.device) -> StreamPlan:
    """Make the plan. `slot_of` [L, E]: as in the page table; `runs`: each layer's records in host memory; `share`: the
    fraction of missing experts that the host computes. Groups of `size` experts take turns in `places` places, the
    first of which begins at slot `first_slot`."""
    groups: list[Group] = []
    groups_of: list[int] = []
    hosted = np.zeros_like(slot_of)
    for layer, slots in enumerate(slot_of):
        missing = np.nonzero(slots < 0)[0].tolist()
        passing = len(missing) - round(share * len(missing))
        hosted[layer, missing[passing:]] = 1
        parts = grouped(missing[:passing], size)
        groups_of.append(len(parts))
        groups += [Group(runs[layer], experts) for experts in parts]
    rows = np.full((len(groups), slot_of.shape[1]), NONE, dtype=np.int32)
    for index, group in enumerate(groups):
        first = first_slot + index % places * size
        rows[index, list(group.experts)] = np.arange(first, first + len(group.experts))
    return StreamPlan(
        tuple(groups), tuple(groups_of), _sent(rows, device), _sent(hosted, device) if hosted.any() else None,
        int(hosted.sum()),
        sum(group.copies for group in groups), sum(len(group.experts) * group.runs.shape[1] for group in groups),
    )


def _sent(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy an array to the device in stream order; a copy from unpinned memory would wait for all earlier work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
