"""Clients run in the environments that install.py creates."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from clients.install import command, installed

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run_client(name: str, arguments: list[str], folder: Path, environment: dict[str, str] | None = None,
               seconds: float = 300) -> str:
    """Run a client and return its output; skip the test if it is not installed, fail with its output if it fails."""
    if not installed(name):
        pytest.skip(f"{name} is not installed; `python tests/clients/install.py {name}` does it")
    # The environment of the tests must not influence the client's.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own = {"HF_HOME": str(folder / "huggingface"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(command(name)), *arguments], cwd=folder, env=inherited | own | (environment or {}),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=seconds, check=False)
    assert done.returncode == 0, f"{name} ended with status {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout
