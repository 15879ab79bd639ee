"""Every engine flag, once: its name, default and help. The command line and `LLM(...)` both read this class."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from spillover.errors import SpilloverError


def _flag(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """None means: chosen by the planner from the model and the machine, and printed with the plan."""

    model: str | None = _flag(None, "Model: a name from `spill pull`, a Hugging Face folder, a GGUF file or a hub id.")
    tokenizer: str | None = _flag(None, "Tokenizer folder or GGUF file, if not the model's own.")
    skip_tokenizer_init: bool = _flag(False, "Take and give token ids only; no tokenizer is loaded.")
    load_format: str = _flag("auto", "auto reads the checkpoint; dummy makes random weights of the true shape; null "
                             "has no model and answers at once with meaningless words, to measure all the rest.",
                             ("auto", "dummy", "null"))
    dtype: str = _flag("auto", "Compute type; auto is float32 on a CPU and the stored type on a GPU.",
                       ("auto", "float32", "bfloat16", "float16"))
    device: str = _flag("auto", "Where to compute.", ("auto", "cpu", "cuda"))
    gpu_memory: str | None = _flag(None, "Budget of the device tier, e.g. 8GB, for weights, KV and workspace.")
    max_model_len: int | None = _flag(None, "Longest prompt plus output, in tokens.")
    max_num_seqs: int | None = _flag(None, "Most requests in one step.")
    max_num_batched_tokens: int | None = _flag(None, "Most tokens in one step, prefill chunks and decodes together.")
    block_size: int = _flag(16, "Tokens in a KV block; a multiple of 8.")
    num_gpu_blocks_override: int | None = _flag(None, "Use exactly this many KV blocks on the device.")
    enable_prefix_caching: bool = _flag(True, "Reuse the KV blocks of prompts that share a prefix.")
    enable_chunked_prefill: bool = _flag(True, "Split long prompts over steps so that decodes are not held up.")
    batching: str = _flag("continuous", "continuous admits requests at every step; static waits for the batch to end.",
                          ("continuous", "static"))
    schedule_policy: str = _flag("fcfs", "Order of the waiting queue: first come, longest prefix match, prefix "
                                 "subtree weight, or the request's priority.",
                                 ("fcfs", "lpm", "dfs-weight", "priority"))
    async_scheduling: bool = _flag(True, "Prepare the next step while the current one runs.")
    watermark: float = _flag(0.01, "Share of KV blocks kept free when a request is admitted, against thrashing.")
    seed: int = _flag(0, "Seed of requests that bring none, and of dummy weights.")

    @classmethod
    def from_flags(cls, **flags: Any) -> EngineConfig:
        """As the constructor, but a mistyped name is answered with the nearest right one."""
        names = [item.name for item in dataclasses.fields(cls)]
        for flag in flags:
            if flag not in names:
                near = difflib.get_close_matches(flag, names, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(names)}"
                raise SpilloverError(f"There is no engine flag '{flag}'{hint}")
        return cls(**flags)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value not in choices:
                raise SpilloverError(f"{_option(item.name)} takes one of {', '.join(choices)}; got {value!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpilloverError(f"{_option(name)} must be at least 1; got {value}")
        if self.block_size < 8 or self.block_size % 8:
            raise SpilloverError(f"--block-size must be a multiple of 8; got {self.block_size}")
        if not 0 <= self.watermark < 1:
            raise SpilloverError(f"--watermark is a share from 0 up to 1; got {self.watermark}")
        if self.gpu_memory is not None and self.num_gpu_blocks_override is not None:
            raise SpilloverError("--gpu-memory and --num-gpu-blocks-override contradict each other: give one of them")
        if (not self.enable_chunked_prefill and self.max_num_batched_tokens is not None
                and self.max_model_len is not None and self.max_num_batched_tokens < self.max_model_len):
            raise SpilloverError(f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least "
                                 f"--max-model-len ({self.max_model_len}); got {self.max_num_batched_tokens}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
