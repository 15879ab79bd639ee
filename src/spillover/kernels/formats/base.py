"""The contract of a weight format: which tensors a linear is kept as, how they are loaded, and how it is multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.arena import Arena
from spillover.kernels.fields import FLOATING, ITEMSIZE, Field, LinearShape
from spillover.kernels.formats.grouped_gemm import GroupedGemm

if TYPE_CHECKING:
    from spillover.kernels.formats.gguf_codes import Codes

DUMMY_STD = 0.02
HOST_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of their numbers in native/moe/mixture.h

_registered: dict[str, type[WeightFormat]] = {}
_Format = TypeVar("_Format", bound="WeightFormat")


@dataclass(frozen=True)
class Target:
    """The destination of a weight: the engine's compute type and the device."""

    dtype: str
    device: torch.device
    arena: Arena | None = None  # allocator of panels that stay in memory; None: torch allocates them


class TensorReader(Protocol):
    """A reader of a checkpoint's tensors of one linear, which checks their types and shapes."""

    matrices: Sequence[tuple[str, int]]  # fused matrices: name of the unquantised weight, number of rows

    def has(self, name: str) -> bool: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor_error(self, name: str, what: str) -> CheckpointError:
        """Return an error about a tensor, with the name of its file."""

    def read(self, tensor: Field) -> Tensor: ...

    def read_codes(self, name: str) -> Codes: ...


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear's weight, or a stack of experts' weights, in its format."""

    format: WeightFormat
    shape: LinearShape  # shape of one expert's weight if it is a stack
    tensors: tuple[Tensor, ...]  # in the order of `format.fields`; with a leading [experts] dimension if it is a stack

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def expert(self, index: int) -> Linear:
        """Return one linear of a stack, as a view."""
        return Linear(self.format, self.shape, tuple(tensor[index] for tensor in self.tensors))

    def map(self, change: Callable[[Tensor], Tensor]) -> Linear:
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))


Weight = Tensor | Linear  # norms, biases and sinks are tensors


class WeightFormat(ABC):
    """A way to keep and multiply a linear's weight [out, in]. Instances hold parameters only, never tensors."""

    quant_method: str  # name in config.json's quantization_config, or any other if checkpoints cannot have this format
    experts_only: bool = False  # whether checkpoints quantise experts only; other linears are dense
    keeps_linears: bool = True  # False: only experts stay in codes; other linears are dequantised at loading
    ordered: bool = False  # whether columns are stored in activation order
    loads_stacks: bool = False  # whether `load` reads stacks [experts, ...] that are one tensor in the checkpoint
    begins_early: bool = False  # whether CUDA products begin before the previous kernel has completed
    panel_kind: int | None = None  # kind of panels that native/products.h multiplies with: see packed.py; None: none

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def experts(self) -> GroupedGemm | None:
        """Return how a mixture multiplies by stacks on a CUDA device; None if it cannot."""
        return None

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        """Build the format from config.json's quantization_config; raise CheckpointError if that is not supported."""
        return cls()

    @abstractmethod
    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        """Return the tensors in which one linear is kept if the engine computes in `dtype`."""

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """Return the checkpoint's tensors of one matrix, one for each of `fields`; `name`: the unquantised weight's."""
        return (Field(name, FLOATING, (rows, columns)),)

    def readable(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """Return all of the checkpoint's tensors of one matrix that `load` may read, which can be more than `stored`: a
        rank of a sharded model reads a part of each."""
        return self.stored(name, rows, columns)

    @abstractmethod
    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        """Dequantise one linear to [out, in] of `dtype`; an unquantised weight keeps its type."""

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        """Read one linear; by default its matrices' tensors concatenated along rows, in the types of `fields`."""
        stored = [self.stored(name, rows, shape.in_features) for name, rows in reader.matrices]
        return tuple(self._concat_rows(reader, tensors, getattr(torch, field.dtype), target.device) for
                     tensors, field in zip(zip(*stored, strict=True), self.fields(shape, target.dtype), strict=True))

    def read(self, reader: TensorReader, tensor: Field) -> Tensor:
        """Read one tensor of a matrix."""
        return reader.read(tensor)

    def _concat_rows(self, reader: TensorReader, tensors: Sequence[Field], dtype: torch.dtype,
                     device: torch.device) -> Tensor:
        if len(tensors) == 1:  # a tensor that was read is not shared, so a single one needs no copy
            return self.read(reader, tensors[0]).to(device=device, dtype=dtype).contiguous()
        rows = [tensor.shape[0] for tensor in tensors]
        whole = torch.empty((sum(rows), *tensors[0].shape[1:]), dtype=dtype, device=device)
        for tensor, part in zip(tensors, whole.split_with_sizes(rows), strict=True):
            part.copy_(self.read(reader, tensor))
        return whole

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        """Return random tensors of a linear, or of a stack of `experts` unless that is 0."""
        stack = (experts,) if experts else ()
        return tuple(self.dummy_tensor(replace(field, shape=(*stack, *field.shape)), target.device, random)
                     for field in self.fields(shape, target.dtype))

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        made = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=device)
        return made.normal_(std=DUMMY_STD, generator=random)

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] -> [T, out]; by default with the kernels and the order of sums of unquantised weights."""
        from spillover.kernels.formats.packed import pack

        dense = pack(self.dequantize(w, x.dtype))
        return dense.format.linear(x, dense, bias)

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        """Return the bytes that `linear` needs besides its result; by default for the weight, plain and in panels."""
        return 2 * shape.out_features * shape.in_features * ITEMSIZE[dtype]

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] -> silu(gate) * up [T, out / 2], where the gate's rows come first; for a CUDA device."""
        from spillover.kernels.triton.activation import silu_and_mul

        return silu_and_mul(self.linear(x, w, bias))

    def add_norm_linear(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, w: Linear,
                        bias: Tensor | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
        """Add, norm and multiply, x and residual [T, in] -> (product of rms_norm(x + residual), x + residual), for a
        CUDA device; `gated`: as `linear_silu`."""
        from spillover.kernels.triton.norm import add_rms_norm, early_if_gated

        rows, width = x.shape
        early = not gated or (early_if_gated(rows, width) if self.begins_early else rows == 1)
        x, residual = add_rms_norm(x, residual, norm, eps, begin_early=early)
        return (self.linear_silu if gated else self.linear)(x, w, bias), residual

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        """Look up ids [T] -> [T, in] of `dtype`; an unquantised weight keeps its type."""
        return F.embedding(ids, self.dequantize(w, dtype))

    def for_linear(self, name: str) -> WeightFormat:
        """Return the format in which to keep the linear of this name in a checkpoint of this format."""
        from spillover.kernels.formats.dense import DENSE

        return self if ".layers." in name else DENSE

    def for_experts(self, names: Sequence[str]) -> WeightFormat:
        """Return the format in which to keep a stack of experts, whose matrices have these names in the checkpoint."""
        return self

    def stored_as(self, module: str) -> WeightFormat:
        """Return the format in which a checkpoint of this format stores a module's matrix."""
        return self

    def for_part(self, shape: LinearShape, columns: tuple[int, int] | None) -> WeightFormat:
        """Return the format in which a rank keeps its part of a matrix: of this shape, with the columns [start, stop),
        or with all of them. In the same format, a part that ends within a group is refused."""
        return self

    @property
    def dequantized_from(self) -> WeightFormat | None:
        """Return the checkpoint's format of weights that are dequantised when they are loaded; None if they are not."""
        return None

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        """Return the format in which to keep a linear of this shape for the native kernels: panels of `width` channels
        if it is float32."""
        return self

    def on_cuda(self, shape: LinearShape) -> WeightFormat:
        """Return the format in which to keep a linear of this shape on a CUDA device."""
        return self

    def experts_on_cuda(self, shape: LinearShape) -> WeightFormat | None:
        """Return the format in which to keep a stack of such linears on a CUDA device; None: no grouped product."""
        return None if self.experts is None else self

    def batch_invariant(self) -> WeightFormat:
        """Return the format for a CUDA device in which a row's bits do not depend on other rows of the batch."""
        from spillover.kernels.formats.batch_invariant import BatchInvariant

        return BatchInvariant(self)

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:  # noqa: B027
        """Compile the kernels for products of up to `most_rows` rows with linears of these shapes in advance; with each
        shape, whether there is a bias."""

    def host_code(self, dtype: torch.dtype) -> int | None:
        """Return the number of the format, with biases of `dtype`, in native/moe/mixture.h; None if it has none."""
        return None


def register(format_class: type[_Format]) -> type[_Format]:
    """Register a format, so that checkpoints can name it by its quant_method."""
    _registered[format_class.quant_method] = format_class
    return format_class


def registered(quant_method: object) -> type[WeightFormat] | None:
    """Return the class that was registered under a name; None if there is none."""
    return _registered.get(quant_method) if isinstance(quant_method, str) else None


def make_format(quant_method: str, quantization: Mapping[str, Any]) -> WeightFormat:
    """Build a registered format; `quantization`: quantization_config of config.json, empty if it has none."""
    found = _registered[quant_method]
    return found.from_config(quantization) if quantization else found()
