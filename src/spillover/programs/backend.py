"""What programs ask of a model, whoever serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from spillover.programs.lifetime import Lifetime
from spillover.programs.prefix_gate import PrefixGate

OnText = Callable[[str], None]  # gets what an answer grew by; first when the prompt is computed, maybe with nothing
Message = dict[str, str]


@dataclass(frozen=True)
class TokenCounts:
    """Prompt tokens by where they came from. They add up to all tokens of all prompts."""

    computed: int = 0
    device: int = 0
    host: int = 0
    pool: int = 0
    disk: int = 0
    remote: int = 0
    cached: int = 0  # found in a cache that a server does not name

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def hit_rate(self) -> float:
        """Return the share of tokens that were not computed; 0 of none."""
        return 1 - self.computed / self.total if self.total else 0.0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{field.name: getattr(self, field.name) + getattr(other, field.name)
                              for field in fields(self)})


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer: as token ids where the backend tokenizes, else as text or messages."""

    ids: list[int] | None = None
    text: str = ""
    messages: tuple[Message, ...] | None = None  # of a chat; the last may be an assistant's, to be continued


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int] | None  # None: the server does not tell them
    finish_reason: str
    stop_reason: int | str | None = None
    counts: TokenCounts = TokenCounts()


@dataclass(frozen=True)
class Score:
    logprobs: list[float]  # of the scored tokens
    counts: TokenCounts


class Backend(Protocol):
    """A model, in this process or behind a URL. Every method may be called from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def gate(self) -> PrefixGate: ...

    @property
    def tokenizes(self) -> bool: ...  # whether encode, decode and score can be called

    @property
    def renders(self) -> bool: ...  # whether it also makes tokens of chats; where not, messages are sent

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Tokenise; `special`: with what the tokenizer itself puts around a text, such as bos."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation through the chat template, with the beginning of an answer behind it."""

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        """Continue a prompt. `options`: names of SamplingParams; regex, schema and grammar constrain the answer."""

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        """Return log probabilities of each prompt's tokens from position `start` on. They share what is before it."""

    def close(self) -> None: ...


def constraint(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the one constraint among a gen's options as `structured_outputs` takes it."""
    named = {"json": options.get("schema"), "regex": options.get("regex"), "grammar": options.get("grammar")}
    return {name: value for name, value in named.items() if value is not None} or None


CONSTRAINTS = ("schema", "regex", "grammar")
