"""Models that are a shape without weights: `model: shape:NAME` is a shipped folder with a config.json.

They are for engines that make random weights (`load-format: dummy`); speeds are those of the shape, and labelled so.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from spillover.errors import SpilloverError, did_you_mean

PREFIX = "shape:"


def shapes() -> dict[str, Path]:
    """Return the shipped folders, by name."""
    folder = Path(str(resources.files("spillover.lab"))) / "shapes"
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def model_path(model: str | None) -> str | None:
    """Return the folder of a shape; any other model unchanged."""
    if model is None or not model.startswith(PREFIX):
        return model
    name = model.removeprefix(PREFIX)
    if name not in shapes():
        raise SpilloverError(f"there is no shape '{name}'{did_you_mean(name, shapes(), listed=True)}")
    return str(shapes()[name])
