"""Plots the budget sweep of `big_models.py`: decode speed, hit rate and bytes moved, by budget of device memory.

    python benchmarks/plot_sweep.py benchmarks/results/budget-sweep.json docs/budget-sweep.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (("decode, tok/s", lambda row: row["value"]), ("experts found on the device, %", lambda row: _hits(row)),
          ("moved over the link, MB per token", lambda row: row["bytes_moved_per_token"] / 1e6))
COLOURS = {"uniform": "#4269d0", "replayed": "#ff725c"}


def _hits(row: dict[str, Any]) -> float | None:
    return None if row["hit_rate"] is None else 100 * row["hit_rate"]


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def main(results: Path, picture: Path) -> None:
    rows = [row for row in json.loads(results.read_text()) if row["phase"] == "decode"]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.6), layout="constrained")
    for axis, (title, value) in zip(axes, PANELS, strict=True):
        for routing in dict.fromkeys(row["routing"] for row in rows):
            points = sorted((row["budget"] / 1e9, value(row)) for row in rows if row["routing"] == routing
                            and value(row) is not None)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=routing, color=COLOURS.get(routing, "#6b7280"))
        axis.set(title=title, xlabel="--gpu-memory, GB", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(title="routing", frameon=False)
    figure.suptitle(f"{rows[0]['model']}, random weights, --weights {rows[0]['strategy']}, {rows[0]['gpu']}")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
