"""Deltas add up to the text decoded at once, and stop strings end the text wherever tokens break."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from spillover.engine.output.detokenizer import IncrementalDetokenizer, StopStrings
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.models.tokenizer import Tokenizer

TEXTS = ["Hello world, hello there. The quick brown fox.", "你好，世界！日本語のテキスト",
         "😀👍🏽 family 👨‍👩‍👧 naïve café",
         "  indented\n\ttext � and é"]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXTS * 4, trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend, {}, [1], {}, "test")


@cache
def sentencepiece() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral."""
    return spaced(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)]))


@cache
def metaspace() -> Tokenizer:
    return spaced(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def spaced(decoder: decoders.Decoder) -> Tokenizer:
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "▁Hello", "▁world",
              "ly", ",", ".", "▁.", "▁a", "b▁c", "你", "▁日本", "é", "\n", "�", "▁�", "e\u0301"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    return Tokenizer(backend, {}, [1], {}, "test")


TOKENIZERS = [byte_level, sentencepiece, metaspace]


def random_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Return noise, runs of bytes that form characters (or nearly), special tokens, and ids without a token."""
    letters = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.4:
            ids.append(rng.randrange(tokenizer.vocab_size))
        elif kind < 0.7:
            raw = "".join(rng.choices("é你好😀👍🏽�a", k=rng.randint(1, 3))).encode()
            if rng.random() < 0.4:
                raw = raw[:rng.randrange(len(raw)) or None]
            ids += [letters[raw[i:i + 1]] for i in range(len(raw))]
        elif kind < 0.85:
            ids += tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)[:8]
        else:
            ids.append(rng.choice([0, 1, 2, tokenizer.vocab_size + 3]))
    return ids


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), skip=st.booleans())
def test_deltas_add_up_to_the_decoded_whole(make: Callable[[], Tokenizer], seed: int, skip: bool) -> None:
    tokenizer, rng = make(), random.Random(seed)
    ids = random_ids(tokenizer, rng, rng.randint(1, 60))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(skip_special_tokens=skip))
    text = ""
    for token in ids:
        text += detokenizer.append(token)
        assert detokenizer.text == text
        assert whole.startswith(text)
    assert text + detokenizer.flush() == whole == detokenizer.text


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), skip=st.booleans())
def test_after_a_prompt_the_text_continues_the_prompts(make: Callable[[], Tokenizer], seed: int, skip: bool) -> None:
    tokenizer, rng = make(), random.Random(seed)
    prompt = random_ids(tokenizer, rng, rng.randint(1, 12))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    ids = random_ids(tokenizer, rng, rng.randint(1, 40))
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    if before.endswith("�") or not whole.startswith(before):
        return  # the output completes, or breaks, the prompt's last character; tested below
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    text = "".join(map(detokenizer.append, ids)) + detokenizer.flush()
    assert before + text == whole


def test_a_word_after_the_prompt_keeps_its_space_and_one_at_the_start_does_not() -> None:
    tokenizer = sentencepiece()
    hello, world = (tokenizer.backend.token_to_id(piece) for piece in ("▁Hello", "▁world"))
    assert IncrementalDetokenizer(tokenizer, [0, hello], SamplingParams()).append(world) == " world"
    assert IncrementalDetokenizer(tokenizer, [0], SamplingParams()).append(world) == "world"
    detokenizer = IncrementalDetokenizer(tokenizer, [0, hello], SamplingParams())
    assert [detokenizer.append(token) for token in (1, tokenizer.vocab_size + 9, world)] == ["", "", " world"]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_character_begun_in_the_prompt_is_shown_once_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    letters = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, *rest = (letters[bytes([byte])] for byte in "你".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, [letters[b","], first], SamplingParams())
    assert "".join(map(detokenizer.append, [*rest, letters[b","]])) == "你,"


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = byte_level()
    letters = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams())
    shown = [detokenizer.append(letters[bytes([byte])]) for byte in "a😀é".encode()]
    assert shown == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.append(letters[b"\xf0"]) == ""
    assert detokenizer.flush() == "�"


def test_without_detokenize_there_is_no_text() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), [5], SamplingParams(detokenize=False))
    assert detokenizer.append(70) + detokenizer.flush() + detokenizer.text == ""


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that is completed first, found letter by letter."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=5), max_size=12), include=st.booleans(),
       stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_a_stop_string_is_found_across_any_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    finder = StopStrings(stops, include)
    expected, stop = reference_stop("".join(pieces), stops, include)
    text = ""
    for piece in pieces:
        text += finder.append(piece)
        assert expected.startswith(text)  # text is never shown and then retracted
    assert (text + finder.flush(), finder.matched) == (expected, stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["\n\nQ:", "END"])
    assert [finder.append(piece) for piece in ["a\n", "\n", "b", "xE", "N", "Ex", "\n\nQ"]] == [
        "a", "", "\n\nb", "x", "", "ENEx", ""]
    assert finder.append(": more") == ""
    assert finder.matched == "\n\nQ:"


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_at_a_stop_string_that_spans_tokens(include: bool) -> None:
    tokenizer = byte_level()
    ids = [token for text in ("Hello world, ", "hel", "lo there", ". more") for token in tokenizer.encode(text)]
    params = SamplingParams(stop=["hello t", "never"], include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(tokenizer, [], params)
    text = ""
    rest = iter(ids)
    while detokenizer.stopped is None:
        text += detokenizer.append(next(rest))
    assert next(rest)
    assert detokenizer.stopped == "hello t"
    assert text == detokenizer.text == ("Hello world, hello t" if include else "Hello world, ")
    assert detokenizer.append(ids[0]) + detokenizer.flush() == ""


def test_held_back_text_is_shown_at_the_end() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=["world!"]))
    text = "".join(map(detokenizer.append, tokenizer.encode("Hello world")))
    assert text == "Hello "
    assert detokenizer.flush() == "world"
    assert detokenizer.stopped is None


def test_a_stop_string_completed_by_the_last_held_text_counts() -> None:
    tokenizer = sentencepiece()
    byte = {tokenizer.token_bytes(i): i for i in range(4, 260)}
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=["ab"]))
    assert "".join(map(detokenizer.append, [byte[b"x"], byte[b"a"], byte[b"b"]])) == ""
    assert detokenizer.flush() == "x"
    assert detokenizer.stopped == "ab"


def test_no_stop_before_min_tokens() -> None:
    tokenizer = byte_level()
    letters = [tokenizer.backend.token_to_id(letter) for letter in "abcabc"]
    for min_tokens, expected in ((0, ""), (1, "abc"), (3, "abc"), (4, "abcabc")):
        detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=["abc"], min_tokens=min_tokens))
        assert "".join(map(detokenizer.append, letters)) + detokenizer.flush() == expected


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """The cost per token is constant, also if every token leaves a character incomplete or the text is all U+FFFD."""
    tokenizer = byte_level()
    byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    patterns = [tokenizer.encode("Hello world, "), [byte[b"\xf0"]], [byte[b"\xe4"], byte[b"\xbd"]],
                tokenizer.encode("�"), [byte[b"\xff"]]]
    for pattern in patterns:
        detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=["zzzz"]))
        longest = 0
        for i in range(2000):
            detokenizer.append(pattern[i % len(pattern)])
            longest = max(longest, len(detokenizer._window))
        assert longest <= 16
        assert detokenizer.text + detokenizer.flush() == tokenizer.decode(
            [pattern[i % len(pattern)] for i in range(2000)])
