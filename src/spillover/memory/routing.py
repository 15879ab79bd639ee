"""Recorded routing: which experts real tokens were routed to, read from a log and replayed through an expert cache.

A log is a CSV file with a header and one row per choice: turn, phase (0 prefill, 1 decode), step, layer, slot, expert,
weight. `extended` widens a log that has fewer experts per token than the model chooses: the additional ones are drawn
by how often the layer chose each, so results of such a replay are labelled "replayed, extended".
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spillover.errors import SpilloverError
from spillover.memory.experts import CacheCounts, ExpertCache
from spillover.memory.policies.experts.protocol import ExpertPolicy

Trace = list[list[list[int]]]  # the experts of each step and layer, in the router's order


def read_log(path: str | Path, phase: int | None = 1) -> Trace:
    """Return the steps of one phase of a log (all steps if None), in order; steps that lack a layer are left out."""
    steps: dict[tuple[int, int, int], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                numbers = [int(row[column]) for column in ("turn", "phase", "step", "layer", "slot", "expert")]
                turn, of_phase, step, layer, slot, expert = numbers
                if phase is None or of_phase == phase:
                    steps[turn, of_phase, step][layer][slot] = expert
    except OSError as error:
        raise SpilloverError(f"cannot read the routing log '{path}': {error.strerror}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise SpilloverError(f"'{path}' is not a routing log: a CSV file with the columns turn, phase, step, layer, "
                             "slot, expert and weight") from error
    layers = sorted({layer for by_layer in steps.values() for layer in by_layer})
    whole = [steps[key] for key in sorted(steps) if len(steps[key]) == len(layers)]
    if not whole:
        raise SpilloverError(f"'{path}' holds no step of phase {phase} with all layers")
    return [[[by_layer[layer][slot] for slot in sorted(by_layer[layer])] for layer in layers] for by_layer in whole]


def extended(trace: Trace, experts: int, k: int, layers: int | None = None, seed: int = 0) -> Trace:
    """Extend a trace to k distinct experts per token: the recorded ones, then others drawn by how often the layer chose
    them. `layers`: number of layers of the result, which repeats the recorded layers."""
    rng = np.random.default_rng(seed)
    recorded = len(trace[0])
    counts = np.full((recorded, experts), 0.0)
    for by_layer in trace:
        for layer, chosen in enumerate(by_layer):
            counts[layer, chosen] += 1
    counts += 1e-9  # so that k different ones can always be drawn
    wide = []
    for by_layer in trace:
        step = []
        for layer in range(layers or recorded):
            chosen = list(dict.fromkeys(by_layer[layer % recorded]))[:k]
            if len(chosen) < k:
                weights = counts[layer % recorded].copy()
                weights[chosen] = 0
                chosen += rng.choice(experts, k - len(chosen), replace=False, p=weights / weights.sum()).tolist()
            step.append(chosen)
        wide.append(step)
    return wide


def uniform(steps: int, layers: int, experts: int, k: int, seed: int = 0) -> Trace:
    """Return a trace in which every expert is equally likely, as random weights would route."""
    rng = np.random.default_rng(seed)
    return [[rng.choice(experts, k, replace=False).tolist() for _ in range(layers)] for _ in range(steps)]


def simulate(trace: Trace, experts: int, quota: int, policy: ExpertPolicy, warm: int = 0) -> CacheCounts:
    """Replay a trace through a cache that starts with each layer's first experts; do not count `warm` initial steps."""
    cache = ExpertCache(len(trace[0]), experts, quota, policy)
    for layer in range(cache.layers):
        for expert in range(cache.quota):
            cache.assign(layer, expert, demand=False)
    policy.on_phase("decode")
    before = cache.counts
    for step, by_layer in enumerate(trace):
        if step == warm:
            before = cache.counts
        for layer, chosen in enumerate(by_layer):
            wanted = list(dict.fromkeys(chosen))
            policy.on_route(step, layer, wanted)
            for expert in wanted:
                if cache.lookup(layer, expert) is None:
                    cache.assign(layer, expert, keep=wanted)
    return _difference(cache.counts, before)


def distinct(trace: Trace) -> Sequence[Sequence[Sequence[int]]]:
    """Return each step's distinct experts, for policies that look ahead."""
    return [[list(dict.fromkeys(chosen)) for chosen in by_layer] for by_layer in trace]


def _difference(after: CacheCounts, before: CacheCounts) -> CacheCounts:
    return CacheCounts(**{name: value - getattr(before, name) for name, value in vars(after).items()})
