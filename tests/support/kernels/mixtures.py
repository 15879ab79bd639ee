"""Random mixtures of experts in every weight format, on the GPU if there is one."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from spillover.kernels.fields import LinearShape
from spillover.kernels.formats import fp8_block, mxfp4
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.dense import DENSE
from spillover.kernels.formats.gguf_codes import CODE_FORMS
from spillover.kernels.formats.gguf_experts import GgufExperts, experts_format
from spillover.kernels.formats.grouped_int import GroupedInt
from spillover.kernels.formats.int_experts import IntExperts
from spillover.kernels.moe.experts import Experts
from spillover.models.gguf.gguf_codes import codes_of
from support.models.k_quants import quantize_more

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stack(weight: Tensor, form: str, bias: Tensor | None, parts: int = 1) -> Experts:
    """Return a dense [E, N, K] stack in another format."""
    shape = LinearShape((weight.shape[1] // parts,) * parts, weight.shape[2])
    if form == "dense":
        return Experts(Linear(DENSE, shape, (weight,)), bias)
    if form.startswith("int"):
        bits, group = map(int, form.removeprefix("int").split("_"))
        base = GroupedInt(bits, group, "bfloat16", zeros=True)
        each = [int_tensors(one.float(), base) for one in weight]
        kept = [IntExperts(base).packed_tensors(shape, tensors) for tensors in each]
        return Experts(Linear(IntExperts(base), shape, tuple(map(torch.stack, zip(*kept, strict=True)))), bias)
    if form.startswith("gguf_"):
        return gguf_stack(weight, form.removeprefix("gguf_").split("_and_"), parts, bias)
    if form == "mxfp4":
        blocks, scales = mxfp4.quantize(weight)
        groups = scales.shape[-1]
        scales = torch.nn.functional.pad(scales, (0, mxfp4.padded(groups) - groups))
        return Experts(Linear(mxfp4.MXFP4, shape, (blocks.flatten(-2), scales.contiguous())), bias)
    pieces = [[fp8_block.quantize(piece) for piece in one.chunk(parts)] for one in weight.float()]
    values = torch.stack([torch.cat([value for value, _ in each]) for each in pieces])
    scales = torch.stack([torch.cat([scale for _, scale in each]) for each in pieces])
    return Experts(Linear(fp8_block.FP8_BLOCK, shape, (values, scales)), bias)


def gguf_stack(weight: Tensor, kinds: list[str], parts: int, bias: Tensor | None) -> Experts:
    """Return a dense [E, N, K] stack in GGUF types, in the format used for a layer that contains all of `kinds`."""
    shape = LinearShape((weight.shape[1] // parts,) * parts, weight.shape[2])
    form = experts_format({CODE_FORMS[kind] for kind in kinds}, [LinearShape((128,), 128)])
    assert isinstance(form, GgufExperts)
    stored = [codes_of(quantize_more(one.float().cpu().numpy(), Kind[kinds[0]]), Kind[kinds[0]]) for one in weight]
    kept = [form.packed_tensors(codes) for codes in stored]
    return Experts(Linear(form, shape, tuple(torch.stack(t).to(weight.device) for t in zip(*kept, strict=True))), bias)


def int_tensors(weight: Tensor, base: GroupedInt) -> tuple[Tensor, Tensor, Tensor]:
    """Return [N, K] as grouped codes, scales and zeros; the zeros vary by group."""
    groups = weight.view(weight.shape[0], -1, base.group)
    top = (1 << base.bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / top).bfloat16()
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top).to(torch.uint8)
    return base.pack(codes.flatten(1)), scales, zeros.to(torch.uint8)


def case(form: str, tokens: int, hidden: int, inner: int, experts: int, dtype: torch.dtype, clamped: bool,
         seed: int = 0) -> tuple[Tensor, Tensor, Experts, Experts]:
    torch.manual_seed(seed)
    x = torch.randn(tokens, hidden, dtype=dtype, device=DEVICE)
    scores = 2 * torch.randn(tokens, experts, dtype=dtype, device=DEVICE)
    first = torch.randn(experts, 2 * inner, hidden, dtype=dtype, device=DEVICE) * hidden**-0.5
    second = torch.randn(experts, hidden, inner, dtype=dtype, device=DEVICE) * inner**-0.5
    biases = [torch.randn(experts, rows, dtype=dtype, device=DEVICE) if clamped else None
              for rows in (2 * inner, hidden)]
    return x, scores, stack(first, form, biases[0], 1 if clamped else 2), stack(second, form, biases[1])


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.float().std() > 0.05
    assert found.dtype == expected.dtype
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error.item() < tolerance
