"""The cache folder for downloaded models, compiled kernels and tokenizers."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the cache folder: SPILLOVER_CACHE if it is set, otherwise ~/.cache/spillover."""
    return Path(os.environ.get("SPILLOVER_CACHE") or "~/.cache/spillover").expanduser()
