"""Mappings between a draft model's tokens and those of the target model, which verifies: the same ids, or a subset of
them; see `translation.py` for different tokenizers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from spillover.engine.requests.request import Request

DRAFT_VOCAB_FILE = "draft_vocab.json"  # file next to the weights that lists the target's tokens a draft model has


class DraftVocabulary(Protocol):
    def draft_request(self, request: Request) -> Request:
        """Return the request for the draft model: with the known tokens in the draft model's ids."""
        ...

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        """Return draft tokens in the target's ids, up to the first that the target does not have."""
        ...

    def end(self, request: Request) -> None:
        """Drop the state of a finished request."""
        ...


class SameVocabulary:
    """Both models have the same ids; the draft model may have a few more, which stand for no text."""

    def __init__(self, vocab_size: int) -> None:
        """Map every id to itself. `vocab_size`: the target's vocabulary size."""
        self._vocab_size = vocab_size

    def draft_request(self, request: Request) -> Request:
        return request

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(draft) if token >= self._vocab_size), len(draft))
        return tuple(draft[:end])

    def end(self, request: Request) -> None:
        """Do nothing: there is no state per request."""


class ReducedVocabulary:
    """The draft model has only the most frequent tokens, and one id for all others, which ends a draft."""

    def __init__(self, target_ids: npt.NDArray[np.int64], vocab_size: int) -> None:
        """Map ids by a table. `target_ids`: the target's id of each draft id but the last, which stands for all other
        tokens; `vocab_size`: the target's vocabulary size."""
        self._target_ids: list[int] = target_ids.tolist()
        self._draft_ids = np.full(vocab_size, len(target_ids), dtype=np.int32)
        self._draft_ids[target_ids] = np.arange(len(target_ids), dtype=np.int32)
        self._draft_requests: dict[Request, Request] = {}

    def draft_request(self, request: Request) -> Request:
        draft_request = self._draft_requests.get(request)
        if draft_request is None:
            draft_request = self._draft_requests[request] = make_draft_request(request, [], request.num_prompt)
        known = len(draft_request.token_ids)
        new = np.frombuffer(request.token_ids[known:], dtype=np.int32)
        draft_request.token_ids.frombytes(self._draft_ids[new].tobytes())
        return draft_request

    def to_target(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        end = next((index for index, token in enumerate(draft) if token >= len(self._target_ids)), len(draft))
        return tuple(self._target_ids[token] for token in draft[:end])

    def end(self, request: Request) -> None:
        self._draft_requests.pop(request, None)


def make_draft_request(request: Request, tokens: Sequence[int], num_prompt: int, greedy: bool = False) -> Request:
    """Return the draft model's counterpart of a request. `greedy`: sample greedily; for mappings that change positions,
    where the request's random numbers would belong to other tokens."""
    from spillover.engine.requests.request import Request
    from spillover.engine.requests.sampling_params import SamplingParams

    params = request.params
    kept = SamplingParams(temperature=0.0, max_tokens=None) if greedy else SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, max_tokens=None)
    draft_request = Request(request.request_id, [], kept, seed=request.seed, cache_salt=request.cache_salt)
    draft_request.token_ids, draft_request.num_prompt = array("i", tokens), num_prompt
    return draft_request
