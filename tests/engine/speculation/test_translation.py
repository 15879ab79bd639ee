"""A draft model with another tokenizer sees the same text, and its drafts are translated to the target's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from spillover import LLM, SamplingParams
from spillover.engine.requests.request import Request
from spillover.engine.speculation.drafters.draft_model import DraftModel
from spillover.engine.speculation.drafters.translation import TranslatedVocabulary
from spillover.models.tokenizer import Tokenizer
from support.models.text_model import TEXT, write_text_model

WORDS = (*TEXT.split(), "naïve", "café", "日本語", "🙂", "Привет", "x=1;", "\n\n", "foo_bar", "(a)", "don't")


def byte_level(size: int, text: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"],
        show_progress=False))
    return backend


def sentence_pieces(size: int, text: str) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: a space before the text, and bytes for text without tokens."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False))
    written = json.loads(backend.to_str())  # there, bytes are ordinary tokens, not added ones that a text may contain
    written["added_tokens"] = [token for token in written["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def wrapped(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, {"eos_token": "</s>"}, [], {}, "a test")


TOKENIZERS = {
    "small": wrapped(byte_level(400, TEXT)),
    "large": wrapped(byte_level(900, TEXT * 2 + " ".join(WORDS))),
    "pieces": wrapped(sentence_pieces(600, TEXT)),
}
kinds = st.sampled_from(sorted(TOKENIZERS))
texts = st.lists(st.sampled_from(WORDS), min_size=2, max_size=160).map(" ".join)


def said(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@settings(max_examples=100, deadline=None)
@given(kinds, kinds, texts, st.randoms(use_true_random=False))
def test_the_draft_model_sees_the_same_text_whenever_it_looks(target_kind: str, draft_kind: str, text: str,
                                                             rng: random.Random) -> None:
    target, draft = TOKENIZERS[target_kind], TOKENIZERS[draft_kind]
    vocabulary = TranslatedVocabulary(target, draft)
    ids = target.encode(text, add_special_tokens=False)
    known = rng.randint(1, len(ids))
    request = Request("one", ids[:known], SamplingParams())
    while True:
        draft_request = vocabulary.draft_request(request)
        whole = said(target, request.token_ids.tolist())
        seen = said(draft, draft_request.token_ids.tolist())
        if draft_request.token_ids.tolist() == [0]:  # no character is complete yet, and any token will do
            seen = b""
        assert whole.strip(b" ").startswith(seen.strip(b" ")) or seen.strip(b" ") == whole.strip(b" ")
        assert len(whole.strip(b" ")) - len(seen.strip(b" ")) <= 4, "but for a character that is not complete"
        if known == len(ids):
            break
        step = rng.randint(1, 12)
        request.token_ids.extend(ids[known:known + step])
        known = min(len(ids), known + step)
    fresh = TranslatedVocabulary(target, draft).draft_request(request)
    assert draft_request.token_ids == fresh.token_ids or len(whole) > 512, "as if it had been seen at once"


@settings(max_examples=100, deadline=None)
@given(kinds, kinds, texts, st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_draft_that_is_right_is_right_in_the_models_tokens_too(target_kind: str, draft_kind: str, text: str,
                                                                count: int, rng: random.Random) -> None:
    """If the draft is right, so are the translated tokens; the last one may be part of a longer token."""
    target, draft = TOKENIZERS[target_kind], TOKENIZERS[draft_kind]
    vocabulary = TranslatedVocabulary(target, draft)
    ids = target.encode(text, add_special_tokens=False)
    known = rng.randint(1, len(ids))
    request = Request("one", ids[:known], SamplingParams())
    draft_request = vocabulary.draft_request(request)
    whole = draft.encode(text, add_special_tokens=False)
    if whole[:len(draft_request.token_ids)] != draft_request.token_ids.tolist():
        return  # the text so far ends within a token of the draft model
    coming = whole[len(draft_request.token_ids):len(draft_request.token_ids) + count]
    found = list(vocabulary.to_target(request, coming))
    assert found[:-1] == ids[known:known + len(found)][:-1]
    assert said(target, ids[known:]).startswith(said(target, found))
    drafted = said(draft, coming)
    assert len(drafted) - len(said(target, found)) <= max(map(len, map(target.token_bytes, ids))) + 3, "but for one"


def test_the_end_of_a_text_is_translated() -> None:
    target, draft = TOKENIZERS["small"], TOKENIZERS["pieces"]
    vocabulary = TranslatedVocabulary(target, draft)
    request = Request("one", target.encode("Line 1 says"), SamplingParams())
    vocabulary.draft_request(request)
    assert draft.eos_token_id is not None
    found = vocabulary.to_target(request, [*draft.encode(" that", add_special_tokens=False)[-3:], draft.eos_token_id])
    assert found[-1] == target.eos_token_id


def test_another_vocabulary_drafts_and_the_text_is_the_same(tmp_path: Path) -> None:
    """The text is the same with a draft model that is the target with permuted tokens for ordinary letters."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        write_text_model(folder)
        weights = load_file(folder / "model.safetensors")
        letters = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        rare = [index for letter, index in letters.items() if not (letter.isascii() and letter.isalpha())]
        weights["lm_head.weight"][[*rare, *range(256, 320)]] = 0
        if folder == draft:
            order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
            order = torch.cat((order, torch.arange(256, 320)))
            for name in ("lm_head.weight", "model.embed_tokens.weight"):
                weights[name] = weights[name][order].contiguous()
            old = json.loads((folder / "tokenizer.json").read_text())
            places = {int(index): place for place, index in enumerate(order.tolist())}
            old["model"]["vocab"] = {letter: places[index] for letter, index in letters.items()}
            (folder / "tokenizer.json").write_text(json.dumps(old))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [f"Tell me of {word}" for word in ("cats", "dogs", "naïve trees", "ships")]
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=40, ignore_eos=True, logprobs=1)
              for index in range(4)]
    with LLM(target, device="cpu", max_model_len=128) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with LLM(target, device="cpu", max_model_len=128, speculative_model=str(draft), speculative_adaptive=False) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert isinstance(llm.engine.drafting, DraftModel)
        llm.engine.drafting.blocks.check()
    for mine, theirs in zip(found, plain, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.outputs[0].logprobs == theirs.outputs[0].logprobs
    for index in (0, 2):  # greedy
        assert found[index].drafts.accepted == pytest.approx(found[index].drafts.tokens, abs=4)
        assert found[index].drafts.accepted > 20
