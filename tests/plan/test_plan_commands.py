"""`spill plan` and `spill doctor`, as read by a person and by a script."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spillover.cli.plan import doctor
from spillover.cli.plan import plan as plan_command
from spillover.engine.config import EngineConfig
from spillover.errors import PlanError
from spillover.plan import measure
from spillover.plan.planner import PlanRequest, make_plan
from support.plan_shapes import CPU, GIB, GPT_OSS, GPT_OSS_SPECS, GPU, RATES, SMOLLM2, SMOLLM2_SPECS

SMOLLM2_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def paper() -> Console:
    return Console(file=io.StringIO(), width=110)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plan_says_what_goes_where_and_what_it_costs() -> None:
    console = paper()
    request = PlanRequest(model="SmolLM2", gpu_memory=GIB)
    plan_command.print_plan(console, make_plan(request, SMOLLM2, SMOLLM2_SPECS, CPU, RATES), RATES)
    page = text(console)
    assert "this machine's RAM" in page
    for words in ("513 MiB", "Workspace", "budget 1.0 GiB", "--max-model-len", "Prefill, 512 tokens", "25.0 GB/s"):
        assert words in page


def test_a_gpu_plan_has_no_process_row() -> None:
    console = paper()
    machine = replace(GPU, cuda=(replace(GPU.cuda[0], total=96 * GIB, free=90 * GIB),))
    plan_command.print_plan(console, make_plan(PlanRequest(), GPT_OSS, GPT_OSS_SPECS, machine))
    assert "GPU memory" in text(console)
    assert "experts" in text(console)
    assert "Process" not in text(console)


def test_the_json_adds_up() -> None:
    plan = make_plan(PlanRequest(model="SmolLM2"), SMOLLM2, SMOLLM2_SPECS, CPU, RATES)
    data = json.loads(json.dumps(plan_command.plan_json(plan, RATES)))
    assert data["weight_bytes"] == sum(data["weights"].values())
    assert data["workspace_bytes"] == sum(data["workspace"].values())
    assert data["total_bytes"] == sum(data[f"{part}_bytes"] for part in ("weight", "kv", "workspace", "base"))
    assert data["costs"]["decode_1"]["bound"] == "memory"
    assert data["rates"]["memory_read"] == 25e9


def test_a_folder_with_a_config_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_JSON))
    monkeypatch.setattr(measure, "measure_rates", lambda device: RATES)
    console = paper()
    config = EngineConfig(model=str(tmp_path), device="cpu", gpu_memory="1GB")
    plan_command.run_plan(console, config, as_json=True)
    data = json.loads(text(console))
    assert data["weight_bytes"] == 538_060_032
    assert data["device_bytes"] <= 10**9
    with pytest.raises(PlanError, match="raise --gpu-memory to at least"):
        plan_command.run_plan(console, replace(config, gpu_memory="400MB", weights="resident"), as_json=True)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_doctor_fits_on_one_screen(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: CPU)
    monkeypatch.setattr(doctor, "timed_rates", lambda device, disk: replace(RATES, disk_read=2e9))
    console = paper()
    doctor.run_doctor(console, as_json)
    page = text(console)
    if as_json:
        data = json.loads(page)
        assert data["machine"]["memory_total"] == CPU.memory_total
        assert data["rates"][0]["disk_read"] == 2e9
        assert isinstance(data["warnings"], list)
    else:
        assert len(page.splitlines()) < 40
        for words in ("A CPU", "20.0 GiB available", "25.0 GB/s", "250.0 GFLOP/s", "2.0 GB/s"):
            assert words in page


@pytest.mark.parametrize(
    ("machine", "kernels", "driver", "typed"),
    [
        (CPU, False, False, "apt install g++"),
        (CPU, True, True, "pip install torch"),
        (replace(GPU, pinnable=8 << 20), True, True, "ulimit -l unlimited"),
        (replace(CPU, torch_threads=1), True, False, "export OMP_NUM_THREADS=2"),
        (replace(CPU, memory_limit=4 * GIB), True, False, "--memory"),
        (replace(CPU, memory_available=GIB), True, False, "--gpu-memory"),
        (replace(CPU, cache_free=GIB), True, False, "export SPILLOVER_CACHE="),
    ],
)
def test_a_warning_says_what_to_type(machine: Any, kernels: bool, driver: bool, typed: str) -> None:
    (sentence,) = doctor.warnings(machine, kernels, driver)
    assert typed in sentence


def test_a_sound_machine_has_no_warnings() -> None:
    assert doctor.warnings(CPU, True, False) == []
    assert doctor.warnings(GPU, True, True) == []
