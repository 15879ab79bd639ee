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
HOST_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # numbered so in native/moe/mixture.h

_registered: dict[str, type[WeightFormat]] = {}
_Format = TypeVar("_Format", bound="WeightFormat")


@dataclass(frozen=True)
class Target:
    """Where a weight is made: the engine's type and the device."""

    dtype: str
    device: torch.device
    arena: Arena | None = None  # where panels that stay are to lie


class TensorReader(Protocol):
    """A reader of a checkpoint's tensors of one linear; checks their types and shapes."""

    matrices: Sequence[tuple[str, int]]  # that are fused into it: name where it is not quantised, rows

    def has(self, name: str) -> bool: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def wrong(self, name: str, what: str) -> CheckpointError:
        """Return the refusal of a tensor, which names its file."""

    def read(self, tensor: Field) -> Tensor: ...

    def read_codes(self, name: str) -> Codes: ...


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear's weight, or a stack of experts' weights, in its format."""

    format: WeightFormat
    shape: LinearShape  # of one expert's, where it is a stack
    tensors: tuple[Tensor, ...]  # as `format.fields` lists them, with [experts] in front where it is a stack

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
    """One way to keep and to multiply a linear's weight [out, in]. Instances hold parameters only, never tensors."""

    quant_method: str  # of config.json's quantization_config, or the name where no checkpoint has it
    experts_only: bool = False  # in checkpoints; their other linears are dense
    keeps_linears: bool = True  # False: in codes only as experts; other linears are dequantised when they are loaded
    loads_stacks: bool = False  # `load` takes a stack of experts [experts, ...] that is one tensor in the checkpoint
    native_codes: bool | None = None  # panels that native/block.cpp takes, in codes; False: of float32; None: neither

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def experts(self) -> GroupedGemm | None:
        """Return how a mixture multiplies with stacks on a CUDA device; None: it cannot."""
        return None

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any]) -> Self:
        """Build the format from config.json's quantization_config; raises CheckpointError if that is not supported."""
        return cls()

    @abstractmethod
    def fields(self, shape: LinearShape, dtype: str) -> tuple[Field, ...]:
        """List the tensors of one linear as it is kept, where the engine computes in `dtype`."""

    def stored(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """List the checkpoint's tensors of one matrix, which is `name` where it is not quantised; as many as fields."""
        return (Field(name, FLOATING, (rows, columns)),)

    def readable(self, name: str, rows: int, columns: int) -> tuple[Field, ...]:
        """List all of the checkpoint's tensors of one matrix that `load` may read, where there are more than `stored`
        needs: a rank of a sharded model reads a part of each."""
        return self.stored(name, rows, columns)

    @abstractmethod
    def dequantize(self, w: Linear, dtype: torch.dtype) -> Tensor:
        """Make [out, in] numbers of one linear; numbers that are kept as such keep their type."""

    def load(self, reader: TensorReader, shape: LinearShape, target: Target) -> tuple[Tensor, ...]:
        """Read one linear; here its matrices' tensors below each other, in the types of `fields`."""
        stored = [self.stored(name, rows, shape.in_features) for name, rows in reader.matrices]
        return tuple(self._below_each_other(reader, tensors, getattr(torch, field.dtype), target.device) for
                     tensors, field in zip(zip(*stored, strict=True), self.fields(shape, target.dtype), strict=True))

    def read(self, reader: TensorReader, tensor: Field) -> Tensor:
        """Read one tensor of a matrix."""
        return reader.read(tensor)

    def _below_each_other(self, reader: TensorReader, tensors: Sequence[Field], dtype: torch.dtype,
                          device: torch.device) -> Tensor:
        if len(tensors) == 1:  # what is read is the reader's own, so one alone needs no copy
            return self.read(reader, tensors[0]).to(device=device, dtype=dtype).contiguous()
        rows = [tensor.shape[0] for tensor in tensors]
        whole = torch.empty((sum(rows), *tensors[0].shape[1:]), dtype=dtype, device=device)
        for tensor, part in zip(tensors, whole.split_with_sizes(rows), strict=True):
            part.copy_(self.read(reader, tensor))
        return whole

    def dummy(self, shape: LinearShape, experts: int, target: Target, random: torch.Generator) -> tuple[Tensor, ...]:
        """Make up a linear, or a stack of `experts` unless that is 0."""
        stack = (experts,) if experts else ()
        return tuple(self.dummy_tensor(replace(field, shape=(*stack, *field.shape)), target.device, random)
                     for field in self.fields(shape, target.dtype))

    def dummy_tensor(self, field: Field, device: torch.device, random: torch.Generator) -> Tensor:
        made = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=device)
        return made.normal_(std=DUMMY_STD, generator=random)

    def linear(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] -> [T, out]; here by the kernels that unquantised weights have, in their order of sums."""
        from spillover.kernels.formats.packed import pack

        dense = pack(self.dequantize(w, x.dtype))
        return dense.format.linear(x, dense, bias)

    def scratch_bytes(self, shape: LinearShape, dtype: str) -> int:
        """Return the bytes that `linear` takes besides its result; here for the numbers, as they are and in panels."""
        return 2 * shape.out_features * shape.in_features * ITEMSIZE[dtype]

    def linear_silu(self, x: Tensor, w: Linear, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] -> silu(gate) * up [T, out / 2], where the gate's rows come first; for a CUDA device."""
        from spillover.kernels.triton.activation import silu_and_mul

        return silu_and_mul(self.linear(x, w, bias))

    def add_norm_linear(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, w: Linear,
                        bias: Tensor | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
        """Add, norm and multiply, x and residual [T, in] -> (rms_norm(x + residual) multiplied, x + residual), for a
        CUDA device; `gated`: as `linear_silu`."""
        from spillover.kernels.triton.norm import add_rms_norm

        x, residual = add_rms_norm(x, residual, norm, eps, begin_early=not gated or x.shape[0] == 1)
        return (self.linear_silu if gated else self.linear)(x, w, bias), residual

    def embedding(self, ids: Tensor, w: Linear, dtype: torch.dtype = torch.float32) -> Tensor:
        """Look up ids [T] -> [T, in]; numbers that are kept as such keep their type."""
        return F.embedding(ids, self.dequantize(w, dtype))

    def for_linear(self, name: str) -> WeightFormat:
        """Choose how a linear is kept whose name is this in a checkpoint of this format."""
        from spillover.kernels.formats.dense import DENSE

        return self if ".layers." in name else DENSE

    def for_experts(self, names: Sequence[str]) -> WeightFormat:
        """Choose how a stack of experts is kept whose matrices have these names in a checkpoint of this format."""
        return self

    def stored_as(self, module: str) -> WeightFormat:
        """Return the format that a checkpoint of this one has a module's matrix in."""
        return self

    def packed(self, width: int, shape: LinearShape) -> WeightFormat:
        """Choose how a linear of this shape is kept for the native kernels, in panels of `width` channels if it is
        float32."""
        return self

    def on_cuda(self, shape: LinearShape) -> WeightFormat:
        """Choose how a linear of this shape is kept on a CUDA device."""
        return self

    def experts_on_cuda(self, shape: LinearShape) -> WeightFormat | None:
        """Choose how a stack of linears of this shape is kept on a CUDA device; None: it has no grouped product."""
        return None if self.experts is None else self

    def batch_invariant(self) -> WeightFormat:
        """Choose how it is kept where a row's bits may not depend on the rows beside it, on a CUDA device."""
        from spillover.kernels.formats.batch_invariant import BatchInvariant

        return BatchInvariant(self)

    def prepare(self, linears: Sequence[tuple[LinearShape, bool]], target: Target, most_rows: int) -> None:  # noqa: B027
        """Compile ahead what products of up to `most_rows` rows with linears of these shapes use; with each, whether
        it has a bias."""

    def host_code(self, dtype: torch.dtype) -> int | None:
        """Number the format as native/moe/mixture.h does, beside biases of `dtype`; None: it knows no such one."""
        return None


def register(format_class: type[_Format]) -> type[_Format]:
    """Let checkpoints name a format, by its quant_method."""
    _registered[format_class.quant_method] = format_class
    return format_class


def registered(quant_method: object) -> type[WeightFormat] | None:
    """Find the class that was registered under a name; None: there is none."""
    return _registered.get(quant_method) if isinstance(quant_method, str) else None


def make_format(quant_method: str, quantization: Mapping[str, Any]) -> WeightFormat:
    """Build a registered format; `quantization`: as config.json has it, empty where it has none."""
    found = _registered[quant_method]
    return found.from_config(quantization) if quantization else found()
