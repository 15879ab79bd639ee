"""The fingerprint of a model, independent of its folder: a digest that is part of the keys of stored KV.

Starting must not read the whole model for it, so samples are digested: every tensor's name, type and shape, small
tensors (norms, biases) whole, and 4 KiB of a large tensor at each of eight offsets from its first byte to its last.
Training changes all of a tensor and is detected. Not detected is an edit of a large tensor confined to bytes between
the samples, such as one token's row of the embedding; `full=True` reads every byte and detects all changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

import torch

from spillover.errors import CheckpointError
from spillover.models.checkpoint import open_checkpoint
from spillover.models.config import ModelConfig
from spillover.models.gguf.gguf_header import read_header
from spillover.models.hub.store import models_folder
from spillover.models.safetensors_folder import INDEX

VERSION = 1  # version of the digest's definition
DIGEST_BYTES = 32
SAMPLES, SAMPLE_BYTES = 8, 4096
WHOLE_BYTES = 2 * SAMPLES * SAMPLE_BYTES  # maximum size of tensors that are read whole
CHUNK_BYTES = 4 << 20
KEPT_BYTES = 1 << 20  # minimum bytes digested to cache a digest; smaller ones are recomputed


def model_fingerprint(path: Path, config: ModelConfig, load_format: str, *, dtype: str, device: str, seed: int,
                      full: bool = False) -> bytes:
    """Return a digest that is equal for the same model in another folder, and differs for any other model.

    `dtype`, `device` and `seed` are used for dummy weights only, whose values depend on them; `full` reads all bytes.
    """
    # Special token ids affect when generation ends, but not the KV.
    computed = replace(config, bos_token_id=None, eos_token_ids=())
    parts: list[Any] = [VERSION, load_format, computed]
    if load_format == "dummy":
        parts += [dtype, device, seed, torch.__version__]
    elif load_format != "null":
        parts.append(weights_digest(path, full).hex())
    return hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_BYTES).digest()


def weights_digest(path: Path, full: bool = False) -> bytes:
    """Return a digest of a checkpoint's tensors only. Cached in the model cache by the files' sizes and times."""
    files = [file.resolve() for file in _files(path)]
    key = [VERSION, full, *_states(files)]
    kept = _record(path, full)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(kept.read_text(encoding="utf-8"))
        if record["key"] == key:
            return bytes.fromhex(record["digest"])
    digest, count = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for tensor in sorted(_tensors(path), key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.kind, tensor.shape, tensor.nbytes, full]).encode())
        for chunk in _read(tensor, full):
            digest.update(chunk)
            count += len(chunk)
    if count >= KEPT_BYTES and [VERSION, full, *_states(files)] == key:  # files not written in the meantime
        _keep(kept, {"key": key, "digest": digest.hexdigest()})
    return digest.digest()


@dataclass(frozen=True)
class _Tensor:
    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int


def _tensors(path: Path) -> Iterable[_Tensor]:
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            names = checkpoint.names()
            files = sorted({checkpoint.file(name) for name in names})
        # A shard may hold tensors that the index does not list and that are never loaded.
        return [tensor for file in files for tensor in _safetensors(file) if tensor.name in names]
    return [_Tensor(tensor.name, tensor.kind.name, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
            for tensor in read_header(path).tensors.values()]


def _safetensors(file: Path) -> Iterator[_Tensor]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield _Tensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + begin, end - begin)


def _read(tensor: _Tensor, full: bool) -> Iterator[bytes]:
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            for place, size in _chunks(tensor.nbytes, full):
                chunk = os.pread(stream.fileno(), size, tensor.offset + place)
                if len(chunk) != size:
                    raise CheckpointError(f"{tensor.file} ends within tensor {tensor.name}; download it again")
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read ({error})") from error


def _chunks(nbytes: int, full: bool) -> list[tuple[int, int]]:
    """Return (offset, size) of the parts of a tensor to read."""
    if full or nbytes <= WHOLE_BYTES:
        return [(place, min(CHUNK_BYTES, nbytes - place)) for place in range(0, nbytes, CHUNK_BYTES)]
    return [((nbytes - SAMPLE_BYTES) * index // (SAMPLES - 1), SAMPLE_BYTES) for index in range(SAMPLES)]


def _files(path: Path) -> list[Path]:
    """Return the files that hold the weights, and the index if there is one."""
    if path.is_dir():
        return sorted(file for file in (*path.glob("*.safetensors"), path / INDEX) if file.is_file())
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    return [path] if split is None else sorted(path.parent.glob(f"{escape(split[1])}-*-of-{split[2]}.gguf"))


def _states(files: list[Path]) -> list[list[Any]]:
    """Return each file's path, size, mtime and ctime; ctime too, as copying may preserve mtime."""
    states = [(file, file.stat()) for file in files]
    return [[str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns] for file, state in states]


def _record(path: Path, full: bool) -> Path:
    name = hashlib.blake2b(f"{path.resolve()} {full}".encode(), digest_size=16).hexdigest()
    return models_folder() / ".fingerprints" / f"{name}.json"


def _keep(file: Path, record: dict[str, Any]) -> None:
    """Cache a digest; if the cache cannot be written, the next start only has to compute it again."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record), encoding="utf-8")
        os.replace(partial, file)
