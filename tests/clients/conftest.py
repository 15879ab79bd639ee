"""One server for all clients, and the model's tokenizer in the form they need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

from spillover.models.hub.store import resolve
from spillover.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Yield the default model in `spill serve` with default flags, except for a context that fits a small machine."""
    with ServerProcess("--max-model-len", "2048") as process:
        yield process


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(None))


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model's tokenizer as a folder as Hugging Face's libraries expect it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    eos = tokenizer.eos_token_id
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
        "eos_token": None if eos is None else tokenizer.backend.id_to_token(eos),
        "pad_token": None if eos is None else tokenizer.backend.id_to_token(eos),
    }))
    # Some clients read the model's type before its tokenizer.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"],
                                                    "vocab_size": tokenizer.vocab_size}))
    return folder
