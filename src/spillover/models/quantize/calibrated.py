"""Calibrated copies of models in the model cache, for `--quantization` with `--calibrate`: made once, then loaded."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.models.fingerprint import weights_digest
from spillover.models.hub.default_model import Progress
from spillover.models.hub.store import make
from spillover.models.quantize.quantize import QuantizeOptions, quantize

VERSION = 1  # version of the method: another one makes other copies


def calibrated_copy(source: Path, kind: str, calibration: Path, device: str, budget: int,
                    progress: Progress | None = None) -> Path:
    """Return the folder of a model in the format `kind`, calibrated on a text. It is made if the model cache has none
    for these weights and this text, within `budget` bytes of host memory."""
    try:
        text = calibration.read_bytes()
    except OSError as error:
        raise SpilloverError(f"cannot read --calibrate '{calibration}': {error.strerror}") from error
    parts = (str(VERSION).encode(), kind.encode(), weights_digest(source), text)
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=4).hexdigest()
    model = re.sub(r"[^A-Za-z0-9._-]", "-", source.resolve().name.removesuffix(".gguf")).lstrip("._-") or "model"

    def write(folder: Path) -> None:
        options = QuantizeOptions(kind, calibration=calibration, device=device)
        quantize(source, folder, options, budget=budget, progress=progress)

    return make(f"{model}-{kind}-{digest}", write, progress)
