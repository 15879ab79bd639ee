"""From a body to block keys: equal to the engine's digests, different for another salt, no error for any input."""

from __future__ import annotations

import itertools
import json
from typing import Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.keys import TEXT, TokenSpace, read_prompt
from spillover.cluster.segments import SegmentEncoder
from spillover.memory.kv.digest import prefix_keys, root_digest
from spillover.memory.kv.event_wire import block_hash
from spillover.models.tokenizer import Tokenizer

IDENTITY = b"a model's own"
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)


TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def letters() -> Tokenizer:
    """Return a tokenizer with a token per byte, and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(backend, {}, (), {"default": TEMPLATE}, "a test")


SPACE = TokenSpace(IDENTITY, 4, letters(), segments=SegmentEncoder(letters()))


def with_specials(first_is_marked: bool) -> Tokenizer:
    """Return `letters` with special tokens for turns; a mark on the first word makes tokens depend on position."""
    backend = letters().backend
    if first_is_marked:
        names = {each: place for place, each in enumerate("\u2581abcdefghijklmnopqrstuvwxyz")}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, {}, (), {"default": TEMPLATE}, "a test")


SPECIALS = with_specials(False), with_specials(True)
ENCODERS = [SegmentEncoder(each) for each in SPECIALS]


@given(texts=st.lists(st.tuples(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "", " "]),
                                st.text(max_size=6).map(lambda text: text * 30)), max_size=8), room=st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_pieces_between_special_tokens_make_the_same_tokens_first_and_again(texts: list[tuple[str, str]],
                                                                           room: int) -> None:
    for tokenizer, encoder in zip(SPECIALS, ENCODERS, strict=True):
        encoder._known.clear()
        encoder._characters, encoder._most = 0, room
        text = "".join(itertools.chain.from_iterable(texts))
        for _ in range(2):
            assert encoder.encode(text) == tokenizer.encode(text, False)
        assert encoder._characters == sum(map(len, encoder._known)) <= room


def test_only_tokenizers_that_allow_it_are_cut() -> None:
    assert [each.cuts for each in (*ENCODERS, SegmentEncoder(letters()))] == [True, False, False]


def keys(body: dict[str, Any], path: str = "/v1/completions") -> list[int]:
    return list(read_prompt(path, json.dumps(body).encode(), None, {"space": SPACE}).keys["space"].keys)


def test_text_and_conversations_are_tokens_as_the_server_makes_them() -> None:
    text = "system Be kind. user Hello, you "
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello, you"}]
    expected = keys({"prompt": letters().encode(text)})
    assert len(expected) == len(text) // 4
    assert keys({"prompt": text}) == expected
    assert keys({"prompt": [text, "another"]}) == expected
    assert keys({"messages": messages}, "/v1/chat/completions") == expected
    assert keys({"prompt": "cut " + text, "truncate_prompt_tokens": len(text)}) == expected


@given(tokens=st.lists(st.integers(0, 31), max_size=40), salt=st.none() | st.text(min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_keys_are_those_of_the_engine(tokens: list[int], salt: str | None) -> None:
    body = {"prompt": tokens or [1], "cache_salt": salt, "max_tokens": 7}
    made = read_prompt("/v1/completions", json.dumps(body).encode(), None, {"space": SPACE})
    expected = [block_hash(key[:-1]) for key in prefix_keys(tokens or [1], 4, root_digest(IDENTITY, salt))]
    assert list(made.keys["space"].keys) == expected
    assert (made.tokens, made.output_tokens) == (len(tokens or [1]), 7)


def test_a_salt_shares_nothing() -> None:
    prompt = {"prompt": [1] * 16}
    made = [keys(prompt), keys(prompt | {"cache_salt": "a"}),
            keys(prompt | {"cache_salt": "b"})]
    assert len(made[0]) == 4
    assert not set(made[0]) & set(made[1])
    assert not set(made[1]) & set(made[2])
    texts = [read_prompt("/v1/completions", json.dumps({"prompt": "x" * 400} | salt).encode(), None,
                         {TEXT: None}).keys[TEXT].keys for salt in ({}, {"cache_salt": "a"})]
    assert not set(texts[0]) & set(texts[1])


def test_conversations_that_go_on_share_what_came_before_as_text() -> None:
    first = {"messages": [{"role": "system", "content": "You are kind. " * 40}, {"role": "user", "content": "Hello"}]}
    second = {"messages": [*first["messages"], {"role": "assistant", "content": "Hi"}]}
    other = {"messages": [{"role": "system", "content": "Be brief. " * 40}]}
    made = [list(read_prompt("/v1/chat/completions", json.dumps(body).encode(), None, {TEXT: None}).keys[TEXT].keys)
            for body in (first, second, other)]
    assert made[1][:len(made[0])] == made[0]
    assert not set(made[0]) & set(made[2])


@given(JSON, st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses"]))
@settings(max_examples=80, deadline=None)
def test_no_body_is_an_error(value: object, path: str) -> None:
    """No body raises an error here: the server that receives a wrong request reports it."""
    for body in (json.dumps(value).encode(), json.dumps({"prompt": value, "messages": value, "model": value,
                                                         "cache_salt": value, "max_tokens": value}).encode(), b"{"):
        prompt = read_prompt(path, body, None, {"space": SPACE, TEXT: None})
        assert prompt.tokens >= 0
