"""A tokenizer for random weights, in which every token that a model may choose is a text of its own.

Random weights choose any token. One that has no text would reach a client only with the next that has: times of tokens
would be those of some of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from spillover.cache import cache_root
from spillover.course.week import course_folder
from spillover.lab.engines.shapes import shapes

BASE = course_folder() / "week14" / "tokenizer"  # letters, pairs of them, and bytes


def random_tokenizer(shape: str) -> Path:
    """Return the folder of a tokenizer as large as the vocabulary of a shape (`shapes()` of the lab); it is written
    once."""
    size = json.loads((shapes()[shape] / "config.json").read_text())["vocab_size"]
    folder = cache_root() / "tokenizers" / f"random-{size}"
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(BASE / "tokenizer_config.json", folder)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # who finds tokenizer.json finds all of it
            whole = Path(made) / "tokenizer.json"
            whole.write_text(json.dumps(_extended(size)))
            os.replace(whole, folder / whole.name)
    return folder


def _extended(size: int) -> dict[str, Any]:
    """Return the small tokenizer with a number for each further token. A word that is a token is never split, so that
    text which a model wrote has as many tokens when it comes back."""
    document: dict[str, Any] = json.loads((BASE / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"Ġ{token}": token for token in range(len(vocabulary), size)}
    document["model"]["ignore_merges"] = True
    return document
