"""Models larger than device memory give the tokens of a resident model, however weights are fetched; bytes do move."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spillover import LLM
from spillover.errors import PlanError, SpilloverError
from spillover.models.loader import _tensors as stored_tensors
from spillover.models.registry import architecture
from support import starved

STRATEGIES = ["demand", "sequential", "experts", "host-experts", "pinned", "auto"]
_resident: dict[str, Any] = {}


@pytest.fixture(params=list(starved.MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    return request.param, starved.write_config(tmp_path, request.param)


def resident(name: str, folder: str) -> starved.Answers:
    if name not in _resident:
        _resident[name] = starved.answer(folder, starved.prompts())
    return _resident[name]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_those_of_a_model_that_fits(model: tuple[str, str], strategy: str) -> None:
    name, folder = model
    if name == "llama" and strategy in ("experts", "host-experts"):
        with pytest.raises(PlanError, match="expert"):
            starved.answer(folder, [], weights=strategy, gpu_memory="20MB")
        return
    whole = resident(name, folder)
    smallest, all_of_it = starved.least(folder, weights=strategy), whole.plan.weight_bytes + whole.plan.workspace_bytes
    rng = random.Random(f"{name}{strategy}")
    for budget in (smallest, rng.randint(smallest, all_of_it), int(all_of_it * 0.9)):
        budget = max(budget, smallest)
        found = starved.answer(folder, starved.prompts(), weights=strategy, gpu_memory=str(budget))
        assert found.tokens == whole.tokens, (strategy, budget)
        placement = found.plan.placement
        assert placement is not None
        assert found.plan.device_bytes <= budget
        assert found.device_bytes <= placement.device_bytes
        assert found.host_bytes == pytest.approx(placement.host_bytes, rel=0.05)
        assert found.traffic.bytes_moved + found.traffic.expert_hosted > 0


@pytest.mark.parametrize("policy", ["static", "lru", "lfru", "next-layer", "support.policy_of_my_own:Backwards"])
@pytest.mark.parametrize("name", starved.MIXTURES)
def test_no_policy_changes_a_token(name: str, policy: str, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    whole = resident(name, folder)
    budget = (starved.least(folder, weights="experts") + whole.plan.weight_bytes + whole.plan.workspace_bytes) // 2
    found = starved.answer(folder, starved.prompts(), weights="experts", policy=policy, gpu_memory=str(budget))
    assert found.tokens == whole.tokens
    assert found.traffic.expert_misses > 0
    found.weights.experts.slots.cache.check()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_cpu_offload_gb_keeps_so_much_off_the_device(name: str, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    whole = resident(name, folder)
    found = starved.answer(folder, starved.prompts(), cpu_offload_gb=0.01)
    assert found.tokens == whole.tokens
    assert found.host_bytes >= 0.01 * 2**30
    assert found.traffic.bytes_moved > 0


@pytest.mark.parametrize(("name", "strategy"), [
    (name, strategy) for name in ("llama", "qwen3-moe", "gpt-oss") for strategy in ("sequential", "experts", "demand")
    if (name, strategy) != ("llama", "experts")  # a dense model has no experts
])
def test_what_host_memory_has_no_room_for_is_read_from_disk(name: str, strategy: str, tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, name)
    write_checkpoint(tmp_path, name)
    whole = starved.answer(folder, starved.prompts(2), tokens=4, load_format="auto")
    budget = (starved.least(folder, weights=strategy) + whole.plan.weight_bytes + whole.plan.workspace_bytes) // 2
    found = starved.answer(folder, starved.prompts(2), tokens=4, load_format="auto", weights=strategy,
                              gpu_memory=str(budget), host_memory="1MB")
    assert found.plan.placement is not None
    assert found.plan.placement.disk_bytes > 0
    assert found.tokens == whole.tokens
    assert found.host_bytes <= 1e6
    assert found.traffic.disk_bytes > 0


def test_made_up_weights_have_no_disk(tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, "qwen3-moe")
    with pytest.raises(Exception, match="dummy"):
        starved.answer(folder, [], weights="experts", gpu_memory=str(starved.least(folder, weights="experts") + 10**6),
                          host_memory="1MB")


def write_checkpoint(folder: Path, name: str) -> None:
    """Write a file of random weights with the names that Hugging Face uses."""
    hf = starved.MODELS[name]
    built = architecture(hf)
    config = built.config(hf)
    specs = built.weight_specs(config)
    random_numbers = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for spec in (spec for listed in specs.values() for spec in listed):
        for tensor in stored_tensors(spec, spec.sources[0]):
            if tensor.dtype == "uint8":
                low, high = (120, 128) if tensor.name.endswith("_scales") else (0, 256)
                made = torch.randint(low, high, tensor.shape, dtype=torch.uint8, generator=random_numbers)
            elif spec.name.endswith("norm"):
                made = torch.ones(tensor.shape)
            else:
                made = 0.02 * torch.randn(tensor.shape, generator=random_numbers)
            tensors[tensor.name] = made
    save_file(tensors, folder / "model.safetensors")


def test_a_step_that_fails_ends_the_engine_and_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = starved.write_config(tmp_path, "llama")
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=64) as llm:
        def fail(batch: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(llm.engine.runner, "launch", fail)
        with pytest.raises(SpilloverError, match=r"failed in a step.*RuntimeError: the device is gone"):
            llm.generate([[1, 2, 3]], use_tqdm=False)
        with pytest.raises(SpilloverError, match="failed in an earlier step"):
            llm.generate([[1, 2, 3]], use_tqdm=False)
