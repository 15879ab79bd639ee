"""A target for a model in this process, queried through `LLM`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import SpilloverError
from spillover.eval.target import Prompt
from spillover.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from spillover.engine.llm import LLM

Visit = Callable[[int, "Tensor"], None]  # gets a position and the logits [P, V] that predict the tokens from there on


class EngineTarget:
    """A target that owns its model: `close` closes it."""

    def __init__(self, llm: LLM, name: str) -> None:
        if llm.tokenizer is None:
            raise SpilloverError("evaluation needs the tokenizer: leave --skip-tokenizer-init out")
        self.name = name
        self.max_len: int | None = llm.plan.max_model_len
        self._llm = llm
        self._tokenizer: Tokenizer = llm.tokenizer
        first = self._tokenizer.bos_token_id
        self.prefix = first if first is not None else self._tokenizer.eos_token_id
        self._lock = threading.Lock()
        self._observes = False
        self._visits: dict[tuple[int, ...], list[Visit]] = {}  # by prompt; two requests may have the same prompt

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, special)

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        # The first prompt leaves the shared prefix in the cache for the others.
        return [rows for part in (prompts[:1], prompts[1:]) for rows in self._scored(part)]

    def _scored(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        return [[row[token] for row, token in zip(rows, prompt.token_ids[prompt.start:], strict=True)]
                for prompt, rows in zip(prompts, self._rows(prompts, 0), strict=True)]

    def top(self, prompt: Prompt, count: int) -> list[dict[int, float]]:
        return self._rows([prompt], count)[0]

    def visit(self, prompt: Prompt, visit: Visit) -> list[float]:
        """Score a prompt, passing `visit` the logits that predict each of its scored tokens."""
        key = tuple(prompt.token_ids)
        with self._lock:
            self._visits.setdefault(key, []).append(visit)
            if not self._observes:  # installed only once, when no step can be waiting for the lock
                self._llm.observe_prompt_logits(self._observe)
                self._observes = True
        try:
            return self._scored([prompt])[0]
        finally:
            with self._lock:
                self._visits[key].remove(visit)

    def complete(self, text: str, max_tokens: int, stop: Sequence[str]) -> str:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=tuple(stop))
        return self._llm.generate([text], params, use_tqdm=False)[0].outputs[0].text

    def chat(self, text: str, max_tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return self._llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)[0].outputs[0].text

    def close(self) -> None:
        self._llm.close()

    def _rows(self, prompts: Sequence[Prompt], count: int) -> list[list[dict[int, float]]]:
        """Return, for every prompt and every scored token, log probabilities by token id."""
        params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=count, prompt_logprobs_start=prompt.start,
                                 detokenize=False) for prompt in prompts]
        outputs = self._llm.generate([prompt.token_ids for prompt in prompts], params, use_tqdm=False)
        return [[{token: value.logprob for token, value in (row or {}).items()}
                 for row in (output.prompt_logprobs or [])[prompt.start:]]
                for output, prompt in zip(outputs, prompts, strict=True)]

    def _observe(self, prompt: Sequence[int], position: int, logits: Tensor) -> None:
        with self._lock:
            visits = list(self._visits.get(tuple(prompt), ()))
        for visit in visits:
            visit(position, logits)
