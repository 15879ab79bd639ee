"""Each expert is called once, and a row's sum does not depend on the rows beside it."""

import torch

from spillover.kernels.moe.moe import moe


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
