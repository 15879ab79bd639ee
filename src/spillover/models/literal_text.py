"""Encoding of untrusted text in a prompt without special tokens: `<|im_end|>` in a message is ten characters."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from spillover.errors import CheckpointError
from spillover.models.tokenizer import Tokenizer, encode


class LiteralText:
    """A marker of special tokens in messages before a chat template is applied, and an encoder of the rendered text in
    which only the template's own special tokens become tokens.

    A copy of the tokenizer has the special tokens under secret names. Everything else about it is the same, so text
    without marks has the same token ids as with the original tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        nonce = secrets.token_hex(8)
        special = {index: token.content for index, token in tokenizer.backend.get_added_tokens_decoder().items()
                   if token.special}
        self._names = {text: f"<{nonce}:{index}>" for index, text in special.items()}
        texts = sorted(self._names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
        # Letters and digits only, as templates may trim text or write it as JSON.
        self._marks = {text: f"x{nonce}n{index}x" for index, text in enumerate(texts)}
        self._marked = {mark: text for text, mark in self._marks.items()}
        self._mark = re.compile(f"x{nonce}n[0-9]+x")
        self._backend = _renamed(tokenizer.backend, self._names)
        wrong = [text for index, text in special.items() if self._backend.token_to_id(self._names[text]) != index]
        if wrong:
            raise CheckpointError(f"this tokenizer's special tokens ({wrong[0]}) cannot be told from text; leave "
                                  "--no-special-tokens-in-user-text out")

    def mark(self, value: Any) -> Any:
        """Return the value with every special token in its strings marked; keys of dictionaries are not changed."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._marks[found[0]], value)
        if isinstance(value, Mapping):
            return {name: self.mark(one) for name, one in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(one) for one in value]
        return value

    def encode(self, rendered: str, add_special_tokens: bool) -> list[int]:
        own = self._special.sub(lambda found: self._names[found[0]], rendered)
        text = self._mark.sub(lambda found: self._marked.get(found[0], found[0]), own)
        return encode(self._backend, text, add_special_tokens)


def _renamed(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer in which these added tokens have other names and the same ids."""
    made = json.loads(backend.to_str())
    for token in made["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"]) if token["special"] else token["content"]
    vocabulary = made["model"].get("vocab")
    if isinstance(vocabulary, dict):
        made["model"]["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
    elif isinstance(vocabulary, list):  # entries [piece, score]; the index is the id
        made["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    unknown = made["model"].get("unk_token")
    if unknown in names:
        made["model"]["unk_token"] = names[unknown]
    return tokenizers.Tokenizer.from_str(json.dumps(made))
