"""Where this machine keeps what is fetched or made once: models, kernels, tokenizers."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the folder, SPILLOVER_CACHE or one of the user's own."""
    return Path(os.environ.get("SPILLOVER_CACHE") or "~/.cache/spillover").expanduser()
