"""A flag never acts as another one: misspelt policies are rejected under every plan, unused flags are reported."""

from __future__ import annotations

import logging
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.engine.assemble import assemble
from spillover.engine.config import ADMISSIONS, POLICIES, WEIGHTS, EngineConfig
from spillover.engine.planned import plan_model
from spillover.errors import SpilloverError
from support import starved

OWN = "support.policy_of_my_own:Backwards"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: starved.write_config(tmp_path_factory.mktemp(name), name) for name in ("llama", "mixtral")}


def flags(folder: str, **more: Any) -> EngineConfig:
    return EngineConfig(model=folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=128,
                        num_gpu_blocks_override=16, **more)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize(("policy", "words"), [
    ("support.policy_of_my_own:Backward", "did you mean 'Backwards'"),
    ("policy_of_me:Backwards", "No module named 'policy_of_me'"),
])
def test_a_misspelt_class_is_refused_where_all_weights_are_resident(
    folders: dict[str, str], model: str, policy: str, words: str
) -> None:
    with pytest.raises(SpilloverError, match=f"--policy {policy} could not be made.*{words}"):
        plan_model(flags(folders[model], policy=policy))
    with pytest.raises(SpilloverError, match=f"--spill-admission .*{policy}"):
        plan_model(flags(folders[model], spill_admission=policy, host_memory="64MB"))


@given(typed=st.text(string.ascii_lowercase + "-:", min_size=1, max_size=12),
       name=st.sampled_from(["policy", "spill_admission", "weights", "schedule_policy", "batching", "restore"]))
@settings(max_examples=200, deadline=None)
def test_no_word_that_is_not_a_value_is_taken(typed: str, name: str) -> None:
    field = EngineConfig.__dataclass_fields__[name]
    known = {"policy": POLICIES, "spill_admission": ADMISSIONS, "weights": WEIGHTS}.get(name, field.metadata["choices"])
    module, _, cls = typed.partition(":")
    looks_like_a_class = name in ("policy", "spill_admission") and "-" not in typed and module and cls.count(":") == 0
    if typed in known or (looks_like_a_class and cls):
        return
    with pytest.raises(SpilloverError, match="--" + name.replace("_", "-")):
        EngineConfig(**{name: typed}, host_memory="64MB")


@pytest.mark.parametrize(("given", "near"), [
    ({"policy": "lur"}, "lru"), ({"policy": "next_layer"}, "next-layer"), ({"weights": "sequental"}, "sequential"),
    ({"schedule_policy": "lmp"}, "lpm"), ({"host_memory": "1GB", "spill_admission": "second_use"}, "second-use"),
])
def test_the_value_that_was_probably_meant_is_named(given: dict[str, Any], near: str) -> None:
    with pytest.raises(SpilloverError, match=f"did you mean '{near}'"):
        EngineConfig(**given)


@pytest.mark.parametrize("policy", [*(name for name in POLICIES if name != "lru"), OWN])
def test_a_policy_without_a_choice_is_noted(folders: dict[str, str], policy: str) -> None:
    dense, mixture = (plan_model(flags(folders[name], policy=policy)).plan for name in ("llama", "mixtral"))
    assert dense.notes == (f"--policy {policy} has no effect: the model has no experts",)
    assert mixture.notes == (f"--policy {policy} has no effect: all experts are resident on the device",)
    assert plan_model(flags(folders["mixtral"])).plan.notes == ()


def test_a_policy_that_pages_experts_is_not_noted(folders: dict[str, str]) -> None:
    config = EngineConfig(model=folders["mixtral"], load_format="dummy", skip_tokenizer_init=True, device="cpu",
                          max_model_len=128)
    whole = plan_model(config).plan
    budget = str((whole.weight_bytes + whole.workspace_bytes) * 3 // 4)
    paged = plan_model(EngineConfig(model=folders["mixtral"], load_format="dummy", skip_tokenizer_init=True,
                                    device="cpu", weights="experts", policy="lfru", gpu_memory=budget)).plan
    assert paged.placement is not None
    assert paged.placement.slot_layers
    assert paged.notes == ()


def test_other_flags_without_effect_are_noted(folders: dict[str, str]) -> None:
    plan = plan_model(flags(folders["llama"], paged_tokens=4, schedule_policy="lpm", enable_prefix_caching=False,
                            graph_capture="start", fast=True)).plan
    assert [note.split()[0] for note in plan.notes] == ["--fast", "--paged-tokens", "--schedule-policy",
                                                        "--graph-capture"]


def test_whoever_does_not_see_the_plan_is_warned(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assemble(flags(folders["llama"], policy="lfru")).engine.close()
    assert "--policy lfru has no effect" in caplog.text
