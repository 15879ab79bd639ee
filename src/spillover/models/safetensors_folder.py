"""A model folder in the layout of the Hugging Face hub: config.json and one or several safetensors files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from spillover.errors import CheckpointError, short_repr
from spillover.models.config import METHODS, MOST, named, token_ids
from spillover.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spillover.kernels.formats.gguf_codes import Codes

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
          "BOOL": 1}  # bytes per value
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
               "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
# Files in which older tools store the quantisation config, and its default quant_method.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        _check_quantization(self.config.get("quantization_config"), path / "config.json")
        self._entries = _read_entries(path)

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, TORCH_NAMES[self._entry(name).dtype])
        return found

    def file(self, name: str) -> Path:
        return self._entry(name).file

    def read(self, name: str, row: int | None = None) -> Tensor:
        return self.read_part(name, () if row is None else (row,))

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        file = self._entry(name).file
        try:
            # safe_open returns views of a mapped file; cloning allows it to be unmapped at once.
            with safe_open(file, framework="pt") as tensors:
                view = tensors.get_slice(name)[index] if index else tensors.get_tensor(name)
                return view.clone()  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read ({error})") from error

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        raise CheckpointError(f"{self._entry(name).file}: tensor {name} is not stored in codes")

    def close(self) -> None:
        """Do nothing, as no file is kept open between reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, and add the ids that end a generation as "generation_eos_token_id"."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a model folder")
    config = read_json(folder / "config.json")
    if not config.get("quantization_config"):
        config |= _quantization_beside(folder, config)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    named = generation if eos is not None else folder / "config.json"
    eos = config.get("eos_token_id") if eos is None else eos
    if eos is not None:
        config["generation_eos_token_id"] = eos_ids(eos, named)
    return config


def _quantization_beside(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the quantisation config under its current key, if a folder has it elsewhere."""
    older = config.get("compression_config")
    if isinstance(older, dict) and older:
        return {"quantization_config": {"quant_method": "compressed-tensors", **older}}
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            return {"quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return {}


def _check_quantization(quantization: object, file: Path) -> None:
    if not quantization:
        return
    from spillover.kernels.formats.base import registered  # imports torch

    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if registered(method) is None:
        raise CheckpointError(f"{file}: weights quantised with {short_repr(method)} are not supported, only those of "
                              f"{', '.join(METHODS)} and mxfp4; use another quantisation, the model's bfloat16 or "
                              "float16 safetensors, or a GGUF file")


def eos_ids(value: object, file: Path) -> list[int]:
    """Return the ids from a file's value: one id or a list of them."""
    return list(token_ids(value, "eos_token_id", file))


def read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_HEADER:
            raise CheckpointError(f"{file} has more than {MAX_HEADER:,} bytes, which no such file needs")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def _read_entries(folder: Path) -> dict[str, _Entry]:
    if not (folder / INDEX).is_file():
        return _read_header(_single_file(folder))
    shard_of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{folder / INDEX} lists no tensors under 'weight_map'")
    for shard in shard_of.values():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\0" in shard:
            raise CheckpointError(f"{folder / INDEX}: {short_repr(shard)} under 'weight_map' is not the name of a "
                                  "safetensors file in this folder")
    shards: dict[str, dict[str, _Entry]] = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder} lacks {shard}, which {INDEX} lists; download the model again")
        shards[shard] = _read_header(folder / shard)
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{folder / shard} has no tensor {named(name)}, though {INDEX} says so")
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _single_file(folder: Path) -> Path:
    whole = folder / "model.safetensors"
    if whole.is_file():
        return whole
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder} has {len(files)} safetensors files but no {INDEX} that says which tensor is "
                              "in which; download the model again")
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(f"{folder} has its weights only as pytorch_model.bin, which can run code when loaded; "
                              "convert it to safetensors (load it with transformers and call save_pretrained)")
    raise CheckpointError(f"{folder} has a config.json but no safetensors file")


def _read_header(file: Path) -> dict[str, _Entry]:
    """Read names, types and shapes from the header only; check that the file is not shorter than the header states."""
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > MAX_HEADER:
                raise CheckpointError(f"{file} has a corrupt header; it is not a safetensors file")
            if size < 8 + length:
                raise _truncated(file, size, 8 + length)
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a corrupt header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a corrupt header (it is not a JSON object)")
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        entries[name], end = _read_entry(file, name, entry)
        if size < 8 + length + end:
            raise _truncated(file, size, 8 + length + end)
    return entries


def _read_entry(file: Path, name: str, entry: object) -> tuple[_Entry, int]:
    """Return the entry of one tensor in a header, and the end offset of its bytes."""
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{file} has a corrupt header (tensor {named(name)} {what})")

    if not isinstance(entry, dict):
        raise wrong(f"is {short_repr(entry)}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise wrong(f"has type {short_repr(dtype)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {named(name)} has type {named(dtype)}, which is not supported; use the "
                              "model's bfloat16 or float16 safetensors")
    if not isinstance(shape, list) or any(type(size) is not int or not 0 <= size <= MOST for size in shape):
        raise wrong(f"has shape {short_repr(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(place) is not int for place in offsets):
        raise wrong(f"has data_offsets {short_repr(offsets)}")
    begin, end = offsets
    if begin < 0 or end - begin != math.prod(shape) * DTYPES[dtype]:
        raise wrong(f"has data_offsets {short_repr(offsets)}, which do not fit {dtype} of shape {short_repr(shape)}")
    return _Entry(file, dtype, tuple(shape)), end


def _truncated(file: Path, size: int, expected: int) -> CheckpointError:
    return CheckpointError(f"{file} is truncated: {size:,} bytes ({format_bytes(size)}) of at least {expected:,}; "
                           "download it again")
