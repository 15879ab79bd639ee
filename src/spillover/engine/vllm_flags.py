"""Keywords of vLLM's `LLM` that this engine does not have: values that change nothing are accepted, others are rejected
with a message that says what to use instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spillover.errors import SpilloverError

_STAGES = "layers are not divided among devices; use tensor_parallel_size, which divides every layer"
_REPLICAS = "an engine is one replica; `spill serve --replicas N` starts N of them and routes to them"
_BY_RANKS = "ranks are processes of this machine, and find each other; leave it out"
_ADAPTERS = "LoRA adapters are not supported yet; leave it out, or give a model with the adapter merged"
_TEXT = "only text models are supported; leave it out"
_COMPILED = "kernels are compiled and captured automatically; leave it out, or turn graphs off with enforce_eager=True"
_NO_CODE = "no code of a checkpoint is ever run; leave it out"
_FOLDER = "give the folder of that revision as the model"
_GRAMMARS = "structured outputs have one backend; leave it out"
_BY_ITSELF = "there is no such switch; leave it out"

# Matches keywords in these messages: gpu_memory='20GB', enforce_eager=True, tensor_parallel_size.
_KEYWORD = re.compile(r"\b([a-z]+(?:_[a-z]+)+|disk(?==)|remote(?==))(?:='([^']*)'|=True)?")

# Keyword -> the values that change nothing here, and the message for others. None is always accepted.
_KNOWN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": ((1,), _STAGES),
    "data_parallel_size": ((1,), _REPLICAS),
    "distributed_executor_backend": (("uni", "mp"), _BY_RANKS),
    "disable_custom_all_reduce": ((False, True), _BY_RANKS),
    "gpu_memory_utilization": ((), "the budget is a size or a share of the device: use gpu_memory='20GB' or "
                                   "gpu_memory='90%'"),
    "kv_cache_memory_bytes": ((), "one budget holds weights and KV: use gpu_memory='20GB', or num_gpu_blocks_override"),
    "swap_space": ((0,), "KV that leaves the device goes to host memory: use host_memory='8GB'"),
    "kv_transfer_config": ((), "KV tiers have separate flags: use host_memory='8GB', host_pool='auto' (shared by "
                               "engines), disk='/path:100GB' or remote='redis://host:6379'"),
    "scheduling_policy": (("fcfs",), "use schedule_policy='priority'"),
    "trust_remote_code": ((False,), _NO_CODE),
    "revision": (("main",), _FOLDER),
    "tokenizer_revision": (("main",), _FOLDER),
    "code_revision": (("main",), _FOLDER),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer is the model's tokenizer.json; leave it out"),
    "download_dir": ((), "set the environment variable SPILLOVER_CACHE instead"),
    "hf_overrides": (({},), "edit the model folder's config.json instead"),
    "hf_token": ((), "set the environment variable HF_TOKEN instead"),
    "enable_lora": ((False,), _ADAPTERS),
    "max_loras": ((), _ADAPTERS),
    "max_lora_rank": ((), _ADAPTERS),
    "limit_mm_per_prompt": (({},), _TEXT),
    "mm_processor_kwargs": (({},), _TEXT),
    "enable_sleep_mode": ((False, True), _BY_ITSELF),
    "disable_log_stats": ((False, True), _BY_ITSELF),
    "task": (("auto", "generate"), "text generation is the one task; leave it out"),
    "runner": (("auto", "generate"), "text generation is the one task; leave it out"),
    "compilation_config": (({}, 0), _COMPILED),
    "max_seq_len_to_capture": ((), _COMPILED),
    "cuda_graph_sizes": (([],), _COMPILED),
    "guided_decoding_backend": (("auto", "guidance"), _GRAMMARS),
    "structured_outputs_config": (({},), _GRAMMARS),
    "logits_processors": (([],), "a request may have a logit bias or structured outputs instead"),
}


def is_redundant(name: str, value: Any) -> bool:
    """Return whether vLLM's keyword has a value that changes nothing here; SpilloverError for another value."""
    if name not in _KNOWN:
        return False
    harmless, instead = _KNOWN[name]
    if value is not None and value not in harmless:
        raise SpilloverError(f"vLLM's {name}={value!r} is not supported here: {instead}")
    return True


def replacement_for(flag: str) -> str | None:
    """Return what to use instead of a flag of vLLM's server, such as --swap-space; None if the flag is unknown."""
    name = flag.removeprefix("--").replace("-", "_")
    if name not in _KNOWN:
        return None
    return _KEYWORD.sub(lambda found: "--" + found[1].replace("_", "-") + (f" {found[2]}" if found[2] else ""),
                        _KNOWN[name][1])
