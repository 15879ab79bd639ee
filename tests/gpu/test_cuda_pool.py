"""On a CUDA device, two engines share a pool: each restores what the other computed, and tokens are the same."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spillover import LLM, SamplingParams
from spillover.memory.shared_pool import tier
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.transfer.host_pool import HostPool
from spillover.memory.transfer.link import DeviceLink
from spillover.memory.transfer.link_cuda import CudaLink
from support import starved
from support.pool_process import PoolProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "load_format": "dummy",
                         "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 6,
                         "max_num_batched_tokens": 64, "gpu_memory": "2GB"}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen timeouts: on a busy machine pinning the pool's memory for the first time takes more than a second."""
    monkeypatch.setattr(tier, "TIMEOUT_SECONDS", 20.0)
    monkeypatch.setattr(tier, "LOOKUP_SECONDS", 20.0)


def settle(llm: LLM) -> None:
    deadline = time.monotonic() + 30
    while llm.engine.scheduler.connector.busy:
        llm.engine.step()
        assert time.monotonic() < deadline


def host_pool(link: DeviceLink) -> HostPool:
    assert isinstance(link, CudaLink)
    return link._transfers.pool


def adopted_and_pinned(link: DeviceLink) -> int:
    """Return the number of slabs of the pool's memory that this engine has pinned; fail if one could not be pinned."""
    met = [slab for slab in host_pool(link)._slabs.slabs if slab.use == "pool" and slab.pinned is not None]
    assert all(slab.pinned for slab in met), "memory of the pool could not be pinned"
    return len(met)


@pytest.mark.parametrize("spill_dtype", ["auto", "int8"])
def test_two_engines_share(tmp_path: Path, spill_dtype: str) -> None:
    folder = starved.write_config(tmp_path, "llama")
    rng = random.Random(3)
    prompts = [[rng.randrange(starved.VOCABULARY) for _ in range(100)] for _ in range(8)]
    with LLM(folder, **FLAGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    with PoolProcess(64 << 20) as pool:
        flags = {**FLAGS, "host_pool": str(pool.path), "spill": "eager", "restore": "always",
                 "spill_dtype": spill_dtype}
        with LLM(folder, **flags) as one, LLM(folder, **flags) as two:
            computed = [output.outputs[0].token_ids for output in one.generate(prompts, PARAMS, use_tqdm=False)]
            settle(one)
            outputs = two.generate(prompts, PARAMS, use_tqdm=False)
            for llm in (one, two):  # each pinned the pool's own memory, and copied nothing through slots
                connector = llm.engine.scheduler.connector
                assert isinstance(connector, TieredConnector)
                assert connector.store.direct.spills
                assert adopted_and_pinned(connector.store.link)
                assert "kv" not in host_pool(connector.store.link).bytes_by_use
        assert computed == expected
        assert sum(output.sources.pool for output in outputs) == 8 * 96
        if spill_dtype == "auto":
            assert [output.outputs[0].token_ids for output in outputs] == expected
