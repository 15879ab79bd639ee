"""How a draft model's tokens stand for those of the model that verifies: the same ids, or a part of them; where they
are of another tokenizer, see `translation.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

DRAFT_VOCAB_FILE = "draft_vocab.json"  # beside the weights: which tokens of the other model a draft model has


class DraftVocabulary(Protocol):
    def side(self, request: Request) -> Request:
        """Return the request as the draft model sees it: its known tokens in the draft model's ids."""
        ...

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        """Return drafted tokens in the ids of the model that verifies, up to the first that it does not have."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...


class SameVocabulary:
    """Both models have the same ids; the draft model may have a few more, which no text has."""

    def __init__(self, vocab_size: int) -> None:
        """Map every id to itself. `vocab_size`: of the model that verifies."""
        self._vocab_size = vocab_size

    def side(self, request: Request) -> Request:
        return request

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(draft) if token >= self._vocab_size), len(draft))
        return tuple(draft[:end])

    def end(self, request: Request) -> None:
        """Do nothing: nothing is kept."""


class ReducedVocabulary:
    """The draft model knows the most frequent tokens only, and one id for all others, which ends a draft."""

    def __init__(self, target_ids: npt.NDArray[np.int64], vocab_size: int) -> None:
        """Map ids by a table. `target_ids`: of each draft id but the last, which stands for all others; `vocab_size`:
        of the model that verifies."""
        self._target_ids: list[int] = target_ids.tolist()
        self._draft_ids = np.full(vocab_size, len(target_ids), dtype=np.int32)
        self._draft_ids[target_ids] = np.arange(len(target_ids), dtype=np.int32)
        self._sides: dict[Request, Request] = {}

    def side(self, request: Request) -> Request:
        side = self._sides.get(request)
        if side is None:
            side = self._sides[request] = draft_side(request, [], request.num_prompt)
        known = len(side.token_ids)
        new = np.frombuffer(request.token_ids[known:], dtype=np.int32)
        side.token_ids.frombytes(self._draft_ids[new].tobytes())
        return side

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(draft) if token >= len(self._target_ids)), len(draft))
        return tuple(self._target_ids[token] for token in draft[:end])

    def end(self, request: Request) -> None:
        self._sides.pop(request, None)


def draft_side(request: Request, tokens: Sequence[int], num_prompt: int, greedy: bool = False) -> Request:
    """Return a request of the draft model that stands for another; `greedy`: where positions are not the same, the same
    random numbers would mean nothing."""
    from spillover.engine.requests.request import Request
    from spillover.engine.requests.sampling_params import SamplingParams

    asked = request.params
    params = SamplingParams(temperature=0.0, max_tokens=None) if greedy else SamplingParams(
        temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p, max_tokens=None)
    side = Request(request.request_id, [], params, seed=request.seed, cache_salt=request.cache_salt)
    side.token_ids, side.num_prompt = array("i", tokens), num_prompt
    return side
