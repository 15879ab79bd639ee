"""Chooses the drafter, and the mapping between the vocabulary of a draft model and that of the target model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from spillover.engine.speculation.config import SpeculativeConfig
from spillover.engine.speculation.drafters.drafter import Drafter
from spillover.engine.speculation.drafters.ngram import NgramDrafter
from spillover.engine.speculation.drafters.simulated import SimulatedDrafter
from spillover.engine.speculation.drafters.suffix import SuffixDrafter
from spillover.engine.speculation.drafters.translation import TranslatedVocabulary
from spillover.engine.speculation.drafters.vocabulary import (
    DRAFT_VOCAB_FILE,
    DraftVocabulary,
    ReducedVocabulary,
    SameVocabulary,
)
from spillover.errors import SpilloverError
from spillover.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from spillover.memory.tiers.token_log import TokenLog

PADDING = 1024  # maximum difference in size of vocabularies of one family: padding ids that have no text


def make_drafter(config: SpeculativeConfig, vocab_size: int, tokens: TokenLog | None = None) -> Drafter:
    """Make a drafter that needs no model. `tokens`: the log of earlier requests' tokens, kept across restarts."""
    if config.simulated:
        return SimulatedDrafter(config.simulated, vocab_size)
    if config.method == "ngram":
        return NgramDrafter(config.lookup_min, config.lookup_max)
    return SuffixDrafter(tokens=tokens)


def draft_vocabulary(path: Path, vocab_size: int, tokenizer: Tokenizer | None, target_size: int) -> DraftVocabulary:
    """Return the mapping between the `vocab_size` tokens of the draft model at `path` and the `target_size` tokens of
    the target model, which verifies."""
    reduced = path / DRAFT_VOCAB_FILE
    if path.is_dir() and reduced.is_file():
        return ReducedVocabulary(_read_ids(reduced, vocab_size, target_size), target_size)
    has_own = path.is_file() or (path / "tokenizer.json").is_file()
    if tokenizer is None or not has_own:
        if abs(vocab_size - target_size) > PADDING:
            raise SpilloverError(f"the draft model {path.name} has {vocab_size:,} tokens, the model {target_size:,}; "
                                 "without both tokenizers it is unknown which agree; choose another draft model")
        return _same(vocab_size, target_size)
    own = load_tokenizer(path)
    if own.backend.get_vocab(with_added_tokens=True) == tokenizer.backend.get_vocab(with_added_tokens=True):
        return _same(vocab_size, target_size)
    return TranslatedVocabulary(tokenizer, own)


def _same(vocab_size: int, target_size: int) -> DraftVocabulary:
    if vocab_size >= target_size:
        return SameVocabulary(target_size)
    # A request may have any id of the target model; ids that the draft model lacks are mapped to its last id.
    return ReducedVocabulary(np.arange(vocab_size - 1), target_size)


def _read_ids(file: Path, vocab_size: int, target_size: int) -> npt.NDArray[np.int64]:
    try:
        ids = np.array(json.loads(file.read_text())["target_ids"], dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpilloverError(f"{file} cannot be read ({error}); train the draft model again") from error
    if ids.ndim != 1 or len(ids) + 1 != vocab_size or len(set(ids.tolist())) != len(ids):
        raise SpilloverError(f"{file} does not fit the draft model, which has {vocab_size:,} tokens; train it again")
    if not len(ids) or ids.min() < 0 or ids.max() >= target_size:
        raise SpilloverError(f"{file} names tokens that the model, of {target_size:,} tokens, does not have; the draft "
                             "model was trained for another one")
    return ids
