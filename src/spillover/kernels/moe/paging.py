"""Paging of experts in a few slots of device memory: lookup, eviction, copies, and experts that the host computes.

Every expert is a record in host memory; slots hold copies, so nothing is ever written back. The page table is on the
device and a step updates it without the host: these functions are captured in a CUDA graph. Each layer has its own
slots (its quota), so that a token's experts in one layer do not evict those in others.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from spillover.kernels.moe import host_expert_queue as fields
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.page_table import NONE, OLDEST, PATIENCE, PageTable, Resolution


def assign_reference(ids: Tensor, hosted: Tensor) -> Resolution:
    """Return a resolution of ids int32 [T, k] whose host pairs are those of experts marked in `hosted` int32 [E]."""
    flat, k = ids.flatten(), ids.shape[1]
    for_host = hosted[flat.long()] > 0
    pairs = for_host.nonzero().flatten().int()
    to_host = torch.zeros(len(flat), fields.PAIR, dtype=torch.int32, device=ids.device)
    to_host[: len(pairs), :3] = torch.stack([pairs // k, flat[pairs.long()], pairs], 1)
    place = torch.where(for_host, for_host.int().cumsum(0).int() - 1, NONE).int()
    counts = torch.tensor([0, len(pairs)], dtype=torch.int32, device=ids.device)
    return Resolution(counts, ids.new_empty(0, 2), to_host, place)


def gather(resolution: Resolution, records: Tensor, slots: Tensor) -> None:
    """Copy each expert in `gathers` from its record, uint8 [E, bytes] in host memory, into its slot."""
    if slots.is_cuda:
        from spillover.kernels.triton.moe import paging as on_cuda

        on_cuda.gather(resolution, records, slots)
    else:
        gather_reference(resolution, records, slots)


def resolve_reference(ids: Tensor, table: PageTable, layer: int, split: Tensor | None = None) -> Resolution:
    """Resolve ids int32 [T, k] -> actions that put every expert in a slot, or leave it to the host; update the table.

    Of the m distinct experts that are missing, the host computes split[m] (`split`: int32 on the device; None: none):
    those with the fewest tokens, of equal ones the highest ids. Each other, in ascending id, gets a free slot, or that
    of an expert of its layer that this step does not use: the one with the lowest (infinite worth, used now or in the
    step before, worth, stamp, slot). If no slot is left, the remaining experts pass through the stream buffers, in
    several passes if necessary.
    """
    pairs, k, passes = ids.numel(), ids.shape[1], table.passes(ids.numel())
    step, flat = int(table.step), ids.flatten().tolist()
    requested = sorted(set(flat))
    slot_of = table.slot_of[layer].tolist()
    missing = [expert for expert in requested if slot_of[expert] == NONE]
    hosted = 0
    if split is not None:
        hosted = min(max(int(split[min(len(missing), len(split) - 1)]), 0), len(missing))
    hosted_experts = set(sorted(missing, key=lambda expert: (flat.count(expert), -expert))[:hosted])
    gathered = [expert for expert in missing if expert not in hosted_experts]
    counts = torch.zeros(passes, 2, dtype=torch.int32)
    gathers = torch.zeros(passes, pairs, 2, dtype=torch.int32)
    rows = torch.full((passes, table.experts), NONE, dtype=torch.int32)
    num_streamed = 0
    for expert in gathered:
        slot, pass_index = _evict(table, layer, step, requested), 0
        if slot == NONE:
            pass_index, place_in = divmod(num_streamed, table.stream_buffers)
            slot, num_streamed = len(table.owner) + place_in, num_streamed + 1
            rows[pass_index, expert] = slot
        else:
            table.slot_of[layer, expert] = slot
            table.owner[slot] = expert
        gathers[pass_index, counts[pass_index, 0]] = torch.tensor([expert, slot])
        counts[pass_index, 0] += 1
    rows[0] = torch.maximum(rows[0], table.slot_of[layer].cpu())
    table.stamp[layer, requested] = step
    hits = len(requested) - len(missing)
    table.totals[layer] += torch.tensor([hits, len(gathered), hosted], device=table.totals.device)
    log = table.log[step % table.log.shape[0], layer]
    log.fill_(-1)
    log[:pairs] = ids.flatten().to(torch.int16).cpu()

    to_host = torch.zeros(pairs, fields.PAIR, dtype=torch.int32)
    place = torch.full((pairs,), NONE, dtype=torch.int32)
    for pair, expert in enumerate(flat):
        if expert in hosted_experts:
            row = int(counts[0, 1])
            to_host[row] = torch.tensor([pair // k, expert, pair, 0])
            place[pair] = row
            counts[0, 1] += 1
    return Resolution.in_passes(*(each.to(ids.device) for each in (counts, gathers, to_host, place, rows)))


def _evict(table: PageTable, layer: int, step: int, requested: list[int]) -> int:
    """Return a slot of the layer that may be filled, or NONE; an expert in it is removed from `table.slot_of`."""
    first, end = table.first[layer : layer + 2].tolist()
    owner = table.owner[first:end].tolist()
    if NONE in owner:
        return int(first + owner.index(NONE))

    def order(slot: int) -> tuple[bool, bool, float, int, int]:
        expert = owner[slot]
        worth, stamp = float(table.worth[layer, expert]), int(table.stamp[layer, expert])
        return worth == math.inf, stamp >= step - 1, worth, -min(step - stamp, OLDEST), slot

    candidates = [slot for slot, expert in enumerate(owner) if expert >= 0 and expert not in requested]
    if not candidates:
        return NONE
    slot = min(candidates, key=order)
    table.slot_of[layer, owner[slot]] = NONE
    return int(first + slot)


def gather_reference(resolution: Resolution, records: Tensor, slots: Tensor) -> None:
    for expert, slot in resolution.gathers[: int(resolution.counts[0])].tolist():
        slots[slot].copy_(records[expert])


def post_reference(x: Tensor, resolution: Resolution, layer: int, queue: HostExpertQueue) -> None:
    """Write the pairs for the host, and their rows of x [T, H], into the queue, and count the post; do nothing if
    there are none."""
    count = int(resolution.counts[1])
    if count == 0:
        return
    tokens = resolution.hosted[:count, 0].long() if count < x.shape[0] else torch.arange(x.shape[0], device=x.device)
    queue.x[tokens.cpu()] = x[tokens].float().cpu()
    queue.pairs[:count] = resolution.hosted[:count].cpu()
    queue.header[fields.LAYER], queue.header[fields.COUNT], queue.header[fields.TOKENS] = layer, count, x.shape[0]
    queue.state[fields.POST_NUMBER] += 1
    queue.header[fields.POSTED] = queue.state[fields.POST_NUMBER].cpu()


def collect_reference(
    rows: Tensor, shares: Tensor, resolution: Resolution | None, queue: HostExpertQueue | None, dtype: torch.dtype,
    shared: bool = False, patience: int = PATIENCE,
) -> Tensor:
    """Add up rows [T * k, H], shares [T, k] -> sum over j of share * row in the order of j, [T, H].

    Rows that the host computes are read from the queue, after waiting for them. `shared`: rows of the device are
    already multiplied by their shares.
    """
    (tokens, k), hidden = shares.shape, rows.shape[1]
    weights = shares.reshape(-1, 1)
    terms = rows.float() if shared else rows.float() * weights
    if queue is not None and resolution is not None and int(resolution.counts[1]) > 0:
        if not queue.state[fields.GIVEN_UP] and not _await_answer(queue, patience):
            queue.state[fields.GIVEN_UP] = queue.header[fields.FAILED] = 1
        hosted = resolution.place >= 0
        answers = queue.out.to(rows.device)[resolution.place[hosted].long()]
        terms[hosted] = answers.to(torch.float32 if shared else rows.dtype).float() * weights[hosted]
    total = torch.zeros(tokens, hidden, device=rows.device)
    for j in range(k):
        total += terms.view(tokens, k, hidden)[:, j]
    return total.to(dtype)


def _await_answer(queue: HostExpertQueue, patience: int) -> bool:
    posted = int(queue.state[fields.POST_NUMBER])
    for _ in range(patience):
        if int(queue.header[fields.DONE]) - posted >= 0:
            return True
        time.sleep(1e-6)
    return False
