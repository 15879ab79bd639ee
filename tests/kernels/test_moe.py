"""Each expert is called once, and a row's sum does not depend on the other rows."""

import pytest
import torch

from spillover.kernels.moe.moe import OTHER_RANK, moe


def test_rows_get_their_weighted_experts() -> None:
    rows, hidden, experts, k = 17, 8, 6, 2
    x = torch.randn(rows, hidden)
    matrices = torch.randn(experts, hidden, hidden)
    ids = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(rows)])  # the last expert is never chosen
    weights = torch.rand(rows, k)
    called: list[int] = []

    def expert(index: int, group: torch.Tensor) -> torch.Tensor:
        called.append(index)
        return torch.stack([row @ matrices[index] for row in group])

    out = moe(x, ids, weights, expert)
    wanted = torch.stack([sum(weights[t, j] * (x[t] @ matrices[ids[t, j]]) for j in range(k)) for t in range(rows)])
    torch.testing.assert_close(out, wanted)
    assert called == sorted(set(ids.flatten().tolist()))
    for t in range(rows):
        assert torch.equal(moe(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], expert), out[t : t + 1])


def test_no_rows() -> None:
    empty = torch.empty(0, 2)
    assert moe(torch.empty(0, 8), empty.long(), empty, lambda _, group: group).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    """A row has the same bits alone; experts of another rank are skipped, and products include zeros of both signs."""
    rows, hidden, experts, k = 40, 16, 8, 3
    x, scales = torch.randn(rows, hidden).to(dtype), torch.randn(experts, hidden).to(dtype)
    x[:, 0], x[:, 1] = 0.0, -0.0
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(rows)])
    ids[torch.rand(rows, k) < 0.3] = OTHER_RANK
    weights = torch.rand(rows, k)

    def expert(index: int, group: torch.Tensor) -> torch.Tensor:
        assert index != OTHER_RANK
        return group * scales[index]

    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    whole = moe(x, ids, weights, expert)
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(moe(x[one], ids[one], weights[one], expert).view(bits), whole[one].view(bits))
