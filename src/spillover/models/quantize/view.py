"""A view of a checkpoint as if it were stored quantised: written by `spill quantize`, loaded by --quantization."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillover.errors import CheckpointError, SpilloverError
from spillover.kernels.fields import Field
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.gguf_codes import Codes
from spillover.kernels.quantize import Quantized
from spillover.models.checkpoint import Checkpoint, open_checkpoint
from spillover.models.quantize.scheme import Scheme, make_scheme
from spillover.models.registry import read_architecture
from spillover.models.weight_specs import WeightSpec, WeightSpecs

HALVES = ("bfloat16", "float16")


class QuantizedView(Checkpoint):
    """A compressed-tensors checkpoint whose tensors are computed when read, all tensors of a matrix together."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, specs: WeightSpecs,
                 quantize: Callable[[str], Quantized] | None = None, device: torch.device | None = None) -> None:
        """Make the view. `specs`: of the unquantised model. `quantize` returns the codes of a matrix by its name in the
        checkpoint; None: matrices are rounded without calibration, on `device`."""
        self.path, self.scheme = checkpoint.path, scheme
        self.config = quantized_config(checkpoint.config, scheme)
        self._source = checkpoint
        self._quantize = quantize or (lambda name: scheme.round(checkpoint.read(name).to(device or "cpu")))
        self._plain = checkpoint.names()
        self._made: dict[str, tuple[Field, str]] = {}  # by tensor name: its field and its matrix
        self._fields: dict[str, list[Field]] = {}  # fields of each quantised matrix
        for name, _ in matrices(specs, scheme):
            if name not in self._plain:
                raise CheckpointError(f"{self.path} has no tensor '{name}', without which it cannot be quantised")
            self._plain.remove(name)
            rows, columns = checkpoint.shape(name)
            self._fields[name] = scheme.fields(name.removesuffix(".weight"), rows, columns)
            self._made |= {field.name: (field, name) for field in self._fields[name]}
        self._last: dict[str, Tensor] = {}  # tensors of the matrix read last, by name

    def names(self) -> set[str]:
        return self._plain | set(self._made)

    def stored(self, names: Iterable[str]) -> list[str]:
        """Return the names of the tensors that replace these in the quantised checkpoint, layer by layer."""
        return [stored for name in sorted(names, key=_place)
                for stored in ([field.name for field in self._fields[name]] if name in self._fields else [name])]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._made[name][0].shape if name in self._made else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        made = self._made.get(name)
        stored = self._source.dtype(name) if made is None else torch.float32
        if not stored.is_floating_point:
            return stored
        wanted: torch.dtype = getattr(torch, self.scheme.dtype if made is None else made[0].dtype)
        return wanted

    def file(self, name: str) -> Path:
        return self._source.file(self._made[name][1] if name in self._made else name)

    def read(self, name: str, row: int | None = None) -> Tensor:
        if name not in self._made:
            return self._source.read(name, row).to(self.dtype(name))
        if name not in self._last:
            matrix = self._made[name][1]
            tensors = self.scheme.stored(self._quantize(matrix))
            self._last = {field.name: tensor.cpu() for field, tensor in zip(self._fields[matrix], tensors, strict=True)}
        whole = self._last[name]
        return (whole if row is None else whole[row]).clone()

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        if name in self._made:
            return self.read(name)[index]
        return self._source.read_part(name, index).to(self.dtype(name))

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        return self._source.read_codes(name, rows)

    def close(self) -> None:
        self._source.close()


def open_quantized(path: Path, scheme: Scheme, device: torch.device) -> QuantizedView:
    """Open an unquantised checkpoint as a view quantised by `scheme`."""
    checkpoint = open_checkpoint(path)
    arch, config = read_architecture(checkpoint.config, path)
    return QuantizedView(checkpoint, scheme, arch.weight_specs(config), device=device)


def choose_scheme(kind: str, config: Mapping[str, Any], path: Path, specs: WeightSpecs, group: int | None = None,
                  ignored: Sequence[str] = (), dtype: str = "auto") -> Scheme:
    """Make the scheme for an unquantised model; `dtype`: "auto" is the model's type if it has 16 bits, otherwise
    bfloat16."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "a quantisation")
        raise SpilloverError(f"{path} holds weights quantised with {method} already; quantise the unquantised model")
    if dtype == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        dtype = own if own in HALVES else HALVES[0]
    return make_scheme(kind, matrices(specs), group, ignored, dtype)


def quantized_config(config: Mapping[str, Any], scheme: Scheme) -> dict[str, Any]:
    """Return a checkpoint's config after quantisation."""
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "codes")}
    return {**kept, "dtype": scheme.dtype, "quantization_config": scheme.config()}


def matrices(specs: WeightSpecs, scheme: Scheme | None = None) -> Iterator[tuple[str, int]]:
    """Yield the name and number of columns of every matrix of the layers; without those that `scheme` ignores."""
    for part, listed in specs.items():
        for spec in listed if part.startswith("layers.") else ():
            for name in matrix_names(spec):
                if scheme is None or not scheme.ignores(name.removesuffix(".weight")):
                    yield name, spec.shape[-1]


def matrix_names(spec: WeightSpec) -> list[str]:
    """List the matrices of a linear, or of all experts of a stack, in the order of their rows; empty for a router, and
    for a tensor that is not a linear."""
    if spec.format != DENSE or spec.name == "router":
        return []
    source = spec.sources[0]
    if spec.experts and not source.per_expert:
        raise SpilloverError(f"experts that are stored as one tensor, as {source.names[0]} is, cannot be quantised; "
                             "mixtures with a tensor per expert can")
    return [name.format(expert=expert) for expert in range(spec.experts or 1) for name in source.names]


def _place(name: str) -> tuple[int, str]:
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return int(layer[1]) if layer else -1, name
