"""Weight formats, one per file: a new one is a file here, imported automatically, and a test. See base.WeightFormat."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
