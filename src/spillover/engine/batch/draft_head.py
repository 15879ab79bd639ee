"""A head that drafts from the hidden states of a runner's model, in one more layer of the same KV blocks.

Every step stores the head's keys and values for its rows beside the model's own, and keeps what the next draft begins
with. So what the head knows of a prefix is restored, shared and evicted with the blocks of that prefix; where only the
blocks are there (after a prefix hit, a restore or a preemption), the first row computed follows zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from spillover.engine.weights.placed import EngineWeights, FixedWeights
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.features import KeptRows
from spillover.kernels.linear import embedding
from spillover.models.eagle3 import PART, EagleHead, HeadWeights
from spillover.models.layers import Decoder, KVViews, Tap


class ReadsFeatures(Protocol):
    """What reads the hidden states of a runner's steps."""

    def taps(self, rows: int) -> tuple[Tensor, list[Tap]]:
        """Return room for the model's hidden states of a step [rows, taps * hidden], and which go where."""
        ...

    def observe(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, slots: Tensor,
                follows: Tensor) -> None:
        """Take in a step that the model has computed: `features` as `taps` made room for them, `slots` and `follows`
        [B] of its requests, `batch` of the first layer group."""
        ...


def feature_taps(layers: Sequence[int], rows: int, model: Decoder, device: torch.device) -> tuple[Tensor, list[Tap]]:
    """Make room for hidden states [rows, layers * hidden] of a model."""
    hidden = model.config.hidden_size
    features = torch.empty(rows, len(layers) * hidden, dtype=model.dtype, device=device)
    return features, [(layer, features.narrow(1, index * hidden, hidden)) for index, layer in enumerate(layers)]


class DraftHead:
    def __init__(self, head: EagleHead, weights: FixedWeights, model: Decoder, model_weights: EngineWeights,
                 kv: KVViews, slots: int, draft_tokens: int) -> None:
        """Bind a head. `slots`: of requests, that of padding included; `draft_tokens`: the most of one request."""
        self.head = head
        self.weights = weights
        self._model = model
        self._model_weights = model_weights
        self._kv = kv
        self.window = model.groups[0].window
        per_slot, hidden = draft_tokens + 1, model.config.hidden_size
        self.kept = KeptRows(torch.zeros(slots * per_slot, hidden, dtype=model.dtype, device=kv.pool.device), per_slot)

    @property
    def w(self) -> HeadWeights:
        with self.weights.part(PART) as w:
            return cast(HeadWeights, w)

    def taps(self, rows: int) -> tuple[Tensor, list[Tap]]:
        return feature_taps(self.head.config.taps, rows, self._model, self._kv.pool.device)

    def observe(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, slots: Tensor,
                follows: Tensor) -> None:
        kernels = self.head.kernels
        fused = self.head.fuse(features, self.w)
        before = kernels.rows_before(fused, self.kept, batch, slots, follows)
        kernels.keep_rows(fused, self.kept, batch, slots)
        self.head.store(self._embedded(token_ids), before, self.w, self._kv_layer, batch)

    def draft(self, token_ids: Tensor, before: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Run one pass: a token of each request [B] and what it follows [B, hidden] -> logits [B, draft vocabulary] of
        the next, and what that one follows."""
        return self.head.draft(self._embedded(token_ids), before, self.w, self._kv_layer, batch, self.window)

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the model's tokens for the head's."""
        w = self.w
        return w["targets"].index_select(0, ids) if "targets" in w else ids

    def first(self, places: Tensor) -> Tensor:
        """Return what drafts begin with: the kept rows at these places."""
        return self.kept.rows.index_select(0, places)

    @property
    def _kv_layer(self) -> Tensor:
        return self._kv.layer(self._model.config.num_layers)[0]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        w = self.w
        if "embedding" in w:
            return embedding(token_ids, w["embedding"], self._model.dtype)
        return self._model.embed(token_ids, self._model_weights)
