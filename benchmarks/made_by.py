"""The origin of a benchmark's result, for its JSON file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import Any

from spillover.bench.provenance import provenance
from spillover.plan.hardware import probe


def made_by() -> dict[str, Any]:
    """Return the command, the code, the versions and the machine."""
    return provenance(asdict(probe())) | {"command": shlex.join(["python", *sys.argv])}
