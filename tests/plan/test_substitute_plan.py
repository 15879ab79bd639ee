"""Substitutes of streamed layers count in the budget: a plan stays within it, or names a budget that works."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from spillover.cli.plan.plan import plan_json, print_plan
from spillover.errors import PlanError
from spillover.models.architectures import llama
from spillover.models.config import ModelConfig
from spillover.models.quantize.scheme import make_scheme
from spillover.models.quantize.view import matrices
from spillover.models.weight_specs import WeightSpecs, kept_on, part_nbytes
from spillover.plan.hardware import Machine
from spillover.plan.offload import TYPICAL
from spillover.plan.planner import Plan, PlanRequest, make_plan
from spillover.units import parse_bytes
from support.plan_shapes import CPU, GPT_OSS, GPT_OSS_SPECS, GPU, SMOLLM2, SMOLLM2_SPECS, TINY

MB = 10**6
LARGE = replace(SMOLLM2, vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
                head_dim=128, intermediate_size=14_336, tie_embeddings=False, windows=(None,) * 32)  # 8B parameters
TIGHT: dict[str, Any] = {"gpu_memory": 9000 * MB, "max_model_len": 2048, "max_num_seqs": 4,
                         "max_num_batched_tokens": 2048, "weights": "sequential"}


def copies(config: ModelConfig, kind: str) -> WeightSpecs:
    """Return the specs of a model's layers in rounded form."""
    scheme = make_scheme(kind, matrices(llama.weight_specs(config)), 64, (), "bfloat16")
    rounded = llama.weight_specs(replace(config, quantization=scheme.config()))
    return {part: listed for part, listed in rounded.items() if part.startswith("layers.")}


def planned(config: ModelConfig, machine: Machine, kind: str | None = "int4", **flags: Any) -> Plan:
    request = PlanRequest(model="A model", substitutes=kind, draft_tokens=20 if kind else 0, **flags)
    return make_plan(request, config, llama.weight_specs(config), machine,
                     substitutes=None if kind is None else copies(config, kind))


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    layers = draw(st.integers(2, 8))
    return replace(TINY, vocab_size=draw(st.sampled_from([1000, 20_000])), hidden_size=512, num_layers=layers,
                   num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=1536, max_position=4096,
                   tie_embeddings=draw(st.booleans()), windows=(None,) * layers, dtype="bfloat16")


@given(models(), st.sampled_from([CPU, GPU]), st.sampled_from(["int4", "int8"]),
       st.floats(math.log(MB), math.log(1000 * MB)).map(lambda size: int(math.exp(size))),
       st.sampled_from(["auto", "sequential", "demand"]), st.sampled_from([None, 300, 2048]))
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_to_its_budget_and_every_streamed_layer_has_a_copy(
        config: ModelConfig, machine: Machine, kind: str, budget: int, weights: str, length: int | None) -> None:
    flags: dict[str, Any] = {"gpu_memory": budget, "weights": weights, "max_model_len": length}
    try:
        plan = planned(config, machine, kind, **flags)
    except PlanError as refused:
        named = re.search(r"raise --gpu-memory to at least (\S+?)( or|$)", str(refused))
        if named is not None:
            enough = {**flags, "gpu_memory": parse_bytes(named[1])}
            if machine is CPU or planned(config, machine, None, **enough).placement is not None:
                planned(config, machine, kind, **enough)  # else all of it fits: it is small next to its workspace
        return
    assert plan.device_bytes <= budget
    assert plan.substitutes is not None
    specs = kept_on(copies(config, kind), plan.device, plan.dtype)
    placement = plan.placement
    copied = [part for part in specs if placement is None or placement.parts[part] != "resident"]
    assert plan.substitutes.layers == len(copied) > 0
    assert plan.substitutes.nbytes == sum(part_nbytes(specs[part], plan.dtype) for part in copied)
    if placement is None:
        assert plan.device == "cpu"
        assert plan.substitutes.moved == 0
        return
    assert placement.substitute_bytes == plan.substitutes.nbytes
    assert placement.parts["embed"] == placement.parts["head"] == "resident"
    assert sum(row.device for row in placement.rows) == placement.device_bytes
    assert plan.substitutes.moved == placement.host_bytes + placement.disk_bytes


def test_more_layers_stream_where_copies_take_their_room() -> None:
    moved = []
    for kind in (None, "int4"):
        plan = planned(LARGE, GPU, kind, **TIGHT)
        assert plan.placement is not None
        moved.append(plan.placement.host_bytes)
    assert 8000 * MB < moved[0] < moved[1]
    with pytest.raises(PlanError, match="and substitutes in int8 needs at least"):
        planned(LARGE, GPU, "int8", **TIGHT)


def test_what_is_expected_follows_from_the_rates() -> None:
    request = PlanRequest(substitutes="int4", draft_tokens=20, **TIGHT)
    rates = TYPICAL["cuda"]
    plan = make_plan(request, LARGE, llama.weight_specs(LARGE), GPU, rates, substitutes=copies(LARGE, "int4"))
    found = plan.substitutes
    assert found is not None
    assert rates.host_to_device is not None
    assert found.pass_seconds == pytest.approx(found.moved / rates.host_to_device, rel=0.2)
    assert found.tokens_per_pass == 11
    assert found.tokens_per_second == pytest.approx(11 / (found.pass_seconds + 20 * found.draft_seconds))
    assert plan.placement is not None
    assert plan.placement.predicted is not None
    assert found.tokens_per_second > 5 * plan.placement.predicted.decode_tokens_per_second
    console = Console(record=True, width=160, file=io.StringIO())
    print_plan(console, plan, rates)
    shown = console.export_text()
    assert "Substitutes in int4" in shown
    assert "Assumed: 50% of every draft of 20 is accepted" in shown
    assert plan_json(plan)["substitutes"]["tokens_per_second"] == found.tokens_per_second


def test_refusals_say_what_to_do_instead() -> None:
    with pytest.raises(PlanError, match="stay on the device; use --speculative-method ngram or suffix"):
        planned(SMOLLM2, GPU)
    with pytest.raises(PlanError, match=r"have experts.*use --speculative-method ngram"):
        make_plan(PlanRequest(substitutes="int4", draft_tokens=8), GPT_OSS, GPT_OSS_SPECS, GPU,
                  substitutes={})
    int8 = llama.weight_specs(replace(SMOLLM2, quantization=make_scheme("int8", matrices(SMOLLM2_SPECS), 64, (),
                                                                        "bfloat16").config()))
    with pytest.raises(PlanError, match="few bits already; use --speculative-method ngram"):
        make_plan(PlanRequest(substitutes="int8", draft_tokens=8), SMOLLM2, int8, CPU,
                  substitutes=copies(SMOLLM2, "int8"))
    with pytest.raises(PlanError, match="and substitutes in int4 needs at least"):
        planned(SMOLLM2, GPU, gpu_memory=60 * MB, weights="sequential")
