"""Where each unit of the weights lies when they do not all fit on the device: which stay, which move, and how.

A unit is a part's weights that every token goes through ("layers.3" without its experts), or one expert of a layer.
Every unit is resident or lies in host memory or on disk; what the device holds of the latter are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SLOTTED = ("paged", "pinned", "demand")  # experts that have slots of their layer
MANAGED = ("uvm", "uvm-prefetch", "uvm-advise")  # strategies whose weights lie in managed memory


@dataclass(frozen=True)
class Predicted:
    """How fast the plan would be at best at measured rates, were routing uniform. Batch of one request."""

    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    decode_roof: str  # what binds: "memory" | "compute" | "link" | "host" | "link and host" | "disk"
    prefill_roof: str
    decode_seconds: tuple[tuple[str, float], ...]  # what device, link, host and disk each take in a step
    prefill_seconds: tuple[tuple[str, float], ...]
    decode_moved: int  # bytes that a step brings to the device
    decode_hosted: int  # bytes of experts that the host computes with in a step
    prefill_moved: int
    assumed_hit_rate: float | None  # share of experts found in a slot, were routing uniform; None: no slots
    context: int  # tokens in the cache of the decoding request
    prefill_tokens: int


@dataclass(frozen=True)
class UnitBytes:
    """One row of what lies where; the rows of a plan add up to its bytes."""

    # "embedding" | "layers" | "experts" | "head", what is held besides: "substitutes", or what copies pass through:
    # "transit" | "ring" | "tables" | "pages"
    kind: str
    place: str  # in words
    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class WeightPlan:
    """The placement of a model that does not fit on the device. Experts that are "streamed" travel with their part."""

    strategy: str  # "demand" | "sequential" | "experts" | "host-experts" | "pinned" | "cpu-offload" | one of MANAGED
    parts: Mapping[str, str]  # weights that are not experts, by part: "resident" | "streamed" | "demand" | "managed"
    # By layer: "resident" | "paged" | "streamed" | "host" | "pinned" | "demand" | "managed".
    experts: Mapping[int, str]
    quota: int = 0  # slots of each layer whose experts are paged, pinned or fetched on demand; 0: there is none
    transit: int = 0  # slots that prefill and large batches stream through, apart from every layer's; 0: none
    ring: int = 0  # buffers that parts pass through: 1 on demand, 2 or more where they are fetched ahead; 0: none
    ring_bytes: int = 0  # bytes of one buffer: the largest part that passes, with experts that travel with it
    record_bytes: int = 0  # bytes of one expert; 0: the model has none
    paged_tokens: int = 0  # largest step that fetches its misses itself, or leaves experts to the host; 0: none
    pinned: int = 0  # experts [0, n) of each layer that keep their slots for ever
    spare_slots: int = 0  # slots of all layers that KV may take as contexts grow
    resident_bytes: int = 0  # weights that stay on the device for ever, outside slots
    device_bytes: int = 0  # all that weights take there: resident, slots, ring, substitutes and tables
    host_bytes: int = 0  # weights in host memory
    disk_bytes: int = 0  # weights that host memory has no room for: read from the checkpoint
    disk_parts: tuple[str, ...] = ()  # parts read from disk, last first
    disk_experts: tuple[int, ...] = ()  # layers whose experts are
    managed_bytes: int = 0  # managed memory, in whole pages; what of it is on the device is device_bytes. 0: none
    substitute_bytes: int = 0  # rounded copies, on the device, of layers that do not stay
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
        """Return the slots of all layers, and the stream buffers."""
        return self.quota * len(self.slot_layers) + self.transit
