"""A tokenizer for random weights, in which nearly every token that a model may choose has its own text.

Special tokens and bytes that are parts of characters have none. Random weights choose any token, and one without text
would reach a client only with the next that has some, so that times of tokens would be those of some only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from spillover.cache import cache_root
from spillover.course.week import course_folder
from spillover.errors import SpilloverError
from spillover.lab.engines.shapes import shapes

BASE = course_folder() / "week14" / "tokenizer"  # its tokens are letters, pairs of them, and bytes


def random_tokenizer(shape: str) -> Path:
    """Return the folder of a tokenizer with the vocabulary size of a shape (`shapes()` of the lab); it is written only
    once."""
    size = json.loads((shapes()[shape] / "config.json").read_text())["vocab_size"]
    files = {"tokenizer_config.json": (BASE / "tokenizer_config.json").read_text(), "tokenizer.json": _extended(size)}
    digest = hashlib.blake2b("\0".join(files.values()).encode(), digest_size=6).hexdigest()
    folder = cache_root() / "tokenizers" / f"random-{size}-{digest}"
    if not (folder / "tokenizer.json").is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as made:
                for name, text in files.items():  # tokenizer.json last: if it exists, both files are complete
                    (Path(made) / name).write_text(text)
                    os.replace(Path(made) / name, folder / name)
        except OSError as error:
            raise SpilloverError(f"{folder} cannot be written ({error}); point SPILLOVER_CACHE at a folder that can "
                                 "be") from error
    return folder


@cache
def _extended(size: int) -> str:
    """Return the small tokenizer extended by a number for each further token. A word that is a token is never split, so
    that text written by the model has the same number of tokens when it is tokenised again."""
    document = json.loads((BASE / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"Ġ{token}": token for token in range(len(vocabulary), size)}
    document["model"]["ignore_merges"] = True
    return json.dumps(document)
