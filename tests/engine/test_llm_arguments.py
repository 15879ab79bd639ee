"""Invalid arguments of an `LLM` are rejected with a message that says what to pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spillover
from spillover import LLM, SamplingParams
from spillover.engine.config import EngineConfig
from spillover.errors import RequestError, SpilloverError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2, "torch_dtype": "float32",
}
PROMPT = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
MESSAGES = r"\[\{'role': 'user', 'content': 'Hello'\}\]"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with LLM(folder, load_format="null", skip_tokenizer_init=True, tensor_parallel_size=1) as made:
        yield made


@pytest.mark.parametrize(("use", "words"), [
    (lambda llm: llm.generate(5), rf"{PROMPT}; got 5 \(int\)$"),
    (lambda llm: llm.generate(None), rf"{PROMPT}; got None \(NoneType\)$"),
    (lambda llm: llm.generate(b"abc"), rf"{PROMPT}; got b'abc' \(bytes\)$"),
    (lambda llm: llm.generate([[1], None]), rf"{PROMPT}; got None \(NoneType\)$"),
    (lambda llm: llm.generate([[1], 5]), rf"{PROMPT}; got 5 \(int\)$"),
    (lambda llm: llm.generate({"text": "a"}), "'text' is not supported"),
    (lambda llm: llm.generate({}), PROMPT),
    (lambda llm: llm.generate({"prompt": 5}), PROMPT),
    (lambda llm: llm.generate({"prompt_token_ids": "abc"}), PROMPT),
    (lambda llm: llm.generate([1, "a"]), "whole numbers"),
    (lambda llm: llm.generate([1], {"temperature": 0}), r"SamplingParams\(temperature=0, max_tokens=64\)"),
    (lambda llm: llm.generate([1], [SamplingParams(), 3]), "or a list of them; got 3"),
    (lambda llm: llm.generate([[1], [2]], [SamplingParams()]), "2 prompts but 1 sampling parameters"),
    (lambda llm: llm.generate([[1], [2]], priority=[1]), "a whole number per prompt, so 2 of them"),
    (lambda llm: llm.generate([[1], [2]], priority=1), "a whole number per prompt, so 2 of them"),
    (lambda llm: llm.stream(5), PROMPT),
    (lambda llm: llm.stream([1], 5), "sampling_params is a SamplingParams"),
    (lambda llm: llm.chat("hello"), rf"{MESSAGES}, or a list of such lists; got 'hello' \(str\)$"),
    (lambda llm: llm.chat(["hello"]), MESSAGES),
    (lambda llm: llm.chat({"role": "user", "content": "a"}), MESSAGES),
    (lambda llm: llm.chat(None), MESSAGES),
    (lambda llm: llm.chat([[], []]), MESSAGES),
    (lambda llm: llm.stream_chat("hello"), MESSAGES),
    (lambda llm: llm.stream_chat([]), MESSAGES),
])
def test_what_to_pass_is_said(llm: LLM, use: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        use(llm)
    assert "\n" not in str(refused.value)


def test_what_is_a_prompt_is_taken(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    for prompts, count in (([], 0), ([1, 2], 1), ((1, 2), 1), (np.array([1, 2]), 1), ([[1], [2]], 2), (iter([[1]]), 1),
                           ({"prompt_token_ids": [1]}, 1), ({"prompt": "a", "prompt_token_ids": [1]}, 1)):
        assert len(llm.generate(prompts, params, use_tqdm=False)) == count  # type: ignore[arg-type]
    assert llm.chat([]) == []


@pytest.mark.parametrize(("flags", "words"), [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported here: layers are not divided"),
    ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be at least 1; got 0"),
    ({"gpu_memory_utilization": 0.9}, "use gpu_memory='20GB'"),
    ({"swap_space": 4}, "use host_memory='8GB'"),
    ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
    ({"enable_lora": True}, "LoRA adapters are not supported yet"),
    ({"scheduling_policy": "priority"}, "use schedule_policy='priority'"),
    ({"max_num_sequences": 3}, "did you mean max_num_seqs or"),
    ({"xyzzy": 3}, "`spill serve --help` lists"),
    ({"max_num_seqs": "8"}, r"max_num_seqs is a whole number; got '8' \(str\)"),
    ({"max_num_seqs": True}, "max_num_seqs is a whole number; got True"),
    ({"gpu_memory": 8}, "gpu_memory is a size such as '8GB'; got 8"),
    ({"enforce_eager": "no"}, "enforce_eager is True or False; got 'no'"),
    ({"disk": 5}, "disk is a string; got 5"),
    ({"watermark": "a"}, "watermark is a number; got 'a'"),
    ({"uvm_oversubscribe": True, "weights": "experts"}, "give --weights uvm too, or leave it out"),
    ({"weights": "uvm-advise", "tensor_parallel_size": 2}, "--weights uvm-advise works with one rank only"),
    ({"weights": "uvm", "paged_tokens": 2}, "--weights uvm has no such slots"),
])
def test_flags_that_are_not_there_are_answered_briefly(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SpilloverError, match=words) as refused:
        EngineConfig.from_flags(**flags)
    assert len(str(refused.value)) < 160


def test_vllms_words_for_off_are_taken() -> None:
    taken = EngineConfig.from_flags(tensor_parallel_size=1, trust_remote_code=False, quantization=None, swap_space=0,
                                    enable_lora=False, disable_log_stats=True, max_num_seqs=3, cpu_offload_gb=2)
    assert taken == EngineConfig(max_num_seqs=3, cpu_offload_gb=2)
    assert EngineConfig.from_flags(model=Path("/a/b")).model == "/a/b"


def test_the_package_shows_what_it_has() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "RequestOutput"} <= set(dir(spillover))
    assert all(getattr(spillover, name) is not None for name in dir(spillover))
