"""`spill plan --quantizations`: each format's bytes, whether it fits, and only measured speeds."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spillover.cli.plan.plan_quantizations import notes, quantizations_table
from spillover.engine import planned as planning
from spillover.engine.config import EngineConfig
from spillover.engine.plan_formats import SHARES, FormatPlan, plan_formats
from spillover.units import format_bytes
from support.plan_shapes import CPU, GIB, RATES

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(planning, "probe", lambda: CPU)
    monkeypatch.setattr(planning, "quick_rates", lambda device: RATES)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def rows_of(path: Path, config: dict[str, Any] = MODEL, **flags: Any) -> dict[str, FormatPlan]:
    return {row.name: row for row in plan_formats(EngineConfig(model=str(path), **flags), path, config, RATES)}


def test_fewer_bits_take_fewer_bytes_and_have_a_higher_limit(here: Path) -> None:
    rows = rows_of(here)
    assert list(rows) == ["float32", "fp8", "int8, groups of 128", "int4, groups of 128"]
    assert rows["float32"].own
    whole, eight, four = (rows[name] for name in ("float32", "int8, groups of 128", "int4, groups of 128"))
    assert whole.weight_bytes
    assert eight.weight_bytes
    assert four.weight_bytes
    assert whole.weight_bytes > eight.weight_bytes > four.weight_bytes
    assert whole.decode
    assert eight.decode
    assert four.decode
    assert whole.decode.limit < eight.decode.limit < four.decode.limit


def test_a_speed_is_predicted_only_where_its_share_was_measured(here: Path) -> None:
    rows = rows_of(here)
    four, whole = rows["int4, groups of 128"], rows["float32"]
    assert four.decode is not None
    assert four.decode.predicted is None
    assert not four.source
    assert whole.decode is not None
    assert whole.decode.predicted == pytest.approx(0.73 * whole.decode.limit)
    assert any("No share was measured for" in note and "int4" in note for note in notes(list(rows.values())))


def test_the_table_fits_a_terminal_of_80_columns(here: Path) -> None:
    console = Console(width=80, file=io.StringIO())
    rows = rows_of(here)
    console.print(quantizations_table(list(rows.values())))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    for name, row in rows.items():
        if row.weight_bytes is not None:
            kind, weights = re.escape(name.split(",")[0]), re.escape(format_bytes(row.weight_bytes))
            assert re.search(rf"│ {kind}\b.* {weights} .* (of|at most) ", shown), shown


def test_no_prediction_is_above_its_limit() -> None:
    for share in SHARES.values():
        assert share.decode <= 1
        assert (share.prefill or 0) <= 1
        assert share.source


def test_a_budget_that_only_int4_fits(here: Path) -> None:
    rows = rows_of(here, gpu_memory="60MiB", weights="resident", max_model_len=64, max_num_seqs=1,
                   max_num_batched_tokens=64)
    assert rows["int4, groups of 128"].resident
    refused = rows["unquantised"]
    assert not refused.resident
    assert "60MiB" in refused.why


def test_a_quantised_checkpoint_names_its_own_format_and_what_the_others_need(here: Path) -> None:
    stored = {**MODEL, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
                                               "zero_point": True}}
    rows = rows_of(here, stored)
    assert rows["awq"].own
    assert not rows["float32"].own
    assert "unquantised checkpoint" in rows["int8, groups of 128"].how


def test_a_gguf_file_has_a_row_for_k_quants(here: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4)]
    rows = rows_of(here, {**MODEL, "codes": dict.fromkeys(names, "Q8_0")})
    assert rows["Q8_0"].own
    assert not rows["Q4_K"].own


def test_more_memory_leaves_more_for_kv(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = rows_of(here, gpu_memory="300MiB")["float32"].kv_tokens
    monkeypatch.setattr(planning, "probe", lambda: replace(CPU, memory_available=8 * GIB))
    more = rows_of(here, gpu_memory="500MiB")["float32"].kv_tokens
    assert little is not None
    assert more is not None
    assert little < more
