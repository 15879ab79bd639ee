"""Each adapter starts its engine as users do, reads what it reports, and empties its cache if possible."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from spillover.errors import SpilloverError
from spillover.lab.engines import (
    KINDS,
    EngineFailed,
    EngineSpec,
    engine_class,
    llamacpp_server,
    make_engine,
    missing,
    needs,
)
from spillover.lab.engines.llamacpp import LlamaCppEngine
from spillover.lab.engines.metrics_text import counters_from, label_of, labels_of, parse_metrics, total
from spillover.lab.engines.needs import needs_of
from spillover.lab.engines.vllm import VllmEngine
from support.servers.stub_environment import stub_python

# The output of vLLM 0.32 on a CPU after two requests with the same 300 tokens, without most lines and labels.
VLLM_PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="46592",num_gpu_blocks="364"} 1.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 600.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 256.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 600.0
vllm:generation_tokens_total{engine="0",model_name="m"} 8.0
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
"""
# The example of SGLang's documentation.
SGLANG_PAGE = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
sglang:cached_tokens_total{model_name="m"} 1.0e+06
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 439360.0
"""
# The output of llama.cpp's server after two requests with the same 300 tokens.
LLAMACPP_PAGE = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 301
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 299
llamacpp:tokens_predicted_total 8
"""


def page(folder: Path, text: str) -> Path:
    path = folder / "page.txt"
    path.write_text(text)
    return path


def test_vllm_is_started_read_and_reset(tmp_path: Path) -> None:
    python = stub_python(tmp_path / "env", module="vllm.stub", program="vllm")
    spec = EngineSpec("vllm", "some/model", {"cpu-offload-gb": 8, "page": page(tmp_path, VLLM_PAGE)}, python=python)
    with make_engine(spec) as engine:
        argv = engine.get_json("/argv")
        assert argv[1:3] == ["serve", "some/model"]
        assert argv[argv.index("--cpu-offload-gb") + 1] == "8"
        assert engine.get_json("/environ")["VLLM_SERVER_DEV_MODE"] == "1"  # needed for the route that resets it
        assert engine.running.version == "1.2.3"
        assert engine.device_pool_tokens() == 46592
        assert engine.counters() == {"prompt_tokens": 600, "generation_tokens": 8, "prefix_queries": 600,
                                     "prefix_hits": 256, "preemptions": 0}
        assert engine.reset_cache().done


def test_sglang_is_started_read_and_reset(tmp_path: Path) -> None:
    python = stub_python(tmp_path / "env", module="sglang.launch_server")
    args = {"disable-radix-cache": True, "schedule-policy": "lpm", "page": page(tmp_path, SGLANG_PAGE)}
    with make_engine(EngineSpec("sglang", "some/model", args, python=python)) as engine:
        argv = engine.get_json("/argv")
        assert argv[argv.index("--model-path") + 1] == "some/model"
        assert {"--disable-radix-cache", "--enable-metrics", "--enable-cache-report"} < set(argv)
        assert engine.running.version == "4.5.6"
        assert engine.device_pool_tokens() == 439360
        assert engine.counters()["prefix_hits"] == 1e6
        assert engine.counters()["prefix_queries"] == 8128902
        assert engine.reset_cache().done


def test_llama_server_on_the_path_is_started_read_and_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Path(stub_python(tmp_path / "env", program="llama-server")).parent
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    model = tmp_path / "tiny.gguf"
    model.touch()
    args = {"c": 1024, "np": 2, "cache-ram": 0, "say": "n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'"}
    with make_engine(EngineSpec("llamacpp", str(model), args), tmp_path) as engine:
        argv = engine.get_json("/argv")
        assert argv[argv.index("-m") + 1] == str(model)
        assert argv[argv.index("-c") + 1] == "1024"
        assert engine.running.version == "b42-stub"
        assert engine.device_pool_tokens() == 1024
        assert engine.reset_cache().done


def test_llama_cpp_with_a_prompt_cache_in_host_memory_is_not_said_to_be_reset(tmp_path: Path) -> None:
    reset = LlamaCppEngine(EngineSpec("llamacpp", "x.gguf")).reset_cache()
    assert not reset.done
    assert "prompts that it has not seen" in reset.how


