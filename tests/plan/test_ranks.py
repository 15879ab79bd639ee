"""Plans for several GPUs: what each rank holds, the time of a step, and how close it is to published measurements."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from spillover.cli.plan.plan_ranks import run_plan_ranks
from spillover.cli.plan.planning import plan
from spillover.engine.config import EngineConfig
from spillover.engine.plan_ranks import RanksPlan, Setting, choose_setting, plan_ranks
from spillover.engine.planned import plan_checkpoint
from spillover.errors import PlanError, SpilloverError
from spillover.models.architectures import llama, qwen3_moe
from spillover.models.config import ModelConfig
from spillover.models.sharding.shard import Shard, check_shard, shard_specs
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.ranks.cards import CARDS, HOSTS, LINKS, find_card
from spillover.plan.ranks.steps import RankPlan, all_reduces, busiest, rank_rates
from spillover.plan.rates import Rates
from spillover.plan.roofline import step_limit
from spillover.plan.shapes import model_shape
from support.plan_shapes import CPU, GPU, MIXTURE, TINY

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64}
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}


def setting(card: str = "h200", link: str | None = None) -> Setting:
    return choose_setting(card, link, "auto", CPU, lambda: pytest.fail("nothing is timed for a card of the table"))


def planned(folder: Path, model: dict[str, Any], ranks: int, card: str = "h200", **flags: Any) -> RanksPlan:
    (folder / "config.json").write_text(json.dumps(model))
    return plan_ranks(EngineConfig(model=str(folder), tensor_parallel_size=ranks, **flags), folder, setting(card))


def decode_1(layout: RankPlan) -> float:
    return layout.steps[0].seconds


def within(factor: float, value: float, other: float) -> bool:
    return other / factor <= value <= other * factor


# What a rank holds

@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, WeightSpecs, int]:
    """Draw a model, dense or a mixture, and a number of ranks that divides it."""
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, ranks, 2 * ranks]))
    assume(kv_heads % ranks == 0 or ranks % kv_heads == 0)
    heads = kv_heads * ranks * draw(st.integers(1, 3))
    changed: dict[str, Any] = {
        "num_heads": heads, "num_kv_heads": kv_heads, "intermediate_size": 8 * ranks * draw(st.integers(1, 4)),
        "vocab_size": ranks * draw(st.integers(10, 40)), "hidden_size": 8 * draw(st.integers(1, 6)),
        "tie_embeddings": draw(st.booleans()), "qkv_bias": draw(st.booleans()), "o_bias": draw(st.booleans())}
    if draw(st.booleans()):
        config = replace(MIXTURE, **changed, num_experts=2 * ranks, expert_intermediate_size=4 * ranks)
        return config, qwen3_moe.weight_specs(config), ranks
    config = replace(TINY, **changed)
    return config, llama.weight_specs(config), ranks


def params(specs: WeightSpecs, *skipped: str) -> int:
    return sum(spec.params for listed in specs.values() for spec in listed if spec.name not in skipped)


@settings(max_examples=100, deadline=None)
@given(models(), st.booleans())
def test_ranks_together_hold_every_matrix_once_but_routers_and_shared_heads(
        model: tuple[ModelConfig, WeightSpecs, int], expert_parallel: bool) -> None:
    config, specs, ranks = model
    apart = expert_parallel and config.is_moe
    check_shard(config, ranks, apart)
    shards = [Shard(rank, ranks, apart) for rank in range(ranks)]
    held = [shard_specs(specs, config, shard)[0] for shard in shards]
    assert sum(params(each, "router", "qkv") for each in held) == params(specs, "router", "qkv")
    # A key/value head is on all ranks that share it.
    parts, heads = [shard.planned(config) for shard in shards], config.num_heads + 2 * config.num_kv_heads
    assert sum(part.num_heads + 2 * part.num_kv_heads for part in parts) == heads + 2 * max(
        0, ranks - config.num_kv_heads)
    # Computation adds up as well, except for norms: no rank has more of it than the first.
    shape, part_shape = model_shape(config, specs, "bfloat16"), model_shape(parts[0], held[0], "bfloat16")
    batch = [(7, 11), (1, 30)]
    if config.num_kv_heads % ranks == 0 and not config.is_moe:
        assert ranks * step_limit(part_shape, batch).flops >= step_limit(shape, batch).flops


def test_what_a_rank_cannot_load_is_not_planned(tmp_path: Path) -> None:
    found = planned(tmp_path, GPT_OSS_120B, 4)
    # 2,880 columns over 4 ranks are 720, which is no multiple of a group of 32; whole experts are not cut.
    assert [layout.name for layout in found.layouts] == ["1 card", "4 cards, experts apart"]
    ((name, why),) = found.refused
    assert name == "4 cards"
    assert "within a group of its quantisation" in why


@pytest.mark.parametrize(("ranks", "what"), [(5, "64 attention heads"), (0, "at least 1"), (128, "64 attention heads")])
def test_a_wrong_number_of_ranks_is_one_sentence(tmp_path: Path, ranks: int, what: str) -> None:
    with pytest.raises(SpilloverError) as error:
        planned(tmp_path, LLAMA_70B, ranks)
    sentence = str(error.value)
    assert what in sentence
    assert "\n" not in sentence
    assert ranks == 0 or "it can be 1, 2, 4, 8, 16, 32, 64" in sentence


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 48), st.integers(1, 6), st.integers(1, 4000))
def test_every_number_that_a_refusal_proposes_works(ranks: int, kv_heads: int, times: int, inner: int) -> None:
    config = replace(TINY, num_heads=kv_heads * times, num_kv_heads=kv_heads, intermediate_size=inner)
    try:
        check_shard(config, ranks, expert_parallel=False)
    except SpilloverError as error:
        for typed in str(error).rpartition("it can be ")[2].split(", "):
            check_shard(config, int(typed), expert_parallel=False)
        return
    mine = Shard(0, ranks).planned(config)
    assert mine.num_heads * ranks == config.num_heads
    assert mine.num_heads % mine.num_kv_heads == 0


# The time of a step

@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(LINKS)), st.integers(1, 1 << 28), st.integers(1, 1 << 24), st.integers(1, 15))
def test_an_all_reduce_takes_longer_with_more_bytes_and_more_ranks(name: str, nbytes: int, more: int,
                                                                   ranks: int) -> None:
    link = LINKS[name]
    assert link.all_reduce(nbytes, ranks) <= link.all_reduce(nbytes + more, ranks)
    assert link.all_reduce(nbytes, ranks) < link.all_reduce(nbytes, ranks + 1)
    assert link.gather(nbytes, ranks) <= link.all_reduce(nbytes, ranks)


@pytest.mark.parametrize(("card", "flags"), [
    ("h200", {}), ("l4", {}), ("rtx-4090", {"gpu_memory": "20GB", "weights": "sequential"})])
def test_more_ranks_hold_more_and_compute_faster(tmp_path: Path, card: str, flags: dict[str, Any]) -> None:
    plans = [planned(tmp_path, LLAMA_8B, ranks, card, **flags).layouts[-1] for ranks in (1, 2, 4, 8)]
    for fewer, more in itertools.pairwise(plans):
        assert more.plan.weight_bytes < fewer.plan.weight_bytes
        assert more.plan.token_capacity >= fewer.plan.token_capacity
        assert more.replicated_bytes > fewer.replicated_bytes
        for slow, fast in zip(fewer.steps, more.steps, strict=False):
            if slow.name == fast.name:
                assert fast.rank_seconds <= slow.rank_seconds
                assert fast.all_reduce_seconds > slow.all_reduce_seconds
                assert 0 <= slow.share < 1


@pytest.mark.parametrize("flags", [{}, {"gpu_memory": "8GB", "max_model_len": 4096},
                                   {"gpu_memory": "8GB", "max_model_len": 4096, "kv_cache_dtype": "fp8"}])
def test_one_card_is_what_is_planned_for_one_card(tmp_path: Path, flags: dict[str, Any]) -> None:
    found = planned(tmp_path, LLAMA_8B, 1, "h100", **flags)
    card = find_card("h100")
    alone = plan_checkpoint(EngineConfig(model=str(tmp_path), device="cuda", **flags), tmp_path, LLAMA_8B, card.rates,
                            machine=card.machine()).plan
    (layout,) = found.layouts
    assert layout.plan == alone
    assert layout.replicated_bytes == 0
    assert alone.costs is not None
    prefill = next(step for step in layout.steps if step.name == "Prefill, 512 tokens")
    if alone.placement is None:
        assert decode_1(layout) == alone.costs.decode_1.seconds
        assert prefill.seconds == alone.costs.prefill.seconds
    else:
        assert alone.placement.predicted is not None
        assert 1 / decode_1(layout) == pytest.approx(alone.placement.predicted.decode_tokens_per_second)
        assert 512 / prefill.seconds == pytest.approx(alone.placement.predicted.prefill_tokens_per_second)


def test_a_mixture_on_one_card_is_what_is_planned_for_one_card(tmp_path: Path) -> None:
    found = planned(tmp_path, GPT_OSS_120B, 1, gpu_memory="32GB", weights="experts")
    (layout,) = found.layouts
    assert layout.plan.placement is not None
    predicted = layout.plan.placement.predicted
    assert predicted is not None
    assert 1 / decode_1(layout) == pytest.approx(predicted.decode_tokens_per_second)


def test_a_step_adds_up_twice_a_layer(tmp_path: Path) -> None:
    _, layout = planned(tmp_path, LLAMA_8B, 2).layouts
    link = LINKS["nvlink4"]
    gathered = link.gather(128256 * 2, 2)
    assert all_reduces(32) == 65
    assert layout.steps[0].all_reduce_seconds == pytest.approx(65 * link.all_reduce(4096 * 2, 2) + gathered)


def test_links_together_are_no_faster_than_the_memory_they_read() -> None:
    rates = find_card("rtx-5090").rates
    link = rates.host_to_device or 0.0
    host = HOSTS["desktop"]
    for ranks in (1, 2, 4, 8):
        mine = rank_rates(rates, host, ranks).host_to_device or 0.0
        assert mine * ranks == pytest.approx(min(ranks * link, host.bandwidth(ranks)))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([8, 64, 128]), st.integers(1, 8), st.sampled_from([1, 8, 64, 512]))
def test_the_busiest_rank_has_its_part_and_more(ranks: int, experts: int, k: int, tokens: int) -> None:
    load = busiest(experts, k, ranks, tokens)
    assert k / ranks * 0.999 <= load <= min(k, experts // ranks)
    assert busiest(experts, k, ranks, 64 * tokens) <= load * 1.01  # many tokens are evenly distributed


def test_experts_apart_are_never_faster_than_a_part_of_each(tmp_path: Path) -> None:
    model = {**GPT_OSS_120B, "intermediate_size": 4096}  # divisible without padding
    _, tensor, apart = planned(tmp_path, model, 4).layouts
    for even, uneven in zip(tensor.steps, apart.steps, strict=True):
        assert even.rank_seconds <= uneven.rank_seconds * 1.001
        assert even.all_reduce_seconds == uneven.all_reduce_seconds


# Compared with published measurements: a prediction must be within the given factor

@pytest.mark.parametrize(("link", "ranks", "nbytes", "microseconds"), [
    ("nvlink4", 2, 1 << 19, 7), ("nvlink4", 4, 1 << 19, 10), ("nvlink4", 4, 1 << 22, 38),
    ("nvlink5", 8, 1 << 14, 7), ("nvlink5", 8, 1 << 21, 26), ("nvlink5", 8, 1 << 26, 219),
    ("pcie4", 8, 8, 42)])
def test_all_reduces_are_as_published_within_a_tenth(link: str, ranks: int, nbytes: int, microseconds: float) -> None:
    assert within(1.1, LINKS[link].all_reduce(nbytes, ranks) * 1e6, microseconds)


@pytest.mark.parametrize(("model", "ranks", "share"), [
    (LLAMA_8B, 2, 0.18), (LLAMA_8B, 4, 0.34), (LLAMA_70B, 4, 0.13), (LLAMA_70B, 8, 0.25)])
def test_the_all_reduces_share_of_a_decode_step_is_within_a_third_of_the_known(tmp_path: Path, model: dict[str, Any],
                                                                              ranks: int, share: float) -> None:
    """The known shares are of one-shot times at 4 TB/s, with two all-reduces per layer and nothing else."""
    assert within(1.33, planned(tmp_path, model, ranks).layouts[-1].steps[0].share, share)


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 2.56), (4, 0.64)])
def test_streamed_decode_takes_as_long_as_the_links_do_within_a_tenth(tmp_path: Path, ranks: int,
                                                                      seconds: float) -> None:
    """The prediction for 70B in bfloat16, streamed from host memory over one link of 55 GB/s or four, is that close."""
    found = planned(tmp_path, LLAMA_70B, ranks, gpu_memory="9GB" if ranks == 1 else "4GB", weights="sequential",
                    max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=1).layouts[-1]
    assert found.plan.placement is not None
    assert within(1.1, decode_1(found), seconds)


@pytest.mark.parametrize(("model", "step", "rate"), [
    (LLAMA_8B, "Decode, 1 request", 286), (GPT_OSS_120B, "Decode, 1 request", 830),
    (GPT_OSS_120B, "Prefill, 512 tokens", 33_200)])
def test_limits_of_an_h200_are_as_known_within_a_tenth(tmp_path: Path, model: dict[str, Any], step: str,
                                                       rate: float) -> None:
    (layout,) = planned(tmp_path, model, 1).layouts
    assert within(1.1, next(one for one in layout.steps if one.name == step).tokens_per_second, rate)


# The printed output

def shown(folder: Path, *, as_json: bool = False, ranks: int = 2, card: str | None = "h100", link: str | None = None,
          model: dict[str, Any] = GPT_OSS_120B, **flags: Any) -> str:
    (folder / "config.json").write_text(json.dumps(model))
    console = Console(file=io.StringIO(), width=140)
    run_plan_ranks(console, EngineConfig(model=str(folder), tensor_parallel_size=ranks, **flags), card, link, as_json)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_stand_beside_their_sources(tmp_path: Path) -> None:
    page = shown(tmp_path, link="nvlink")
    for words in ("1 card", "2 cards", "2 cards, experts apart", "predicted", "vLLM PR", "data sheet", "nvlink4"):
        assert words in page


def test_the_json_has_every_layout_and_every_source(tmp_path: Path) -> None:
    data = json.loads(shown(tmp_path, as_json=True))
    assert data["prediction"] is True
    assert [layout["tensor_parallel_size"] for layout in data["layouts"]] == [1, 2, 2]
    assert set(data["sources"]) == {CARDS["h100"].title, "nvlink4", HOSTS["ddr5"].name}
    for layout in data["layouts"]:
        assert layout["device_bytes"] <= data["card"]["memory"]
        for step in layout["steps"]:
            assert step["seconds"] == pytest.approx(step["rank_seconds"] + step["all_reduce_seconds"])


def test_every_entry_of_the_table_names_its_source() -> None:
    for card in CARDS.values():
        assert card.source
        assert set(card.links) <= set(LINKS)
        assert ("measured" in card.source) == (card.measured is not None)
        # No rate exceeds the data sheet's.
        assert card.rates.memory_read <= card.memory_peak
        assert card.rates.flops("bfloat16") <= card.bfloat16_peak
        assert (card.rates.host_to_device or 0) <= card.link_peak
    assert all(entry.source for table in (LINKS, HOSTS) for entry in table.values())


def test_the_card_here_is_timed_and_none_here_is_said() -> None:
    measured = Rates("cuda", memory_read=1e12, float32=1e13, bfloat16=1e14, host_to_device=2e10)
    card = replace(GPU, cuda=(replace(GPU.cuda[0], name="NVIDIA H100 80GB HBM3"),))
    here = choose_setting(None, None, "auto", card, lambda: measured)
    assert here.measured_now
    assert here.rates == measured
    assert here.card.name == "h100"
    away = choose_setting(None, None, "auto", CPU, lambda: measured)
    assert away.card.name == "h200"
    assert "there is no GPU here" in away.notes[0]
    with pytest.raises(SpilloverError, match="give --link pcie4"):
        choose_setting(None, None, "auto", GPU, lambda: measured)
    assert choose_setting(None, "pcie4", "auto", GPU, lambda: measured).link.name == "pcie4"


@pytest.mark.parametrize(("flags", "said"), [
    ({"card": "h1000"}, "did you mean 'h100'"),
    ({"card": "l40s", "link": "nvlink"}, "use pcie4"),
    ({"device": "cpu"}, "leave --device cpu out"),
    ({"host_memory": "50%"}, "give a size such as 256GB"),
    ({"load_format": "null", "ranks": 1}, "leave it out"),
    ({"speculative_model": "/tmp"}, "leave speculation out"),
])
def test_what_cannot_be_planned_is_said_in_one_sentence(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SpilloverError, match=said) as error:
        shown(tmp_path, **flags)
    assert "\n" not in str(error.value)


def test_host_memory_is_of_all_ranks_together(tmp_path: Path) -> None:
    one, two = planned(tmp_path, LLAMA_8B, 2, host_memory="8GB").layouts
    assert one.plan.host_blocks == pytest.approx(two.plan.host_blocks, rel=0.01)  # blocks of half the bytes


def test_ranks_are_planned_though_one_card_cannot_be(tmp_path: Path) -> None:
    found = planned(tmp_path, LLAMA_70B, 8, "l4", weights="resident")
    assert [layout.shard.size for layout in found.layouts] == [8]
    assert found.refused[0][0] == "1 card"
    with pytest.raises(PlanError):
        planned(tmp_path, LLAMA_70B, 4, "l4", weights="resident")


def test_the_command_takes_ranks_a_card_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    called = [str(tmp_path), "--tensor-parallel-size", "4", "--card", "h100", "--link", "nvlink", "--json"]
    result = CliRunner().invoke(plan, called)
    assert result.exit_code == 0, result.output
    assert [layout["tensor_parallel_size"] for layout in json.loads(result.output)["layouts"]] == [1, 4]
    refused = CliRunner().invoke(plan, [str(tmp_path), "--quantizations", "--card", "h100"])
    assert isinstance(refused.exception, SpilloverError)
