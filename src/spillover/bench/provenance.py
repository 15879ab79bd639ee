"""Where a result came from: the command, the code, the versions and the machine."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("spillover", "torch", "numpy", "tokenizers", "transformers")


def provenance(hardware: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["spill", *sys.argv[1:]]),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "hardware": {name: value for name, value in hardware.items() if not name.startswith("cache_")},
    }


def commit() -> str | None:
    """Return the checkout's commit, with "-dirty" if tracked files differ from it; outside a checkout, as in a copy of
    its files, the value of SPILLOVER_COMMIT, or None."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10,
                                  check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    # An installed copy may be inside another project's repository: only a tracked file proves that it is a checkout.
    if head is None or not git("ls-files", Path(__file__).name):
        return os.environ.get("SPILLOVER_COMMIT")
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of those packages a result depends on that are installed."""
    found = {}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
