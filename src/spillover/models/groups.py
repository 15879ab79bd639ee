"""Groups of layers that share a KV block: layers of one window, in groups of equal size, all served by one pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spillover.models.config import ModelConfig


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    window: int | None  # None: full attention


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Return groups of equal size: full attention first, then windows from small to large. A head's layers are numbered
    after the model's and are added to the first group, whose size is the number of layers per block."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        kinds.setdefault(window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in kinds.values()))
    first, *others = [
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for start in range(0, len(layers), size)
    ]
    head = range(config.num_layers, config.num_layers + config.head_layers)
    return replace(first, layers=(*first.layers, *head)), *others
