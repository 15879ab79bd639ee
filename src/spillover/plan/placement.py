"""The placement of weights that do not all fit on the device: which units are resident, which move, and how.

A unit is a part's weights that every token uses ("layers.3" without its experts), or one expert of a layer.
Every unit is resident, or its home is host memory or disk; the device then holds copies of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SLOTTED = ("paged", "pinned", "demand")  # placements of experts that use slots of their layer
MANAGED = ("uvm", "uvm-prefetch", "uvm-advise")  # strategies with weights in managed memory


@dataclass(frozen=True)
class Predicted:
    """The best speed of a plan at measured rates with uniform routing, for a batch of one request."""

    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    decode_roof: str  # the roof that binds: "memory" | "compute" | "link" | "host" | "link and host" | "disk"
    prefill_roof: str
    decode_seconds: tuple[tuple[str, float], ...]  # seconds of device, link, host and disk in a step
    prefill_seconds: tuple[tuple[str, float], ...]
    decode_moved: int  # bytes that a step copies to the device
    decode_hosted: int  # bytes of experts that the host computes with in a step
    prefill_moved: int
    assumed_hit_rate: float | None  # hit rate of experts with uniform routing; None: no slots
    context: int  # cached tokens of the decoding request
    prefill_tokens: int


@dataclass(frozen=True)
class UnitBytes:
    """One row of a plan's table of placements, in bytes; the rows add up to the plan's totals."""

    # Weights: "embedding" | "layers" | "experts" | "head"; copies: "substitutes"; buffers: "stream buffers" | "ring" |
    # "tables" | "pages".
    kind: str
    place: str  # description of the placement
    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class WeightPlan:
    """The placement of a model that does not fit on the device. "streamed" experts move together with their part."""

    strategy: str  # "demand" | "sequential" | "experts" | "host-experts" | "pinned" | "cpu-offload" | one of MANAGED
    parts: Mapping[str, str]  # weights without experts, by part: "resident" | "streamed" | "demand" | "managed"
    # Experts by layer: "resident" | "paged" | "streamed" | "host" | "pinned" | "demand" | "managed".
    experts: Mapping[int, str]
    quota: int = 0  # slots of each layer whose experts are paged, pinned or fetched on demand; 0: no slots
    stream_buffers: int = 0  # slots for prefill and large batches, in addition to the layers' slots; 0: none
    ring: int = 0  # buffers that parts pass through: 1 on demand, 2 or more with prefetching; 0: none
    ring_bytes: int = 0  # bytes of one buffer: the largest part that moves, with experts that move with it
    record_bytes: int = 0  # bytes of the record of one expert; 0: the model has none
    paged_tokens: int = 0  # maximum tokens of a step that fetches its misses itself or uses host experts; 0: none
    pinned: int = 0  # number of experts [0, n) of each layer that always keep their slots
    spare_slots: int = 0  # slots of all layers together that may be lent to KV as contexts grow
    resident_bytes: int = 0  # bytes of resident weights, outside slots
    device_bytes: int = 0  # bytes of weights on the device: resident, slots, ring, substitutes and tables
    host_bytes: int = 0  # bytes of weights in host memory
    disk_bytes: int = 0  # bytes of weights that do not fit in host memory and are read from the checkpoint
    disk_parts: tuple[str, ...] = ()  # parts read from disk, in reverse order
    disk_experts: tuple[int, ...] = ()  # layers whose experts are read from disk
    managed_bytes: int = 0  # bytes of managed memory, in whole pages, of which device_bytes are on the device; 0: none
    substitute_bytes: int = 0  # bytes of rounded copies, on the device, of layers that are not resident
    rows: tuple[UnitBytes, ...] = ()
    predicted: Predicted | None = None

    @property
    def is_resident(self) -> bool:
        """Return whether every weight is on the device."""
        return {*self.parts.values(), *self.experts.values()} <= {"resident"}

    @property
    def slot_layers(self) -> tuple[int, ...]:
        """Return the layers that have slots, in the order of their slots."""
        return tuple(layer for layer, where in self.experts.items() if where in SLOTTED)

    @property
    def slots(self) -> int:
        """Return the number of slots of all layers and of stream buffers."""
        return self.quota * len(self.slot_layers) + self.stream_buffers
