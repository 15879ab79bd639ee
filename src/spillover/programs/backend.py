"""The interface between programs and a model, and the requests and answers it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from spillover.programs.lifetime import Lifetime
from spillover.programs.prefix_gate import PrefixGate

OnText = Callable[[str], None]  # gets each new part of an answer; first when the prompt is computed, maybe empty
Message = dict[str, str]


@dataclass(frozen=True)
class TokenCounts:
    """Prompt tokens by where their KV came from. The counts add up to all tokens of all prompts."""

    computed: int = 0
    device: int = 0
    host: int = 0
    pool: int = 0
    disk: int = 0
    remote: int = 0
    cached: int = 0  # found in a cache whose tier the server does not report

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def hit_rate(self) -> float:
        """Return the share of tokens that were not computed; 0 if there are no tokens."""
        return 1 - self.computed / self.total if self.total else 0.0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{field.name: getattr(self, field.name) + getattr(other, field.name)
                              for field in fields(self)})


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request: token ids if the backend tokenizes, otherwise text or messages."""

    ids: list[int] | None = None
    text: str = ""
    messages: tuple[Message, ...] | None = None  # messages of a chat; the last may be an assistant's, to be continued


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int] | None  # None if the server does not return them
    finish_reason: str
    stop_reason: int | str | None = None
    counts: TokenCounts = TokenCounts()


@dataclass(frozen=True)
class Score:
    logprobs: list[float]  # log probabilities of the scored tokens
    counts: TokenCounts


class Backend(Protocol):
    """A model, in this process or behind a URL. Every method may be called from several threads concurrently."""

    @property
    def name(self) -> str: ...

    @property
    def gate(self) -> PrefixGate: ...

    @property
    def tokenizes(self) -> bool: ...  # whether encode, decode and score can be called

    @property
    def renders(self) -> bool: ...  # whether it tokenizes chats too; if not, messages are sent

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Tokenise; with `special` including what the tokenizer adds to a text, such as bos."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation rendered by the chat template, with the beginning of an answer."""

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        """Continue a prompt. `options` has names of SamplingParams; regex, schema and grammar constrain the answer."""

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        """Return log probabilities of each prompt's tokens from position `start` on. The tokens before are the same."""

    def close(self) -> None: ...


def constraint(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the constraint among a gen's options in the form of `structured_outputs`; None if there is none."""
    named = {"json": options.get("schema"), "regex": options.get("regex"), "grammar": options.get("grammar")}
    return {name: value for name, value in named.items() if value is not None} or None


CONSTRAINTS = ("schema", "regex", "grammar")
