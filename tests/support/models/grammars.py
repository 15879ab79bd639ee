"""A tokenizer of bytes, and random walks through the tokens that a grammar allows."""

from __future__ import annotations

import random
from functools import cache

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from spillover.engine.batch.step_result import step_masks
from spillover.engine.step import Phase, StepItem
from spillover.engine.structured.structured import Grammar
from spillover.models.tokenizer import Tokenizer

TEXTS = ['{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true}', "null false [1.5, -2e3] hello world",
         "日本語 é 😀"]


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXTS * 4, trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<s>", "</s>", "<|eot|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, [backend.token_to_id("<|eot|>")], {}, "test")


def allowed(grammar: Grammar, tokenizer: Tokenizer) -> list[int]:
    row = model_mask(grammar, tokenizer.vocab_size + 64)  # wider than the vocabulary, as a model pads it
    bits = ((row.unsqueeze(1) >> torch.arange(32)) & 1).flatten()
    return bits.nonzero().flatten().tolist()


def model_mask(grammar: Grammar, vocab_size: int) -> torch.Tensor:
    item = StepItem(id=1, phase=Phase.DECODE, start=0, count=1, num_samples=1, first_block=0, new_blocks=((),),
                    mask=grammar.mask())
    masks = step_masks(item, vocab_size)
    assert masks is not None
    return masks[0]


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, patience: int = 60) -> str:
    """Generate text as a model with random logits that after `patience` steps prefers closing tokens would."""
    rng = random.Random(seed)
    closing = [tokenizer.backend.token_to_id(t) for t in ('"', "]", "}")]
    out: list[int] = []
    for step in range(1000):
        tokens = allowed(grammar, tokenizer)
        assert all(token < tokenizer.vocab_size for token in tokens)
        ends = [token for token in tokens if token in tokenizer.eos_token_ids]
        assert bool(ends) == grammar.complete
        preferred = (ends or [token for token in tokens if token in closing]) if step > patience else []
        token = rng.choice(preferred or tokens)
        assert grammar.accept(token)
        if token in tokenizer.eos_token_ids:
            break
        assert token not in tokenizer.special_ids
        out.append(token)
    assert grammar.finished
    return b"".join(map(tokenizer.token_bytes, out)).decode()
