"""Sampling defaults come from the model, are valid, and can be turned off or replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover import LLM, SamplingParams
from spillover.errors import SpilloverError
from spillover.models.generation_config import FIELDS, sampling_defaults
from spillover.models.hub.store import resolve


def folder_with(path: Path, **config: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_they_are_read_from_the_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, eos_token_id=[1])
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_defaults(tmp_path, "none") == {}
    other = tmp_path / "other"
    other.mkdir()
    folder_with(other, temperature=0.1)
    assert sampling_defaults(tmp_path, str(other)) == {"temperature": 0.1}
    with pytest.raises(SpilloverError, match="--generation-config takes auto, none, or a folder"):
        sampling_defaults(tmp_path, str(tmp_path / "absent"))


def test_a_model_that_is_not_to_be_sampled_is_greedy(tmp_path: Path) -> None:
    assert sampling_defaults(folder_with(tmp_path, do_sample=False, temperature=0.6)) == {"temperature": 0.0}
    (tmp_path / "generation_config.json").unlink()
    assert sampling_defaults(tmp_path) == {}


values = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(), st.text(max_size=3),
                   st.just([1]))


@settings(max_examples=200, deadline=None)
@given(config=st.dictionaries(st.sampled_from(FIELDS), values))
def test_whatever_a_file_says_the_defaults_are_valid(tmp_path_factory: pytest.TempPathFactory,
                                                     config: dict[str, Any]) -> None:
    folder = folder_with(tmp_path_factory.mktemp("model"), **config)
    defaults = sampling_defaults(folder)
    params = SamplingParams(**defaults)  # type: ignore[arg-type]  # raises for invalid values
    assert {name: getattr(params, name) for name in defaults} == defaults


def test_the_default_model_has_its_authors_recommendation() -> None:
    assert sampling_defaults(resolve(None)) == {"temperature": 0.2, "top_p": 0.9}
    with LLM(load_format="null", max_model_len=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)
    with LLM(load_format="null", max_model_len=64, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
