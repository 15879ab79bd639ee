"""KV and expert slots in one run of device memory: as contexts grow, KV borrows slots and returns them later.

    | KV blocks of the plan | slots of experts ... | stream buffers |

The pool of KV blocks is a view of the whole run, so slots can hold blocks: a loan of slots provides the blocks that are
entirely inside them. A few adjacent slots are lent at a time, because block and slot boundaries seldom coincide.
Addresses never change, so captured steps stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spillover.kernels.fields import aligned
from spillover.kernels.huge_pages import map_pages

log = logging.getLogger("spillover.engine")

RUN = 4  # maximum number of adjacent slots that are lent and returned together


@dataclass(frozen=True)
class ElasticMemory:
    run: Tensor  # uint8
    kv_bytes: int  # bytes at the beginning of the run that always belong to KV
    slot_bytes: int

    @classmethod
    def make(cls, kv_bytes: int, slots: int, slot_bytes: int, device: torch.device) -> ElasticMemory:
        start = aligned(kv_bytes)
        if device.type == "cpu":
            run = torch.frombuffer(map_pages(start + slots * slot_bytes), dtype=torch.uint8)
        else:
            run = torch.empty(start + slots * slot_bytes, dtype=torch.uint8, device=device)
        return cls(run, kv_bytes, slot_bytes)

    @property
    def slots(self) -> Tensor:
        """Return the slots, [slots, bytes per slot]."""
        return self.run[aligned(self.kv_bytes) :].view(-1, self.slot_bytes)

    def pool(self, block_bytes: int) -> Tensor:
        """Return the blocks, [blocks, bytes per block], over the whole run; zero those that always belong to KV."""
        self.run[: self.kv_bytes].zero_()
        count = len(self.run) // block_bytes
        return self.run[: count * block_bytes].view(count, block_bytes)

    def blocks_in(self, slots: range, block_bytes: int) -> range:
        """Return the blocks that are entirely inside a range of adjacent slots."""
        base = aligned(self.kv_bytes)
        start, end = base + slots.start * self.slot_bytes, base + slots.stop * self.slot_bytes
        return range(-(-start // block_bytes), end // block_bytes)


class SlotOwner(Protocol):
    def lend(self, layer: int, most: int) -> range:
        """Take up to `most` adjacent slots of a layer out of use and return them; empty if it can spare none."""
        ...

    def return_slots(self, layer: int, slots: range) -> None: ...


class SlotLender:
    """Lends expert slots to KV, taken from the layers in turn."""

    def __init__(self, memory: ElasticMemory, experts: SlotOwner, layers: int, most: int, block_bytes: int,
                 in_order: Callable[[Callable[[], Any]], Any]) -> None:
        """Make the lender. `most`: maximum number of slots lent at a time, over all layers; `in_order`: applies a
        change to the device between two steps."""
        self._memory = memory
        self._experts = experts
        self._layers = layers
        self._most = most
        self._block_bytes = block_bytes
        self._in_order = in_order
        self._next = 0
        self._lent: dict[Sequence[int], tuple[int, range]] = {}  # blocks -> layer, slots

    @property
    def slots(self) -> int:
        """Return the number of slots that are lent now."""
        return sum(len(slots) for _, slots in self._lent.values())

    def lend(self, blocks: int) -> list[Sequence[int]]:
        before = self.slots
        if before == self._most:
            return []
        loans: list[Sequence[int]] = self._in_order(lambda: self._lend(blocks, self._most - before))
        if loans:
            log.info("KV borrowed %d more expert slots, %d in total", self.slots - before, self.slots)
        return loans

    def return_loan(self, loan: Sequence[int]) -> None:
        self._in_order(lambda: self._experts.return_slots(*self._lent.pop(loan)))

    def _lend(self, blocks: int, most: int) -> list[Sequence[int]]:
        loans: list[Sequence[int]] = []
        refused = found = 0
        while found < blocks and most > 0 and refused < self._layers:
            layer, self._next = self._next, (self._next + 1) % self._layers
            slots = self._experts.lend(layer, min(RUN, most))
            if not slots:
                refused += 1
                continue
            refused = 0
            loan = self._memory.blocks_in(slots, self._block_bytes)
            if not loan:  # no whole block fits into these slots
                self._experts.return_slots(layer, slots)
                return loans
            self._memory.slots[slots.start : slots.stop].zero_()  # expert bytes read as KV could be NaN
            self._lent[loan] = (layer, slots)
            loans.append(loan)
            found += len(loan)
            most -= len(slots)
        return loans
