"""A head that drafts from the hidden states of a runner's model, with its KV in an additional layer of the KV blocks.

Every step stores the head's keys and values for its rows next to the model's, and keeps the features with which the
next draft begins. So the head's KV of a prefix is restored, shared and evicted with the prefix's blocks. Features are
not: after a prefix hit, a restore or a preemption, zeros take the place of those before the first computed row.
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


class FeatureReader(Protocol):
    """A reader of the hidden states of a runner's steps."""

    def taps(self, rows: int) -> tuple[Tensor, list[Tap]]:
        """Return a buffer [rows, taps * hidden] for a step's hidden states, and its part for each tapped layer."""
        ...

    def observe(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, slots: Tensor,
                follows: Tensor) -> None:
        """Process a step that the model has computed: `features` is the buffer of `taps`, `slots` and `follows` [B] are
        those of its requests, `batch` that of the first layer group."""
        ...


def feature_taps(layers: Sequence[int], rows: int, model: Decoder, device: torch.device) -> tuple[Tensor, list[Tap]]:
    """Allocate a buffer [rows, layers * hidden] for hidden states; return it with its part for each layer."""
    hidden = model.config.hidden_size
    features = torch.empty(rows, len(layers) * hidden, dtype=model.dtype, device=device)
    return features, [(layer, features.narrow(1, index * hidden, hidden)) for index, layer in enumerate(layers)]


class DraftHead:
    def __init__(self, head: EagleHead, weights: FixedWeights, model: Decoder, model_weights: EngineWeights,
                 kv: KVViews, slots: int, draft_tokens: int) -> None:
        """Bind a head. `slots`: number of request slots, including padding's; `draft_tokens`: maximum per request."""
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
        """Run one pass: from a token per request [B] and the features before it [B, hidden], return the next token's
        logits [B, draft vocabulary] and the features before that token."""
        return self.head.draft(self._embedded(token_ids), before, self.w, self._kv_layer, batch, self.window)

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the model's token ids for those of the head's vocabulary."""
        w = self.w
        return w["targets"].index_select(0, ids) if "targets" in w else ids

    def first(self, places: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the features with which drafts begin: the kept rows at these indices."""
        return torch.index_select(self.kept.rows, 0, places, out=into)

    @property
    def _kv_layer(self) -> Tensor:
        return self._kv.layer(self._model.config.num_layers)[0]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        w = self.w
        if "embedding" in w:
            return embedding(token_ids, w["embedding"], self._model.dtype)
        return self._model.embed(token_ids, self._model_weights)
