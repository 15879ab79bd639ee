"""The interface between tasks and the model they evaluate, in this process or behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    """Token ids of which those from `start` on are scored, each given all before it; start is 1 or more."""

    token_ids: list[int]
    start: int


class Target(Protocol):
    """A model under evaluation. Every method may be called from several threads at once, whose requests are batched."""

    @property
    def name(self) -> str: ...

    @property
    def max_len(self) -> int | None: ...  # maximum tokens of prompt and answer together; None if unknown

    @property
    def prefix(self) -> int | None: ...  # token before a text: bos, else eos; None if unknown

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokenise; `special`: with the tokens that the tokenizer puts around a text, such as bos."""

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Return log probabilities of the scored tokens, one list per prompt. Prompts may share a prefix."""

    def top(self, prompt: Prompt, count: int) -> list[dict[int, float]]:
        """Return, for every scored token, its log probability and those of the `count` likeliest at its position."""

    def complete(self, text: str, max_tokens: int, stop: Sequence[str]) -> str:
        """Continue a text greedily; the stop string is not part of the answer."""

    def chat(self, text: str, max_tokens: int) -> str:
        """Answer one message greedily, through the chat template."""

    def close(self) -> None: ...


def fitted(target: Target, prompt: Prompt) -> Prompt:
    """Cut a prompt that is too long at its front, keeping at least one token before the scored ones."""
    if target.max_len is None:
        return prompt
    over = min(len(prompt.token_ids) - (target.max_len - 1), prompt.start - 1)  # one token is always sampled
    return prompt if over <= 0 else Prompt(prompt.token_ids[over:], prompt.start - over)
