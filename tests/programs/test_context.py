"""Random conversations with several chat templates: the prompt is always the template's, and starts with the tokens
computed so far whenever the template extends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from spillover.models.tokenizer import Tokenizer
from spillover.programs.backend import Answer, Message, OnText, Prompt, Score
from spillover.programs.context import Context
from spillover.programs.lifetime import Lifetime
from spillover.programs.prefix_gate import PrefixGate

TEMPLATES = {
    "chatml": "{% if messages[0].role != 'system' %}<|s|>system\nBe kind.<|e|>\n{% endif %}{% for m in messages %}"
              "<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
    "trimmed": "<|s|>{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|e|>{% endfor %}"
               "{% if add_generation_prompt %}assistant: {% endif %}",
    "forgets thoughts": "{% for m in messages %}<|s|>{{ m.role }}\n{% if m.role == 'assistant' and '>' in m.content "
                        "and not loop.last %}{{ m.content.split('>')[-1] }}{% else %}{{ m.content }}{% endif %}<|e|>"
                        "{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
    "instructions": "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<|e|>{% else %}"
                    "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
}
ALPHABET = "ab >.\n"


def make_tokenizer(template: str) -> Tokenizer:
    """Return a tokenizer of bytes with two merges, so that a text has more than one tokenisation."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merged = {**letters, "ab": len(letters), "aab": len(letters) + 1}
    backend = tokenizers.Tokenizer(models.BPE(vocab=merged, merges=[("a", "b"), ("a", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|s|>", "<|e|>"])
    return Tokenizer(backend, {"eos_token": "<|e|>"}, (), {"default": template}, "made up")


class TokenizerBackend:
    """A backend that renders and tokenises, but generates nothing."""

    name = "made up"
    tokenizes = renders = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.gate = PrefixGate()

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(self.tokenizer.apply_chat_template(messages))

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        raise NotImplementedError

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


TURNS = st.lists(st.tuples(
    st.text(ALPHABET, min_size=1, max_size=8),  # the user's message
    st.text(ALPHABET, max_size=4),  # the start of the assistant's message
    st.text(ALPHABET, max_size=8),  # generated text
    st.booleans(),  # one token per byte, which differs from its encoding
    st.sampled_from(["length", "eos", "stop"])), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=TURNS, system=st.booleans())
def test_the_prompt_is_what_the_template_says(kind: str, turns: list[tuple[str, str, str, bool, str]],
                                              system: bool) -> None:
    backend = TokenizerBackend(make_tokenizer(TEMPLATES[kind]))
    context = Context(backend)
    messages: list[Message] = []

    def say(role: Any, text: str) -> None:
        context.open(role)
        context.add(text)
        context.close()
        messages.append({"role": role, "content": text})

    if system:
        say("system", "Say a and b.")
    known: list[int] = []
    rebuilds = 0
    for said, begun, generated, by_bytes, end in turns:
        say("user", said)
        rendered = backend.tokenizer.apply_chat_template(messages)
        context.open("assistant")
        context.add(begun)
        ids = context.prompt().ids
        assert ids is not None
        assert backend.decode(ids) == rendered + begun
        if rendered.startswith(backend.decode(known)):
            assert ids[:len(known)] == known
        else:
            rebuilds += 1
            assert ids == backend.encode(rendered) + backend.encode(begun)
        pieces = list(generated) if by_bytes else [generated]
        tokens = [token for piece in pieces for token in backend.encode(piece)]
        ended = {"length": [], "eos": backend.encode("<|e|>"), "stop": backend.encode("!?")}[end]
        context.answer(Answer(generated, tokens + ended, "length" if end == "length" else "stop",
                              "!" if end == "stop" else None))
        known = ids + tokens
        context.close()
        messages.append({"role": "assistant", "content": begun + generated})
    assert context.messages == messages
    assert context.rebuilds == rebuilds
