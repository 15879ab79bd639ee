"""Each expert is called once, and a row's sum does not depend on the other rows."""

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear
from spillover.kernels.formats.gguf_codes import grouped_codes, pack_codes
from spillover.kernels.formats.packed import Packed
from spillover.kernels.moe import moe as module
from spillover.kernels.moe.experts import Experts
from spillover.kernels.moe.moe import OTHER_RANK, expert_mlp, expert_mlps, moe, route


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


def stack(weights: torch.Tensor, bits: int, bias: torch.Tensor | None) -> Experts:
    """Return a stack of the shape of weights [E, N, K]: these in float32 if `bits` is 0, otherwise random codes of
    `bits` bits."""
    if not bits:
        packed = Packed(native.panel_width())
        linears = [Linear(packed, LinearShape((len(weight),), weight.shape[1]), (packed.pack(weight),))
                   for weight in weights]
    else:
        low, high = (0, 16) if bits == 4 else (-128, 128)
        groups = weights.shape[2] // 32
        dtype = torch.uint8 if bits == 4 else torch.int8
        linears = [pack_codes([grouped_codes(torch.randint(low, high, weight.shape, dtype=dtype),
                                             torch.rand(len(weight), groups) / 64,
                                             torch.randn(len(weight), groups) / 64)]) for weight in weights]
    return Experts(Linear(linears[0].format, linears[0].shape,
                          (torch.stack([linear.tensors[0] for linear in linears]),)), bias)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("bits", [(0, 0), (4, 4), (8, 4)])
@pytest.mark.parametrize("rows", [1, 2, 7, 40, 300])
def test_one_native_call_has_the_bits_of_many(rows: int, bits: tuple[int, int], limit: float | None) -> None:
    """All experts at once give the bits of one after another, and a row those that it has alone."""
    if any(bits) and not native.multiplies_codes():
        pytest.skip("this CPU does not multiply codes")
    torch.manual_seed(rows)
    hidden, inner, experts, k = 64, 96, 9, 3
    # Biases may have gaps between them, as in the records that experts are moved in.
    biases = [torch.randn(experts, size + 5)[:, :size] if limit else None for size in (2 * inner, hidden)]
    first = stack(torch.randn(experts, 2 * inner, hidden), bits[0], biases[0])
    second = stack(torch.randn(experts, hidden, inner), bits[1], biases[1])
    x, shares = torch.randn(rows, hidden), torch.rand(rows, k)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(rows)])
    ids[torch.rand(rows, k) < 0.2] = OTHER_RANK
    ids[0] = torch.tensor([8, OTHER_RANK, 2])
    found = expert_mlps(x, ids, shares, first, second, limit)
    wanted = moe(x, ids, shares, lambda index, group: expert_mlp(group, first, second, index, limit))
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert found.abs().sum() > 0
    for row in (0, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(expert_mlps(x[one], ids[one], shares[one], first, second, limit), found[one])
    none = torch.full((1, k), OTHER_RANK)
    assert not expert_mlps(x[:1], none, shares[:1], first, second, limit).any()


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
def test_many_rows_take_one_expert_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stack(torch.randn(2, 32, 32), 0, None), stack(torch.randn(2, 32, 16), 0, None)
    x, ids, shares = torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    whole = expert_mlps(x, ids, shares, first, second, None)
    monkeypatch.setattr(module, "EXPERT_SCRATCH_BYTES", 4 * 5 * (2 * 32 + 3 * 16) - 1)
    called = []
    monkeypatch.setattr(module, "expert_mlp", lambda *args: called.append(args[3]) or expert_mlp(*args))
    assert torch.equal(expert_mlps(x, ids, shares, first, second, None), whole)
    assert called == [0]


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 5, 1), (3, 128, 8), (600, 33, 4), (2, 4, 4)])
def test_experts_are_chosen_as_by_torch(rows: int, experts: int, k: int, renormalize: bool) -> None:
    scores = torch.randn(rows, experts) * 4
    ids, shares = route(scores, k, renormalize, None)
    wanted, chosen = scores.softmax(-1).topk(k)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(shares, wanted / wanted.sum(-1, keepdim=True) if renormalize else wanted)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are off")
def test_of_equal_scores_the_first_experts_are_chosen_and_odd_numbers_choose_some() -> None:
    ids, shares = route(torch.tensor([[1.0, 3, 3, 2, 3], [-0.0, 0, 0, 0, 0]]), 3, True, None)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert torch.allclose(shares, torch.tensor(1 / 3))
    inf, nan = float("inf"), float("nan")
    numbers = torch.tensor([[nan] * 5, [nan, 1, nan, inf, 0], [inf, -inf, inf, 0, nan], [-inf] * 5])
    odd, _ = route(numbers, 3, False, 7.0)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in odd.tolist())