def test_llama_cpp_s_counters_add_what_it_counts_apart() -> None:
    assert counters_from(parse_metrics(LLAMACPP_PAGE), LlamaCppEngine.COUNTERS) == {
        "prompt_tokens": 600, "generation_tokens": 8, "prefix_queries": 600, "prefix_hits": 299}


def test_a_model_of_the_hub_is_left_to_llama_cpp_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: f"/opt/{program}")
    command = LlamaCppEngine(EngineSpec("llamacpp", "ggml-org/gpt-oss-120b-GGUF", {"ncmoe": 64})).command(1)
    assert command[:3] == ["/opt/llama-server", "-hf", "ggml-org/gpt-oss-120b-GGUF"]
    assert command[-2:] == ["-ncmoe", "64"]


def test_the_wheel_s_server_takes_llama_server_s_flags_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = llamacpp_server.parser()
    asked = flags.parse_args(["-m", "x.gguf", "-a", "x", "-c", "4096", "-np", "4", "-ctk", "q8_0", "-fa", "off",
                              "--no-cache-prompt", "-t", "2", "--metrics", "-nkvo"])
    made = llamacpp_server.params_of(asked, _xllamacpp())
    assert (made.n_ctx, made.n_parallel, made.cache_type_k, made.flash_attn_type) == (4096, 4, "q8_0", "off")
    assert (made.cache_prompt, made.no_kv_offload, made.endpoint_metrics) == (False, True, True)
    assert (made.cpuparams.n_threads, made.cpuparams_batch.n_threads) == (2, 2)
    assert made.model_alias == {"x"}
    assert not hasattr(made, "n_batch")  # not given: stays at llama.cpp's default
    with pytest.raises(SystemExit):
        flags.parse_args(["-m", "x.gguf", "-ncmoe", "32"])
    assert "-ncmoe" in capsys.readouterr().err


def _xllamacpp() -> SimpleNamespace:
    def params() -> SimpleNamespace:
        return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

    return SimpleNamespace(
        CommonParams=params, ggml_type=SimpleNamespace(GGML_TYPE_Q8_0="q8_0"),
        llama_flash_attn_type=SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_DISABLED="off"))


def test_a_server_of_somebody_else_is_measured_and_left_alone(tmp_path: Path) -> None:
    python = stub_python(tmp_path / "env", module="vllm.stub", program="vllm")
    spec = EngineSpec("vllm", "some/model", {"page": page(tmp_path, VLLM_PAGE)}, python=python)
    with make_engine(spec) as owner:
        with make_engine(EngineSpec("url", url=owner.running.url + "/v1")) as engine:
            assert engine.running.url == owner.running.url
            assert engine.running.model_name == "stub-model"
            assert engine.running.pid is None
            assert engine.counters()["prefix_hits"] == 256  # recognised as vLLM by the names of its metrics
            assert engine.device_pool_tokens() == 364 * 128
            assert not engine.reset_cache().done
            engine.check()
        owner.check()


def test_nobody_at_the_address_is_a_result() -> None:
    with pytest.raises(EngineFailed, match="no server answers at http://127"):
        make_engine(EngineSpec("url", url="http://127.0.0.1:9", ready_seconds=0)).start()


def test_a_url_arm_needs_its_url() -> None:
    with pytest.raises(SpilloverError, match="url: http://host:port"):
        make_engine(EngineSpec("url")).start()


@pytest.mark.parametrize(("kind", "command"), [
    ("vllm", "pip install vllm"), ("sglang", 'pip install "sglang[all]"'), ("llamacpp", "pip install xllamacpp")])
