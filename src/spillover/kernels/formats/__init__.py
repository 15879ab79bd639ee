"""Weight formats, one a file: a new one is a file here, found by itself, and a test. See base.WeightFormat."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
