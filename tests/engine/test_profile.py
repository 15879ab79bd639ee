"""A profile accounts for all of a step's time and does not affect the step."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

import spillover.kernels.triton
from spillover import LLM, SamplingParams
from spillover.engine.profiling.profile import Event
from spillover.engine.profiling.step_parts import OTHER, _kind, step_parts
from spillover.engine.profiling.step_profile import DECODE, IDLE, PREFILL, device_steps, profile_steps
from spillover.kernels.cuda.mixture import SOURCE

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "eos_token_id": 3, "torch_dtype": "float32",
}
MIXTURE = {**DENSE, "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "num_experts": 8,
           "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
BEGIN = [("_copy_inputs", "copies"), ("_fill_tokens", "copies"),
         ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16>", "embedding and rows"),
         ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>", "other")]
END = [("_peaks", "sampling"), ("_sums", "sampling"), ("_pick", "sampling")]


def attention_half(product: str, attention: str) -> list[tuple[str, str]]:
    return [("_add_rms_norm", "norms"), (product, "qkv"), ("_norm_rope_store", "rope and KV store"),
            (attention, "attention"), (product, "o")]


@pytest.mark.parametrize("kernels", [
    # one row: the activation is part of its product
    BEGIN + 2 * [*attention_half("_gemv", "_ordered_decode"),
                 ("_add_rms_norm", "norms"), ("_gemv", "gate_up"), ("_gemv", "down")]
    + [("_add_rms_norm", "norms"), ("_gemv", "head"), *END],
    # many rows with cuBLAS, where a product may be two kernels
    BEGIN + 2 * [*attention_half("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "_ordered_prefill"),
                 ("void cublasLt::splitKreduce_kernel<32, 16, int>", "o"), ("_add_rms_norm", "norms"),
                 ("nvjet_tst_128x64", "gate_up"), ("_gate", "activation"), ("sm90_xmma_gemm_bf16bf16", "down"),
                 ("void cublasLt::splitKreduce_kernel<32, 16, int>", "down")]
    + [("_add_rms_norm", "norms"), ("indexSelectLargeIndex", "embedding and rows"), ("nvjet_tst_64x8", "head"), *END],
    # one row, where a product begins with the norm
    BEGIN + 2 * [("add_rms_norm_fp8_linear", "qkv"), ("attention_few", "attention"), ("fp8_linear", "o"),
                 ("add_rms_norm_fp8_linear", "gate_up"), ("fp8_linear", "down")]
    + [("_add_rms_norm", "norms"), ("_few_rows", "head"), *END],
    BEGIN + 2 * [("_add_rms_norm_few_rows", "qkv"), ("attention_few", "attention"), ("_few_rows_ahead", "o"),
                 ("_add_rms_norm_few_rows", "gate_up"), ("_few_rows_ahead", "down")]
    + [("_add_rms_norm", "norms"), ("_few_rows", "head"), *END],
    # a prefill step without sampling
    BEGIN + attention_half("_described", "_ordered_prefill")
    + [("_add_rms_norm", "norms"), ("_described", "gate_up"), ("_described", "down"), ("_add_rms_norm", "norms")],
    # the same, multiplied in CUDA C++
    BEGIN + attention_half("ordered_gemm", "_ordered_prefill")
    + [("_add_rms_norm", "norms"), ("ordered_gemm", "gate_up"), ("_gate", "activation"), ("ordered_gemm", "down"),
       ("_add_rms_norm", "norms")],
    # a mixture, few tokens, sampled by torch's kernels
    BEGIN + 2 * [*attention_half("_few_rows", "_ordered_decode"),
                 ("_add_rms_norm", "norms"), ("_few_rows", "router"), ("_route", "router"),
                 ("experts_gate_up_pairs", "experts"), ("experts_down_pairs", "experts")]
    + [("_add_rms_norm", "norms"), ("_few_rows", "head"), ("at::native::radixSortKVInPlace", "sampling"),
       ("_keep_likely", "sampling")],
    # a mixture, many tokens, with experts fetched from the host
    BEGIN + attention_half("nvjet_tst_64x8", "_ordered_prefill")
    + [("_add_rms_norm", "norms"), ("nvjet_tst_64x8", "router"), ("_route", "router"), ("_resolve", "expert paging"),
       ("_gather_or_post", "expert paging"), ("_sort", "router"), ("experts_gate_up_tiles", "experts"),
       ("experts_down_tiles", "experts"), ("_combine", "sum of experts")]
    + [("_add_rms_norm", "norms"), ("nvjet_tst_64x8", "head"), *END],
])
def test_kernels_are_told_by_name_and_place(kernels: list[tuple[str, str]]) -> None:
    assert list(zip([name for name, _ in kernels], step_parts([name for name, _ in kernels]), strict=True)) == kernels


def test_every_kernel_has_a_part() -> None:
    folder = Path(spillover.kernels.triton.__file__).parent
    launched = {name for file in folder.rglob("*.py")
                for name in re.findall(r"^ +(?:\w+ = )?(\w+)\[(?:\(|grid\])", file.read_text(), re.MULTILINE)}
    launched |= {name for file in SOURCE.parent.glob("*.cu")
                 for name in re.findall(r'^(?:KERNEL\(.*?\)|extern "C" __global__ .*?) (\w+)(?=\(const)',
                                        file.read_text(), re.MULTILINE)}
    assert {"_gemv", "experts_gate_up_pairs", "experts_down_128", "attention_codes_8_3", "attention_few",
            "attention_codes_prompt", "fp8_linear", "quantize_rows", "ordered_gemm", "look_up"} <= launched
    assert {name for name in launched if _kind(name) == OTHER} == {"kernel"}, (
        "engine/profiling/step_parts.py has no pattern that fits; 'kernel' is a codec of blocks that move")


def test_overlaps_count_once_copies_last_and_gaps_are_idle() -> None:
    events = [Event("_copy_inputs", 0, 4), Event("_gemv", 6, 10), Event("Memcpy HtoD", 8, 18), Event("_pick", 9, 12),
              Event("_copy_inputs", 20, 21), Event("Memcpy HtoD", 22, 30), Event("_gemv", 24, 26)]
    first, second = device_steps(events, "cuda")
    assert [round(each * 1e6) for each in first.seconds] == [4, 4, 6, 2]
    assert (round(first.total_seconds * 1e6), round(first.idle * 1e6)) == (18, 2)
    assert [round(each * 1e6) for each in second.seconds] == [1, 6, 2]  # from the end of the previous step
    assert (round(second.total_seconds * 1e6), round(second.idle * 1e6)) == (12, 3)


@pytest.mark.parametrize(("model", "parts"), [
    (DENSE, {"norms": 5, "qkv": 2, "attention": 2, "o": 2, "gate_up": 2, "activation": 2, "down": 2, "head": 1,
             "sampling": 1}),
    (MIXTURE, {"norms": 5, "qkv": 2, "attention": 2, "o": 2, "head": 1, "sampling": 1}),
])
def test_steps_on_the_cpu(tmp_path: Path, model: dict[str, object], parts: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    answers = []
    with LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
             max_model_len=64) as llm:

        def run(length: int = 8) -> None:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            outputs = llm.generate([[1, 2, 3, 4], [5, 6, 7, 8]], params, use_tqdm=False)
            answers.append([each.outputs[0].token_ids for each in outputs])

        run()
        trace = tmp_path / "traces" / "one.json.gz"
        found = profile_steps(llm.engine, "cpu", run, lambda: run(2), trace)
        run()
    assert answers[0] == answers[1] == answers[3] == answers[4]
    assert found[PREFILL].num_tokens == 8
    assert found[DECODE].num_tokens == 2
    for profile in found.values():
        assert sum(part.seconds for part in profile.parts.values()) == pytest.approx(profile.profiled)
        assert 0 < profile.parts[IDLE].seconds < profile.profiled
        for part, kernels in parts.items():
            assert profile.parts[part].kernels == kernels, part
            assert profile.parts[part].seconds > 0
        for part in ("router", "experts", "sum of experts") if model is MIXTURE else ():
            assert profile.parts[part].seconds > 0, part
        assert sum(profile.host.values()) > 0
        assert profile.host["waiting"] < profile.total_seconds
    assert any("linear" in event.get("name", "")
               for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