def test_what_is_not_installed_is_skipped_with_the_command_that_installs_it(
        kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillover.lab.engines.llamacpp.server_program", lambda spec: None)
    spec = EngineSpec(kind, "m", python=stub_python(tmp_path / "empty"))
    absent = missing(spec)
    assert absent is not None
    assert str(absent).startswith("skipped: ")
    assert command in absent.install
    with pytest.raises(SpilloverError, match="skipped"):
        make_engine(spec).start()


def test_the_environment_variable_names_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLOVER_VLLM_PYTHON", stub_python(tmp_path / "env", module="vllm.stub"))
    assert VllmEngine.installed(EngineSpec("vllm", "m")) is None
    assert VllmEngine(EngineSpec("vllm", "m")).command(1)[1:3] == ["-m", "vllm.entrypoints.cli.main"]


def test_a_mistyped_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpilloverError, match="did you mean 'llamacpp'"):
        engine_class("llama.cpp")
    assert {engine_class(kind).kind for kind in KINDS} == set(KINDS)


# An arm with a switch that its engine would ignore is skipped, whether a preset or the experiment set it.

def test_switches_that_would_be_ignored_show_what_they_need() -> None:
    assert needs_of(EngineSpec("vllm", env={"VLLM_USE_UVM": "1"})) == ("cuda", "vllm-uvm")
    assert needs_of(EngineSpec("vllm", env={"VLLM_USE_UVM": "0"})) == ()
    assert needs_of(EngineSpec("llamacpp", args={"ncmoe": 32})) == ("cuda", "llamacpp-cuda")
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert needs_of(EngineSpec("vllm", args={"kv-transfer-config": connector})) == ("module:lmcache",)
    assert needs_of(EngineSpec("vllm", preset="vllm-tp-4")) == ("cuda:4",)


def test_a_stock_vllm_is_not_measured_as_unified_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "cuda_devices", lambda: 1)
    spec = EngineSpec("vllm", "m", env={"VLLM_USE_UVM": "1"}, python=stub_python(tmp_path / "env", module="vllm.envs"))
    absent = missing(spec)
    assert absent is not None
    assert "VLLM_USE_UVM" in absent.reason


def test_too_few_gpus_skip_the_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "cuda_devices", lambda: 1)
    python = stub_python(tmp_path / "env", module="vllm.stub")
    absent = missing(EngineSpec("vllm", "m", preset="vllm-tp-2", python=python))
    assert absent is not None
    assert "2 CUDA devices, and there is 1" in absent.reason
    assert missing(EngineSpec("vllm", "m", preset="vllm-tp-1", python=python)) is None


def test_a_patched_driver_must_be_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "cuda_devices", lambda: 1)
    monkeypatch.setattr("spillover.lab.engines.llamacpp.devices", lambda spec: "CUDA0: NVIDIA")
    python = stub_python(tmp_path / "env", module="xllamacpp.stub")
    spec = EngineSpec("llamacpp", "m.gguf", preset="llamacpp-uvm-prefetch", python=python)
    absent = missing(spec)
    assert absent is not None
    assert "SPILLOVER_HAS=uvm-ebpf-prefetch" in absent.install
    monkeypatch.setenv("SPILLOVER_HAS", "uvm-ebpf-prefetch")
    assert missing(spec) is None


# A server's metrics page

def test_a_page_is_read_whatever_its_labels_hold() -> None:
    samples = parse_metrics('# HELP x y\nx_total{a="1, }2",b="say \\"hi\\"\\n"} 3 1700000000\ny 4e2\n\n'
                            'z_total{le="1"} 5 # {trace_id="q"} 0.1\n')
    assert list(samples.values()) == [3.0, 400.0, 5.0]
    assert labels_of(next(iter(samples))) == {"a": "1, }2", "b": 'say "hi"\n'}
    assert total(samples, "x") == 3
    assert total(samples, "nothing") is None
    assert label_of(samples, "z_total", "le") == "1"


def test_a_page_that_is_something_else_is_refused() -> None:
    with pytest.raises(ValueError):
        parse_metrics("<html> <body> </html>")


def test_counters_of_which_a_part_is_missing_are_left_out() -> None:
    assert counters_from({"a_total": 1.0}, {"both": ("a", "b"), "one": ("a",)}) == {"one": 1.0}


def test_the_server_file_stands_alone() -> None:
    """The server file imports no spillover module, because the interpreter that runs it has none."""
    source = Path(llamacpp_server.__file__).read_text()
    assert "import spillover" not in source
    assert "from spillover" not in source
