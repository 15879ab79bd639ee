"""Models as Hugging Face folders for vLLM and SGLang: a GGUF file is exported once, a folder is used as is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import lru_cache

from spillover.errors import SpilloverError
from spillover.lab.engines.base import Missing
from spillover.lab.engines.spillover import spill

EXPORT_SECONDS = 3600.0


def wants_export(model: str | None) -> bool:
    """Return whether a model must be exported first: the default model and GGUF files, not folders and hub ids."""
    return model is None or model.endswith(".gguf")


def model_argument(model: str | None, port: int) -> str:
    """Return the model argument of a server. Port 0 is for display only: nothing is exported."""
    if port or not wants_export(model):
        return hf_folder(model)
    return f"$(spill export {model or 'default'})"


@lru_cache(maxsize=16)
def hf_folder(model: str | None) -> str:
    """Return a folder or hub id with the same weights, exported by the same command that a user would run."""
    if not wants_export(model):
        return str(model)
    try:
        done = subprocess.run([*spill(sys.executable), "export", model or "default"], capture_output=True, text=True,
                              check=False, timeout=EXPORT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise SpilloverError(f"spill export {model or 'default'} took longer than {EXPORT_SECONDS:.0f} s") from error
    if done.returncode:
        message = re.sub(r"^spill: ", "", (done.stderr or done.stdout).strip())
        raise SpilloverError(f"{model or 'the default model'} cannot be exported to a Hugging Face folder: {message}")
    return done.stdout.strip().splitlines()[-1]


def absent(model: str | None) -> Missing | None:
    """Return why there will be no folder, as far as the path shows; nothing is exported or downloaded."""
    if model is None or re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None  # the default model, or a hub id, which its engine downloads
    if model.endswith(".gguf") and not os.path.isfile(model):
        return Missing(f"there is no file {model}", "name the GGUF file in 'model:'")
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        return Missing(f"{model} has no config.json, so it is not a Hugging Face folder",
                       "spill export MODEL DIR, and name DIR in 'model:'")
    return None
