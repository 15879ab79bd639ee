"""The page table of experts in slots of device memory, and the actions for the missing experts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spillover.kernels.extents import num_passes

NONE = -1  # in `slot_of`: the expert is not on the device; in `owner`: the slot is free
LENT = -2  # in `owner`: the slot is on loan, its bytes hold something else
NEVER = -2  # in `stamp`: the expert was never used
MOST_SLOTS = 1 << 12  # maximum number of slots of a layer
OLDEST = (1 << 17) - 1  # steps; experts unused for longer count as equally old
PATIENCE = 1 << 21  # polls of the queue before the device gives up; one takes about a microsecond


@dataclass(frozen=True)
class PageTable:
    """The page table of L layers of E experts in S slots; all but the log is on the device."""

    slot_of: Tensor  # int32 [L, E]: slot in the arena, or NONE
    owner: Tensor  # int32 [S]: expert of the slot's layer that is in the slot, NONE or LENT
    first: Tensor  # int32 [L + 1]: slots first[l] .. first[l + 1] are layer l's
    worth: Tensor  # float32 [L, E]: the lowest is evicted first; infinite: evicted only if no other can be
    stamp: Tensor  # int32 [L, E]: step of the last use, or NEVER
    step: Tensor  # int32 [1]: number of the step, incremented by `advance`
    totals: Tensor  # int64 [L, 3]: number of distinct experts that were hits, gathered, computed by the host
    log: Tensor  # int16 [R, L, P], in host memory: expert of each pair, in row step % R; -1 past the pairs
    quota: int  # smallest number of slots of a layer, of those that have any
    stream_buffers: int  # slots after those of all layers, for experts that exceed the slots of their layer

    @staticmethod
    def make(quotas: Sequence[int], experts: int, pairs: int, log_rows: int, device: torch.device,
             stream_buffers: int = 0) -> PageTable:
        """Make an empty table. `quotas`: slots of each layer; `pairs`: maximum (token, expert) pairs of a step."""
        layers, slots = len(quotas), sum(quotas)
        assert max(quotas, default=0) <= min(experts, MOST_SLOTS), "more slots than experts"
        first = [sum(quotas[:layer]) for layer in range(layers + 1)]
        shape = (layers, experts)
        log = torch.full((log_rows, layers, pairs), -1, dtype=torch.int16, pin_memory=device.type == "cuda")
        return PageTable(
            torch.full(shape, NONE, dtype=torch.int32, device=device),
            torch.full((slots,), NONE, dtype=torch.int32, device=device),
            torch.tensor(first, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.full(shape, NEVER, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(layers, 3, dtype=torch.int64, device=device),
            log,
            min((quota for quota in quotas if quota), default=0),
            stream_buffers,
        )

    @property
    def layers(self) -> int:
        return self.slot_of.shape[0]

    @property
    def experts(self) -> int:
        return self.slot_of.shape[1]

    def passes(self, pairs: int) -> int:
        """Return the number of passes of a step of `pairs` pairs."""
        # A layer without any slot leaves all experts to the host.
        found = num_passes(pairs, self.experts, self.quota, self.stream_buffers) if self.quota else 1
        assert not self.quota or self.stream_buffers or self.quota >= min(pairs, self.experts), \
            "fewer slots than a step may ask for"
        return found

    def advance(self) -> None:
        """Begin the next step."""
        self.step.add_(1)

    def check(self) -> None:
        """Assert that `slot_of` and `owner` are consistent: for tests, and for an idle engine."""
        first, owner, slot_of = self.first.tolist(), self.owner.tolist(), self.slot_of.tolist()
        for layer, row in enumerate(slot_of):
            resident = {expert: slot for expert, slot in enumerate(row) if slot != NONE}
            assert all(first[layer] <= slot < first[layer + 1] for slot in resident.values())
            held = {owner[slot]: slot for slot in range(first[layer], first[layer + 1]) if owner[slot] >= 0}
            assert resident == held, f"layer {layer}: experts are in {resident}, slots hold {held}"


@dataclass(frozen=True)
class Resolution:
    """The actions for the P pairs of one layer of a step, before its first pass; all tensors are on the device."""

    counts: Tensor  # int32 [2]: number of gathers, number of pairs for the host
    gathers: Tensor  # int32 [P, 2]: expert, slot to copy its record into
    hosted: Tensor  # int32 [P, 4]: token, expert, pair, 0 for each pair that the host computes
    place: Tensor  # int32 [P]: row of each pair in `hosted`, NONE if the device computes it
    row: Tensor | None = None  # int32 [E]: slots of the experts of this pass, else NONE; None: those of the page table
    later: tuple[Resolution, ...] = ()  # gathers before each further pass, and its row

    @classmethod
    def in_passes(cls, counts: Tensor, gathers: Tensor, to_host: Tensor, place: Tensor, rows: Tensor) -> Resolution:
        """Make a resolution of counts [passes, 2], gathers [passes, P, 2] and rows [passes, E]."""
        first, *later = (cls(counts[index], gathers[index], to_host, place, rows[index]) for index in range(len(rows)))
        return replace(first, later=tuple(later))
