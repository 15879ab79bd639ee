"""Writes a checkpoint as a Hugging Face folder: safetensors, configs, tokenizer and chat template.

Tensors are copied one at a time. A folder has a config.json only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spillover.errors import SpilloverError
from spillover.models.checkpoint import Checkpoint, open_checkpoint
from spillover.models.fingerprint import weights_digest
from spillover.models.hub.default_model import Progress
from spillover.models.hub.store import models_folder
from spillover.models.loader import checkpoint_tensors
from spillover.models.registry import read_architecture
from spillover.models.safetensors_folder import DTYPES, INDEX, TORCH_NAMES
from spillover.models.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer
from spillover.units import format_bytes

SHARD_NBYTES = 5_000_000_000
TYPES = ("auto", "float32", "bfloat16", "float16")
OWN_KEYS = ("generation_eos_token_id", "codes")  # keys of Checkpoint.config that are not part of config.json
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json", "vocab.json",
                   "merges.txt")
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): stored for stored, name in TORCH_NAMES.items()}


def export(source: Path, target: Path, dtype: str = "auto", shard_nbytes: int = SHARD_NBYTES, force: bool = False,
           progress: Progress | None = None) -> Path:
    """Write `source` to the folder `target`. `dtype`: of floating-point tensors; "auto" keeps the file's types, and
    dequantises GGUF codes to float32."""
    if dtype not in TYPES:
        raise SpilloverError(f"--dtype {dtype} cannot be exported; there are {', '.join(TYPES)}")
    check_target(source, target, force)
    with open_checkpoint(source) as checkpoint:
        if checkpoint.config.get("quantization_config") and dtype != "auto":
            method = checkpoint.config["quantization_config"]["quant_method"]
            raise SpilloverError(f"{source} holds weights quantised with {method}, which are exported as they are; "
                                 "leave out --dtype")
        return write_folder(checkpoint, tensor_names(checkpoint), target, None if dtype == "auto" else dtype,
                            shard_nbytes, f"Exporting {source.name}", progress)


def check_target(source: Path, target: Path, force: bool) -> None:
    """Refuse a folder that must not be written to; `force`: allow one with a model, which is replaced."""
    if target.exists() and not target.is_dir():
        raise SpilloverError(f"{target} is a file; name a folder to export to")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise SpilloverError(f"{target} is not empty; name another folder, or add --force to replace the model in it")
    if target.is_dir() and source.is_dir() and target.samefile(source):
        raise SpilloverError(f"{target} is the model itself; name another folder")


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """List the tensors to write: all tensors of a folder, or those tensors of a GGUF file that the model uses."""
    if checkpoint.path.is_dir():
        return sorted(checkpoint.names())
    arch, parsed = read_architecture(checkpoint.config, checkpoint.path)
    return checkpoint_tensors(checkpoint, parsed, arch.weight_specs(parsed))


def write_folder(checkpoint: Checkpoint, names: Sequence[str], target: Path, dtype: str | None, shard_nbytes: int,
                 doing: str, progress: Progress | None) -> Path:
    """Write these tensors of a checkpoint, in this order, with its config and tokenizer. `dtype`: of floating-point
    tensors; None: unchanged; `doing`: the text of the progress bar."""
    source = checkpoint.path
    config = {key: value for key, value in checkpoint.config.items() if key not in OWN_KEYS}
    _, parsed = read_architecture(checkpoint.config, source)
    config["dtype"] = dtype or parsed.dtype
    config.pop("torch_dtype", None)
    with _assembling(target) as folder:
        _write_weights(checkpoint, names, folder, getattr(torch, dtype) if dtype else None, shard_nbytes, doing,
                       progress)
        _write_json(folder / "config.json", {key: value for key, value in config.items() if value is not None})
        if source.is_dir():
            for file in {file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}:
                shutil.copy2(file, folder / file.name)
        else:
            _write_tokenizer(load_tokenizer(source), folder, parsed.max_position, config)
    return target


def cached_export(source: Path, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """Return a cached export of a checkpoint, made on first use; stored next to the model cache by weights' digest."""
    name = f"{source.name.removesuffix('.gguf')}-{dtype}-{weights_digest(source).hex()[:16]}"
    target = models_folder().with_name("exports") / name
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        export(source, target, dtype, force=True, progress=progress)
    return target


@contextmanager
def _assembling(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the target; its files are moved to the target if the block succeeds."""
    folder = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True)
        yield folder
        target.mkdir(parents=True, exist_ok=True)
        for stale in (*target.glob("*.safetensors"), target / INDEX):
            stale.unlink(missing_ok=True)
        # config.json is moved last: a folder that has it is complete.
        for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, target / file.name)
    except OSError as error:
        raise SpilloverError(f"cannot export to {target}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_weights(checkpoint: Checkpoint, names: Sequence[str], folder: Path, dtype: torch.dtype | None,
                   shard_nbytes: int, doing: str, progress: Progress | None) -> None:
    """Write weights in the order of `names`, split into files of at most `shard_nbytes`."""
    kinds = {name: _stored_as(checkpoint, name, dtype) for name in names}
    sizes = {name: math.prod(checkpoint.shape(name)) * DTYPES[_NAMES[kinds[name]]] for name in names}
    shards: list[list[str]] = [[]]
    for name in names:
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + sizes[name] > shard_nbytes:
            shards.append([])
        shards[-1].append(name)
    total, done = sum(sizes.values()), 0
    weight_map: dict[str, str] = {}
    free = shutil.disk_usage(folder).free
    if total > free:
        raise SpilloverError(f"the export needs {format_bytes(total)}, and {folder.parent} has {format_bytes(free)} "
                             "free")
    for index, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in shard:
            header[name] = {"dtype": _NAMES[kinds[name]], "shape": list(checkpoint.shape(name)),
                            "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / file).open("wb") as sink:
            sink.write(struct.pack("<Q", len(encoded)) + encoded)
            for name in shard:
                tensor = checkpoint.read(name).to(kinds[name]).contiguous()
                sink.write(tensor.view(-1).view(torch.uint8).numpy().data)
                done += sizes[name]
                if progress is not None:
                    progress(doing, done, total)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _stored_as(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type that a tensor is written in."""
    found = checkpoint.dtype(name)
    return found if dtype is None or not found.is_floating_point or found.itemsize == 1 else dtype


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, max_position: int, config: dict[str, Any]) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_position,
                                "clean_up_tokenization_spaces": False}
    settings |= {role: token for role in SPECIAL_TOKENS if (token := tokenizer.special_tokens.get(role)) is not None}
    templates = tokenizer.chat_templates
    if templates:
        settings["chat_template"] = (templates["default"] if list(templates) == ["default"] else
                                     [{"name": name, "template": text} for name, text in templates.items()])
    _write_json(folder / "tokenizer_config.json", settings)
    generation: dict[str, Any] = {"eos_token_id": list(tokenizer.eos_token_ids)}
    generation |= {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    _write_json(folder / "generation_config.json", generation)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
