"""A random Llama small enough for any machine, with a byte tokenizer and a chat template: as a folder to load, and as a
model of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BOS, EOS = 256, 257
TEXT = "".join(f"Line {n} says that {n * n} is a square, and {n * n + 1} is none.\n" for n in range(60))
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"


def write_text_model(folder: Path, seed: int = 0, spread: float = 0.15, layers: int = 2,
                     hidden: tuple[int, int] = (64, 96)) -> PreTrainedModel:
    """Write a model. `spread`: standard deviation of the weights; `hidden`: sizes of hidden states and of MLPs."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=320, hidden_size=hidden[0], intermediate_size=hidden[1], num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=spread,
        bos_token_id=BOS, eos_token_id=EOS, attn_implementation="eager")).eval()
    model.save_pretrained(folder)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}))
    return model
