"""A GGUF file as a checkpoint with Hugging Face's tensor names and conventions.

Tensors are read with plain reads, a few megabytes at a time, so that no mapped page of the file ever counts as this
process's memory. Quantised tensors are dequantised to float32, except gpt-oss's MXFP4 experts, which are returned as
stored, and tensors that are read with `read_codes`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.formats.gguf_codes import Codes
from spillover.models.gguf.gguf_codes import codes_of, has_codes
from spillover.models.gguf.gguf_config import experts_are_mxfp4, hf_config, is_mixtral
from spillover.models.gguf.gguf_header import GGUFTensor, read_header

CHUNK_NBYTES = 1 << 20  # quantised bytes per read; dequantising them takes about thirty times as much memory
MXFP4_GROUP = 32  # values that share a scale
_AS_STORED = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16,
              GGMLQuantizationType.BF16: torch.bfloat16}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
          "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
          "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True)
class _View:
    """One tensor under its HF name, computed when it is read."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    dtype: torch.dtype
    read_codes: Callable[[], Codes] | None = None  # None: it cannot be read as codes
    code_type: str = ""  # GGUF type of the codes; "" if it has none
    # Read rows [first, stop) only, as numbers and as codes; None: only the whole tensor can be read.
    read_rows: Callable[[int, int], Tensor] | None = None
    read_code_rows: Callable[[int, int], Codes] | None = None


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._tensors = header.tensors
        self._files = {file: os.open(file, os.O_RDONLY) for file in {tensor.file for tensor in self._tensors.values()}}
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="gguf")
        try:
            rope = self._tensors.get("rope_freqs.weight")
            if rope is not None and len(rope.shape) != 1:
                raise CheckpointError(f"{path}: tensor rope_freqs.weight has shape {list(rope.shape)}, not one "
                                      "dimension")
            self.config = hf_config(header, path, None if rope is None else self._load(rope).tolist())
            self._arch: str = header.metadata["general.architecture"]
            self._mixtral, self._mxfp4 = is_mixtral(header), experts_are_mxfp4(header)
            self._views = self._make_views()
            self.config["codes"] = {name: view.code_type for name, view in self._views.items() if view.code_type}
        except BaseException:
            self.close()
            raise

    def names(self) -> set[str]:
        return set(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._view(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._view(name).dtype

    def file(self, name: str) -> Path:
        return self.path

    def read(self, name: str, row: int | None = None) -> Tensor:
        whole = self._view(name).read()
        return whole if row is None else whole[row].clone()

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        view, first = self._view(name), index[0] if index else slice(None)
        if view.read_rows is None or not isinstance(first, slice) or first.start is None:
            return view.read()[index].clone()
        return view.read_rows(first.start, first.stop)[(slice(None), *index[1:])].clone()

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        view = self._view(name)
        if view.read_codes is None:
            raise CheckpointError(f"{self.path}: tensor {name} is not stored in codes")
        if rows is None:
            return view.read_codes()
        if view.read_code_rows is not None:
            return view.read_code_rows(*rows)
        return view.read_codes().map(lambda part: part[slice(*rows)].contiguous())

    def close(self) -> None:
        self._threads.shutdown()
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _view(self, name: str) -> _View:
        try:
            return self._views[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _make_views(self) -> dict[str, _View]:
        views = {hf: self._plain(self._tensors[name]) for name, hf in _TOP.items() if name in self._tensors}
        layers: dict[int, dict[str, GGUFTensor]] = {}
        for name, tensor in self._tensors.items():
            if match := re.fullmatch(r"blk\.([0-9]{1,5})\.(.+)", name):
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
        for layer, tensors in layers.items():
            for name, view in self._layer_views(tensors).items():
                views[f"model.layers.{layer}.{name}"] = view
        return views

    def _layer_views(self, tensors: dict[str, GGUFTensor]) -> dict[str, _View]:
        views: dict[str, _View] = {}
        for name, tensor in tensors.items():
            kind, _, suffix = name.rpartition(".")
            if kind in _LAYER:
                permuted = self._arch == "llama" and kind in ("attn_q", "attn_k")
                views[f"{_LAYER[kind]}.{suffix}"] = self._rotary(tensor, kind) if permuted else self._plain(tensor)
            elif kind == "ffn_gate_inp":
                for router in self._router_names():
                    views[f"{router}.{suffix}"] = self._plain(tensor)
            elif kind == "attn_sinks":
                views["self_attn.sinks"] = self._plain(tensor)
        if "ffn_down_exps.weight" in tensors:
            views |= self._gpt_oss_experts(tensors) if self._arch == "gpt-oss" else self._experts(tensors)
        return views

    def _router_names(self) -> tuple[str, ...]:
        if self._arch == "gpt-oss":
            return ("mlp.router",)
        return ("mlp.gate", "block_sparse_moe.gate") if self._mixtral else ("mlp.gate",)

    def _plain(self, tensor: GGUFTensor) -> _View:
        plain = _View(tensor.shape, lambda: self._load(tensor), self._dtype(tensor))
        return self._by_rows(plain, tensor, 0, tensor.rows) if len(tensor.shape) == 2 else plain

    def _by_rows(self, plain: _View, tensor: GGUFTensor, first: int, count: int) -> _View:
        """Add reading of single rows to a view, and reading as codes if the tensor is stored in codes."""
        def codes(begin: int, stop: int) -> Codes:
            return codes_of(self._raw(tensor, first + begin, stop - begin), tensor.kind)

        plain = replace(plain, read_rows=lambda begin, stop: self._load_rows(tensor, first + begin, stop - begin))
        if not has_codes(tensor.kind):
            return plain
        return replace(plain, read_codes=lambda: codes(0, count), code_type=tensor.kind.name, read_code_rows=codes)

    def _rotary(self, tensor: GGUFTensor, kind: str) -> _View:
        """Return a view with the rows in HF's order: llama.cpp rotates pairs (0, 1) where HF rotates (0, D/2)."""
        heads = self.config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]

        def ordered(stored: Tensor) -> Tensor:
            """Reorder [heads * D, ...], where each head's rows are stored as D/2 pairs."""
            pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
            return pairs.transpose(1, 2).reshape(stored.shape)

        plain = self._plain(tensor)
        view = replace(plain, read=lambda: ordered(plain.read()), read_rows=None, read_code_rows=None)
        read_codes = plain.read_codes
        return view if read_codes is None else replace(view, read_codes=lambda: read_codes().map(ordered))

    def _experts(self, tensors: dict[str, GGUFTensor]) -> dict[str, _View]:
        """Return views under both HF namings: stacked as in its modules, and one tensor per expert as in its files."""
        gate, up, down = self._expert_tensors(tensors)
        experts, inner, hidden = gate.shape

        def read_gate_up() -> Tensor:
            stacked = torch.empty(experts, 2 * inner, hidden, dtype=self._dtype(gate))
            stacked[:, :inner] = self._load(gate)
            stacked[:, inner:] = self._load(up)
            return stacked

        views = {"mlp.experts.gate_up_proj": _View((experts, 2 * inner, hidden), read_gate_up, self._dtype(gate)),
                 "mlp.experts.down_proj": self._plain(down)}
        prefix, names = (("block_sparse_moe.experts", ("w1", "w3", "w2")) if self._mixtral
                         else ("mlp.experts", ("gate_proj", "up_proj", "down_proj")))
        for name, tensor in zip(names, (gate, up, down), strict=True):
            for expert in range(experts):
                views[f"{prefix}.{expert}.{name}.weight"] = self._expert(tensor, expert)
        return views

    def _expert_tensors(self, tensors: dict[str, GGUFTensor]) -> tuple[GGUFTensor, GGUFTensor, GGUFTensor]:
        """Return the gate, up and down tensors, each [experts, out, in], after checking their shapes."""
        layer = tensors["ffn_down_exps.weight"].name.removesuffix("ffn_down_exps.weight")
        wanted = [f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        if "ffn_gate_exps.bias" in tensors:
            wanted += [f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")]
        for name in wanted:
            if name not in tensors:
                raise CheckpointError(f"{self.path} has no tensor {layer}{name}")
        gate, up, down = (tensors[name] for name in wanted[:3])
        shapes = [tensor.shape for tensor in (gate, up, down)]
        if len(gate.shape) != 3 or shapes != [gate.shape, gate.shape, (gate.shape[0], gate.shape[2], gate.shape[1])]:
            raise CheckpointError(f"{self.path}: the experts {layer}ffn_gate_exps, up_exps and down_exps have shapes "
                                  f"{', '.join(str(list(shape)) for shape in shapes)}, which do not belong together")
        for name in wanted[3:]:
            if tensors[name].shape != tensors[name.replace(".bias", ".weight")].shape[:2]:
                raise CheckpointError(f"{self.path}: tensor {layer}{name} has shape {list(tensors[name].shape)}")
        if self._mxfp4 and self._arch == "gpt-oss" and {gate.kind, up.kind, down.kind} != {GGMLQuantizationType.MXFP4}:
            raise CheckpointError(f"{self.path}: the experts of {layer.rstrip('.')} are not all stored as MXFP4")
        return gate, up, down

    def _expert(self, tensor: GGUFTensor, expert: int) -> _View:
        rows = tensor.shape[1]
        plain = _View(tensor.shape[1:], lambda: self._load_rows(tensor, expert * rows, rows).reshape(tensor.shape[1:]),
                      self._dtype(tensor))
        return self._by_rows(plain, tensor, expert * rows, rows)

    def _gpt_oss_experts(self, tensors: dict[str, GGUFTensor]) -> dict[str, _View]:
        """Return views with gate and up interleaved as in HF: gate 0, up 0, gate 1, up 1 and so on."""
        gate, up, down = self._expert_tensors(tensors)
        experts, inner, hidden = gate.shape
        views: dict[str, _View] = {}
        if "ffn_gate_exps.bias" in tensors:
            gate_bias, up_bias = tensors["ffn_gate_exps.bias"], tensors["ffn_up_exps.bias"]
            views["mlp.experts.gate_up_proj_bias"] = _View(
                (experts, 2 * inner), lambda: _interleave(self._load(gate_bias), self._load(up_bias)),
                self._dtype(gate_bias))
            views["mlp.experts.down_proj_bias"] = self._plain(tensors["ffn_down_exps.bias"])
        if not self._mxfp4:
            # HF stores unquantised experts as [experts, in, out].
            views["mlp.experts.gate_up_proj"] = _View(
                (experts, hidden, 2 * inner),
                lambda: _interleave(self._load(gate), self._load(up)).transpose(1, 2).contiguous(), self._dtype(gate))
            views["mlp.experts.down_proj"] = _View(
                (experts, inner, hidden), lambda: self._load(down).transpose(1, 2).contiguous(), self._dtype(down))
            return views
        for part, load in (("blocks", self._mxfp4_blocks), ("scales", self._mxfp4_scales)):
            tail = (16,) if part == "blocks" else ()
            views[f"mlp.experts.gate_up_proj_{part}"] = _View(
                (experts, 2 * inner, hidden // MXFP4_GROUP, *tail),
                lambda load=load: _interleave(load(gate), load(up)), torch.uint8)  # type: ignore[misc]
            views[f"mlp.experts.down_proj_{part}"] = _View(
                (experts, hidden, inner // MXFP4_GROUP, *tail), lambda load=load: load(down),  # type: ignore[misc]
                torch.uint8)
        return views

    def _mxfp4_groups(self, tensor: GGUFTensor) -> Tensor:
        """Return [experts, rows, groups, 17]: one byte of scale and 16 bytes of nibbles per group."""
        raw = torch.from_numpy(self._raw(tensor, 0, tensor.rows))
        return raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // MXFP4_GROUP, 17)

    def _mxfp4_scales(self, tensor: GGUFTensor) -> Tensor:
        return self._mxfp4_groups(tensor)[..., 0].contiguous()

    def _mxfp4_blocks(self, tensor: GGUFTensor) -> Tensor:
        """Reorder nibbles: byte j of GGUF holds values j (low) and j + 16 (high), of HF 2j (low) and 2j + 1 (high)."""
        stored = self._mxfp4_groups(tensor)[..., 1:]
        blocks = torch.empty(stored.shape, dtype=torch.uint8)
        low, high = stored & 0x0F, stored >> 4  # values 0 to 15, and 16 to 31
        blocks[..., :8] = low[..., 0::2] | (low[..., 1::2] << 4)
        blocks[..., 8:] = high[..., 0::2] | (high[..., 1::2] << 4)
        return blocks

    def _dtype(self, tensor: GGUFTensor) -> torch.dtype:
        return _AS_STORED.get(tensor.kind, torch.float32)

    def _load(self, tensor: GGUFTensor) -> Tensor:
        return self._load_rows(tensor, 0, tensor.rows).reshape(tensor.shape)

    def _load_rows(self, tensor: GGUFTensor, first: int, count: int) -> Tensor:
        """Return rows [first, first + count) of the tensor seen as a matrix: [count, columns]."""
        columns = tensor.shape[-1]
        if tensor.kind in _AS_STORED:
            raw = torch.from_numpy(self._raw(tensor, first, count))
            return raw.reshape(-1).view(self._dtype(tensor)).reshape(count, columns)
        values = torch.empty(count, columns, dtype=torch.float32)
        target = values.numpy()
        step = max(1, CHUNK_NBYTES // tensor.row_nbytes)

        def fill(start: int) -> None:
            rows = min(step, count - start)
            # Blocks do not depend on their row: one long row avoids the package's slow loop over short rows.
            blocks = self._raw(tensor, first + start, rows).reshape(1, -1)
            target[start:start + rows] = dequantize(blocks, tensor.kind).reshape(rows, columns)

        try:
            list(self._threads.map(fill, range(0, count, step)))
        except (NotImplementedError, KeyError) as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} is stored as {tensor.kind.name}, which cannot "
                                  "be read here; use a file quantised as Q4_K_M, Q8_0 or F16") from error
        return values

    def _raw(self, tensor: GGUFTensor, first: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """Return [count, bytes per row], as stored."""
        raw = np.empty((count, tensor.row_nbytes), dtype=np.uint8)
        target, offset, done = raw.reshape(-1).data, tensor.offset + first * tensor.row_nbytes, 0
        try:
            while done < raw.nbytes:
                got = os.preadv(self._files[tensor.file], [target[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(f"{tensor.file} is truncated: tensor {tensor.name} ends past the file's end; "
                                          "download it again")
                done += got
        except OSError as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} cannot be read ({error})") from error
        return raw


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """Interleave along dimension 1: [E, N, ...] twice -> [E, 2N, ...]."""
    return torch.stack((even, odd), dim=2).flatten(1, 2)
