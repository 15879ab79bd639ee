"""A profile says where the time went, all of it, and changes nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spillover import LLM, SamplingParams
from spillover.engine.profiling.profile import IDLE, Breakdown, _add_up, _Event, kind_of, profiled

MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "eos_token_id": 3, "torch_dtype": "float32",
}


def test_a_profiled_batch_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
             max_model_len=64) as llm:
        plain = llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids
        with profiled(tmp_path / "traces", "one", "cpu") as breakdown:
            seen = llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert seen == plain
    assert breakdown.whole > 0
    assert sum(breakdown.seconds.values()) == pytest.approx(breakdown.whole)
    for kind in ("attention", "GEMM", "norm", "sampling"):
        assert 0 < breakdown.share(kind) < 1, kind
    assert breakdown.trace is not None
    trace = json.loads(gzip.decompress(breakdown.trace.read_bytes()))
    assert any("linear" in event.get("name", "") for event in trace["traceEvents"])


def test_overlaps_count_once_and_gaps_are_idle() -> None:
    breakdown = Breakdown()
    _add_up(breakdown, [_Event("_rms_norm", 40.0, 50.0), _Event("_decode_attention", 0.0, 10.0),
                        _Event("Memcpy HtoD", 5.0, 20.0)])
    assert breakdown.whole == pytest.approx(50e-6)
    assert {kind: round(seconds * 1e6) for kind, seconds in breakdown.seconds.items()} == {
        "attention": 10, "copies": 10, "norm": 10, IDLE: 20}


@pytest.mark.parametrize(("name", "kind"), [
    ("_decode_attention", "attention"), ("_prefill_attention", "attention"), ("_norm_rope_store", "norm"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"), ("_fixed_linear", "GEMM"), ("_gemv", "GEMM"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"), ("_pick", "sampling"), ("Memcpy DtoH (Device -> Pinned)", "copies"),
    ("void at::native::elementwise_kernel<128, 4>", "other"),
])
def test_kinds_are_told_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
