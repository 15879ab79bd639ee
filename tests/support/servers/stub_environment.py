"""Environments with a stub in place of vLLM, SGLang or llama.cpp, so that all code of the adapters runs."""

from __future__ import annotations

import sys
from pathlib import Path

STUB = Path(__file__).with_name("stub_server.py")


def stub_python(folder: Path, module: str = "", program: str = "") -> str:
    """Return the interpreter of a new environment that contains the stub server as a module of this name to run, and as
    a program."""
    packages, programs = folder / "packages", folder / "bin"
    packages.mkdir(parents=True)
    programs.mkdir()
    if module:
        parent, _, last = module.rpartition(".")
        package = packages / parent.replace(".", "/")
        package.mkdir(parents=True, exist_ok=True)
        (package / f"{last}.py").write_text(f"import runpy; runpy.run_path({str(STUB)!r}, run_name='__main__')\n")
    python = programs / "python"
    _script(python, f'PYTHONPATH={packages} exec {sys.executable} "$@"')
    if program:
        _script(programs / program, f'exec {sys.executable} {STUB} "$@"')
    return str(python)


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
