"""Cold blocks copied for attention: every layer sees them in order and decoded, whatever the previous step left."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spillover.engine.batch import offloaded_prefix
from spillover.engine.batch.offloaded_prefix import OffloadStage
from spillover.engine.cpu import cpu_copier
from spillover.engine.cpu.cpu_copier import CpuCopier
from spillover.engine.step import Phase, StepItem
from spillover.kernels import native
from spillover.kernels.extents import split_blocks
from spillover.kernels.huge_pages import address_of
from spillover.kernels.kv_quant import KVCodec, decode_blocks, encode_blocks, head_bytes
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.models.registry import architecture
from spillover.plan.workspace import staging_bytes

HEADS, DIM = 2, 8
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 576, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
    "rope_theta": 10000, "max_position_embeddings": 4096, "hidden_act": "silu",
}


def make_item(start: int, count: int, table: list[int], slots: list[int]) -> StepItem:
    return StepItem(id=1, phase=Phase.PREFILL, start=start, count=count, num_samples=1, first_block=0,
                    new_blocks=(tuple(table),), host_blocks=tuple(slots))


class HostSlots:
    """Slots of host memory that were used before: neither their numbers nor their addresses are in order."""

    def __init__(self, rng: random.Random) -> None:
        self.payloads: dict[int, memoryview] = {}
        self._numbers = rng.sample(range(1000), 1000)

    def add(self, blocks: Tensor) -> list[int]:
        """Store blocks; return their slots."""
        added = [self._numbers.pop() for _ in range(len(blocks))]
        self.payloads.update(zip(added, payloads_of(blocks), strict=True))
        return added

    def addresses(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array([address_of(self.payloads[slot]) for slot in slots], dtype=np.int64)


def make_copier(transfers: CpuTransfers, buffers: Tensor, codec: KVCodec | None) -> CpuCopier:
    return CpuCopier(transfers, codec)


def payloads_of(blocks: Tensor) -> list[memoryview]:
    return [memoryview(bytearray(block.contiguous().view(-1).view(torch.uint8).numpy())) for block in blocks]


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    layers=st.integers(1, 4),
    block_size=st.sampled_from([8, 16, 48, 512]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from([None, "fp8", "int8", "int4"]),
    segment=st.sampled_from([256, 1024]),
    plain=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_layer_sees_all_cold_blocks_in_order(
    counts: list[int], layers: int, block_size: int, dtype: torch.dtype, kind: str | None, segment: int, plain: bool,
    seed: int,
) -> None:
    """`counts`: number of offloaded blocks of each step; some are shared with the step before."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = torch.zeros(3, layers, 2, HEADS, block_size * DIM, dtype=dtype)
    codec = None if kind is None else KVCodec(layers, HEADS, block_size, DIM, dtype, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(offloaded_prefix.segment_blocks.__globals__["SEGMENT_POSITIONS"], "cpu", segment)
        if plain:
            patch.setattr(native, "library", lambda: None)
        transfers = CpuTransfers()
        host = HostSlots(rng)
        stage = OffloadStage(pool, block_size, partial(make_copier, transfers), host.addresses, codec)
        slots: list[int] = []
        wanted = torch.zeros(0, *pool.shape[1:], dtype=dtype)
        for count in counts:
            kept = rng.randint(0, min(count, len(slots)))
            made = torch.randn(count - kept, *pool.shape[1:], generator=generator).to(dtype)
            if kind is None:
                slots, wanted = slots[:kept] + host.add(made), torch.cat((wanted[:kept], made))
            else:
                codes = encode_blocks(made, block_size, kind)
                made = decode_blocks(codes, block_size, kind, dtype)
                slots, wanted = slots[:kept] + host.add(codes), torch.cat((wanted[:kept], made))
            table = [0] * count + [2, 1]
            item = make_item(count * block_size + 3, block_size - 2, table, slots)
            prefix = stage.prefix(item)
            assert (prefix.num_blocks, prefix.length) == (count, item.start + item.count)
            assert prefix.resident.tolist() == [2, 1][: -(-(item.count + 3) // block_size)]
            for layer in range(layers):
                seen = []
                for part in prefix.segments(layer):
                    assert part.is_contiguous()
                    seen.append(part.clone())
                    if rng.random() < 0.2:
                        time.sleep(0.001)  # the next copy completes while this one is read
                    assert torch.equal(part, seen[-1])
                assert all(len(part) % split_blocks(block_size) == 0 for part in seen[:-1])
                assert torch.equal(torch.cat(seen), wanted[:, layer])
        transfers.close()


def test_a_copy_that_fails_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the copy failed")

    transfers = CpuTransfers()
    host = HostSlots(random.Random(0))
    stage = OffloadStage(torch.zeros(2, 1, 2, 1, 8 * 8), 8, partial(make_copier, transfers), host.addresses)
    monkeypatch.setattr(cpu_copier, "stage_blocks", fail)
    prefix = stage.prefix(make_item(8, 1, [0, 1], host.add(torch.zeros(1, 128))))
    with pytest.raises(RuntimeError, match="the copy failed"):
        next(prefix.segments(0))
    transfers.close()


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("tokens", [1, 500])
def test_the_plan_counts_what_a_cold_step_takes(tokens: int, kind: str) -> None:
    config = architecture(LLAMA).config(LLAMA)
    size = 16 * 64 if kind == "auto" else head_bytes(16, 64)
    stage = OffloadStage(torch.zeros(2, 3, 2, 3, size, dtype=torch.float32 if kind == "auto" else torch.uint8), 16,
                         partial(make_copier, CpuTransfers()), HostSlots(random.Random(0)).addresses)
    library = native.library()
    assert library is not None
    taken = stage.buffers.nbytes + 4 * library.attention_total_floats(tokens, 9, 3, 64)
    planned = staging_bytes(config, "float32", "cpu", True, tokens, 16, kind)
    assert taken <= planned < taken + (1 << 20)
