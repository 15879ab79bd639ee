"""Every configuration named in the seeds is a preset, and every preset is a valid command of its engine."""

from __future__ import annotations

import shlex

import click
import pytest

from spillover.cli.serve import serve
from spillover.errors import SpilloverError
from spillover.lab.engines import EngineSpec, engine_class, make_engine
from spillover.lab.engines.needs import unmet
from spillover.lab.presets import PRESETS, find_preset

# The memory and scheduling flags of each seed, and the preset that corresponds to it. Renamed flags have their present
# names.
NAMED = {
    "vllm-cpu-offload-8": "--enforce-eager --cpu-offload-gb 8",
    "vllm-qwen3-0.6b-offloading": """--tensor-parallel-size 2 --gpu-memory-utilization 0.2 --kv-transfer-config
        '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"num_cpu_blocks":39072,\
"cpu_bytes_to_use":71697432576}}'""",
    "vllm-qwen3-8b-lmcache": """--tensor-parallel-size 2 --gpu-memory-utilization 0.6 --kv-transfer-config
        '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both","kv_connector_extra_config":{"num_cpu_blocks":64000}}'
        """,
    "vllm-qwen3-8b-baseline": "--tensor-parallel-size 2 --gpu-memory-utilization 0.6",
    "vllm-fp8-kv": "--enable-prefix-caching --kv-cache-dtype fp8",
    "vllm-no-prefix-caching": "--no-enable-prefix-caching",
    "vllm-no-chunked-prefill": "--no-enable-chunked-prefill",
    "vllm-chunk-512": "--enable-chunked-prefill --max-num-batched-tokens 512",
    "vllm-max-7b": "--max-model-len 16384 --gpu-memory-utilization 0.85 --async-scheduling --kv-offloading-backend "
                   "native --kv-offloading-size 62 --kv-cache-dtype fp8 --disable-hybrid-kv-cache-manager "
                   "--max-num-seqs 64 --quantization awq --attention-backend FLASHINFER",
    "sglang-no-radix": "--disable-radix-cache",
    "sglang-fcfs": "--schedule-policy fcfs",
    "sglang-lpm": "--schedule-policy lpm",
    "sglang-dfs-weight": "--schedule-policy dfs-weight",
    "llamacpp-ncmoe-32": "-ncmoe 32",
    "llamacpp-ncmoe-64": "-c 65536 -ncmoe 64",
    "spillover-lpm": "--schedule-policy lpm",
    "spillover-cpu-offload-8": "--cpu-offload-gb 8",
}
ENVIRONMENTS = {
    "vllm-uvm": {"VLLM_USE_UVM": "1"},
    "llamacpp-uvm": {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"},
    "llamacpp-uvm-no-graphs": {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1", "GGML_CUDA_DISABLE_GRAPHS": "1"},
}


def spec_of(name: str) -> EngineSpec:
    preset = find_preset(name)
    return EngineSpec(preset.engine, preset.model, preset.args, preset.env, preset=name)


@pytest.fixture(autouse=True)
def _no_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillover.lab.engines.llamacpp.default_gguf", lambda: "default.gguf")


@pytest.mark.parametrize("name", NAMED)
def test_what_a_seed_typed_is_what_a_preset_runs(name: str) -> None:
    words = make_engine(spec_of(name)).command(8000)
    asked = shlex.split(NAMED[name])
    assert any(words[at:at + len(asked)] == asked for at in range(len(words))), shlex.join(words)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_a_seed_set_in_the_environment_is_set(name: str) -> None:
    assert find_preset(name).env == ENVIRONMENTS[name]


def test_every_seed_is_there_and_every_preset_makes_a_command() -> None:
    assert {preset.seed for preset in PRESETS.values()} >= {"000", "001", "002", "003", "004"}
    for name, preset in PRESETS.items():
        spec = spec_of(name)
        if spec.model is None and preset.engine == "vllm":
            spec = EngineSpec(spec.kind, "some/model", spec.args, spec.env, preset=name)
        assert engine_class(preset.engine)(spec).command(8000), name
        assert preset.about, name
        unmet(spec)  # every need can be checked


def test_spillover_takes_the_flags_of_its_presets() -> None:
    """The command line accepts the flags; nothing is started."""
    known = {option for parameter in serve.params if isinstance(parameter, click.Option)
             for option in (*parameter.opts, *parameter.secondary_opts)}
    own = [name for name, preset in PRESETS.items() if preset.engine == "spillover"]
    assert own
    for name in own:
        flags = [word for word in make_engine(spec_of(name)).command(8000) if word.startswith("--")]
        assert set(flags) <= known, name


def test_a_mistyped_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpilloverError, match="vllm-cpu-offload-8"):
        find_preset("vllm-cpu-offload")
