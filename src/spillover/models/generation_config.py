"""Sampling parameters that a model's authors recommend, from generation_config.json or a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError
from spillover.models.gguf.gguf_header import read_header
from spillover.models.hub import default_model
from spillover.models.safetensors_folder import read_json

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILE = "generation_config.json"
_GGUF = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
         "repetition_penalty": "penalty_repeat"}  # metadata keys below "general.sampling."


def sampling_defaults(path: Path, choice: str = "auto") -> dict[str, float]:
    """Return the recommended FIELDS. `choice`: "auto" (the model's), "none" (nothing), or a folder or file to read."""
    if choice == "none":
        return {}
    if choice != "auto":
        file = Path(choice).expanduser()
        file = file / _FILE if file.is_dir() else file
        if not file.is_file():
            raise SpilloverError(f"--generation-config takes auto, none, or a folder with {_FILE}; {choice} has none")
        return _of_file(file)
    if path.is_dir():
        return _of_file(path / _FILE) if (path / _FILE).is_file() else {}
    if path.name == default_model.MODEL.file:
        return dict(default_model.MODEL.sampling)
    metadata = read_header(path).metadata
    return _valid({name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF.items()})


def _of_file(file: Path) -> dict[str, float]:
    found = read_json(file)
    given = _valid({name: found.get(name) for name in FIELDS})
    return given | {"temperature": 0.0} if found.get("do_sample") is False else given


def _valid(given: dict[str, Any]) -> dict[str, float]:
    """Return the valid recommendations; invalid ones are ignored, as the model can be served without them."""
    low = {"temperature": 0.0, "top_k": -1.0, "min_p": 0.0}
    high = {"top_p": 1.0, "min_p": 1.0}
    kept = {}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        least = low.get(name, math.ulp(0.0))
        if least <= value <= high.get(name, 1e6) and (name != "top_k" or value == int(value)):
            kept[name] = int(value) if name == "top_k" else float(value)
    return kept
