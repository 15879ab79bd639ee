"""Feature rows of the positions before each row: the kernels equal plain torch, for any step."""

from __future__ import annotations

import random

import pytest
import torch

from spillover.kernels import features
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.features import KeptRows

triton_features = pytest.importorskip("spillover.kernels.triton.features")
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


def random_step(rng: random.Random, slots: int, device: str) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
    """Return a step of some requests, one of them without rows, and whether each continues from the kept rows."""
    counts = [rng.randint(1, 6) for _ in range(rng.randint(1, slots - 1))] + [0]
    starts = [rng.randint(0, 20) for _ in counts]
    ends = torch.tensor(counts).cumsum(0)
    batch = AttentionBatch(
        query_start=torch.cat((torch.zeros(1), ends)).to(torch.int32).to(device),
        seq_lens=torch.tensor([start + count for start, count in zip(starts, counts, strict=True)], dtype=torch.int32,
                              device=device),
        block_table=torch.zeros(len(counts), 1, dtype=torch.int32, device=device),
        positions=torch.tensor([start + row for start, count in zip(starts, counts, strict=True)
                                for row in range(count)], device=device),
        rows=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(torch.int32).to(device),
        block_size=8)
    chosen = torch.tensor(rng.sample(range(slots), len(counts)), dtype=torch.int32, device=device)
    follows = torch.tensor([int(start > 0 and rng.random() < 0.7) for start in starts], dtype=torch.int32,
                           device=device)
    return batch, chosen, follows


@pytest.mark.parametrize("device", DEVICES)
def test_rows_follow_what_plain_torch_says(device: str) -> None:
    rng = random.Random(0)
    per_slot, slots = 3, 5
    mine, theirs = (KeptRows(torch.zeros(slots * per_slot, 24, device=device), per_slot) for _ in range(2))
    for _ in range(6):
        batch, chosen, follows = random_step(rng, slots, device)
        x = torch.randn(len(batch.rows), 24, device=device)
        expected = features.rows_before(x.cpu(), KeptRows(theirs.rows.cpu(), per_slot), on_cpu(batch), chosen.cpu(),
                                        follows.cpu())
        found = triton_features.rows_before(x, mine, batch, chosen, follows)
        assert torch.equal(found.cpu(), expected)
        kept = KeptRows(theirs.rows.cpu(), per_slot)
        features.keep_rows(x.cpu(), kept, on_cpu(batch), chosen.cpu())
        theirs = KeptRows(kept.rows.to(device), per_slot)
        triton_features.keep_rows(x, mine, batch, chosen)
        assert torch.equal(mine.rows, theirs.rows)


def on_cpu(batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(batch.query_start.cpu(), batch.seq_lens.cpu(), batch.block_table.cpu(),
                          batch.positions.cpu(), batch.rows.cpu(), 8)


def test_a_request_follows_its_own_rows_and_no_other() -> None:
    """A request continues from its own rows: five rows, then a step from the third, after two accepted drafts."""
    kept = KeptRows(torch.zeros(2 * 3, 1), 3)
    x = torch.arange(1.0, 6.0).unsqueeze(1)
    first = AttentionBatch(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([15], dtype=torch.int32),
                           torch.zeros(1, 1, dtype=torch.int32), torch.arange(10, 15),
                           torch.zeros(5, dtype=torch.int32), 8)
    slot, yes = torch.tensor([1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    assert features.rows_before(x, kept, first, slot, yes - 1).tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    features.keep_rows(x, kept, first, slot)
    then = AttentionBatch(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([14], dtype=torch.int32),
                          torch.zeros(1, 1, dtype=torch.int32), torch.tensor([13]), torch.zeros(1, dtype=torch.int32),
                          8)
    assert features.rows_before(x[:1], kept, then, slot, yes).tolist() == [[3.0]]
