"""On a CUDA device: weights in managed memory give the tokens of a resident model, and their pages move in and out."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover.engine.cuda.managed_memory import CudaManagedMemory
from spillover.memory.managed.pages import Pages
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.plan.placement import MANAGED
from support import starved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MB = 1 << 20
FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16}
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}  # units of several pages of 2 MiB
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**starved.MODELS["llama"], **WIDE, "intermediate_size": 4096},
    "qwen3-moe": {**starved.MODELS["qwen3-moe"], **WIDE, "moe_intermediate_size": 1024},
    "gpt-oss": {**starved.MODELS["gpt-oss"], **WIDE, "intermediate_size": 1024},
}
_resident: dict[str, starved.Answers] = {}


@pytest.fixture
def transfers() -> Iterator[CudaTransfers]:
    made = CudaTransfers(torch.device("cuda"))
    yield made
    torch.cuda.synchronize()
    made.close()


def test_pages_move_with_their_bytes(transfers: CudaTransfers) -> None:
    memory = CudaManagedMemory(transfers, reserved_bytes=0, oversubscribe=False)
    free, size = torch.cuda.mem_get_info()[0], 256 * MB
    buffer = memory.allocate(size)
    run = torch.as_tensor(buffer, device="cuda")
    pages = [Pages(run.data_ptr(), size)]
    assert run.data_ptr() == buffer.address
    memory.to_device(pages)
    run.copy_(torch.arange(size, device="cuda") % 251)
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] >= size  # it is on the device
    for advised in (False, True):
        memory.to_host(pages)
        torch.cuda.synchronize()
        memory.advise(pages, advised)
        assert ctypes.string_at(buffer.address + 1000, 8) == bytes(index % 251 for index in range(1000, 1008))
        memory.begin_prefetch()
        memory.to_device(pages, ahead=True)
        memory.wait()
        assert int(run[::MB].sum(dtype=torch.int64)) == sum(index % 251 for index in range(0, size, MB))
    memory.to_host(pages)
    memory.advise(pages, False)
    del run, buffer


@pytest.mark.parametrize("strategy", MANAGED)
@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_are_those_of_a_resident_model(name: str, strategy: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    folder = str(tmp_path)
    if name not in _resident:
        _resident[name] = starved.answer(folder, starved.prompts(4), gpu_memory="4GB", weights="resident", **FLAGS)
    whole = _resident[name]
    smallest = starved.least(folder, weights=strategy, **FLAGS)
    for budget in (smallest, (smallest + whole.plan.weight_bytes + whole.plan.workspace_bytes) // 2):
        found = starved.answer(folder, starved.prompts(4), weights=strategy, gpu_memory=str(budget), **FLAGS)
        placement, traffic = found.plan.placement, found.traffic
        assert placement is not None
        assert placement.managed_bytes > placement.device_bytes
        assert found.tokens == whole.tokens
        assert 0 < found.weights.peak_bytes <= placement.device_bytes
        assert traffic.bytes_moved > placement.device_bytes
        assert (traffic.bytes_back > 0) == (strategy != "uvm-advise")
        del found
