"""The experts' page table on a CUDA device: updates of the table, copies from host memory, and the host expert queue.

Nothing here waits for the host: the amount of work is read from device memory, so a CUDA graph can contain all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spillover.kernels.moe import host_expert_queue as fields
from spillover.kernels.moe import page_table
from spillover.kernels.moe.host_expert_queue import HostExpertQueue
from spillover.kernels.moe.page_table import PATIENCE, PageTable, Resolution
from spillover.kernels.triton.launch import pdl_options

GATHER_PROGRAMS = 8  # number of programs that copy records; each has GATHER_BYTES in flight over the link
GATHER_BYTES = 32 * 1024
GATHER_WARPS = 8
FEW_PROGRAMS = 16  # maximum number of programs that poll the queue themselves; for more, a kernel before them polls

_NONE = tl.constexpr(page_table.NONE)
_OLDEST = tl.constexpr(page_table.OLDEST)
_MOST_SLOTS = tl.constexpr(page_table.MOST_SLOTS)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # greater than the key of any slot
_DONE, _POSTED, _FAILED = tl.constexpr(fields.DONE), tl.constexpr(fields.POSTED), tl.constexpr(fields.FAILED)
_LAYER, _COUNT, _TOKENS = tl.constexpr(fields.LAYER), tl.constexpr(fields.COUNT), tl.constexpr(fields.TOKENS)
_TURN, _GIVEN_UP = tl.constexpr(fields.POST_NUMBER), tl.constexpr(fields.GIVEN_UP)
_PAIR = tl.constexpr(fields.PAIR)
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def resolve(ids: Tensor, table: PageTable, layer: int, split: Tensor | None = None) -> Resolution:
    """Do what kernels.moe.paging.resolve_reference does, on the device."""
    pairs, k, passes = ids.numel(), ids.shape[1], table.passes(ids.numel())
    assert pairs <= table.log.shape[2]
    counts = torch.empty(passes, 2, dtype=torch.int32, device=ids.device)
    gathers = torch.empty(passes, pairs, 2, dtype=torch.int32, device=ids.device)
    hosted = torch.empty(pairs, fields.PAIR, dtype=torch.int32, device=ids.device)
    place = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    rows = torch.empty(passes, table.experts, dtype=torch.int32, device=ids.device)
    log_rows, layers, log_pairs = table.log.shape
    most = max(pairs, log_pairs)
    _resolve[(1,)](
        ids, table.slot_of, table.owner, table.first, table.worth, table.stamp, table.step, table.totals, table.log,
        split, counts, gathers, hosted, place, rows, layer, pairs, None if split is None else len(split) - 1,
        len(table.owner), PASSES=passes, TRANSIT=max(1, table.stream_buffers), LAYERS=layers,
        EXPERTS=table.experts, PADDED=triton.next_power_of_2(table.experts), K=k,
        PADDED_PAIRS=triton.next_power_of_2(pairs), LOG_ROWS=log_rows, LOG_PAIRS=log_pairs,
        PADDED_LOG=triton.next_power_of_2(most), num_warps=1 if table.experts <= 256 else 4, **pdl_options(ids.device),
    )
    return Resolution.in_passes(counts, gathers, hosted, place, rows)


def assign(ids: Tensor, hosted: Tensor) -> Resolution:
    """Do what kernels.moe.paging.assign_reference does, on the device."""
    pairs, k = ids.numel(), ids.shape[1]
    counts = torch.empty(2, dtype=torch.int32, device=ids.device)
    to_host = torch.empty(pairs, fields.PAIR, dtype=torch.int32, device=ids.device)
    place = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    _assign[(1,)](
        ids, hosted, counts, to_host, place, pairs, K=k, PADDED_PAIRS=triton.next_power_of_2(pairs), num_warps=8,
        **pdl_options(ids.device),
    )
    return Resolution(counts, ids.new_empty(0, 2), to_host, place)


def gather(
    resolution: Resolution, records: Tensor, slots: Tensor, programs: int = GATHER_PROGRAMS,
    nbytes: int = GATHER_BYTES, warps: int = GATHER_WARPS,
) -> None:
    """Do what kernels.moe.paging.gather does, with `programs` programs that read `nbytes` at a time each."""
    _gather_and_post(resolution, records, slots, None, None, 0, programs, nbytes, warps)


def post(x: Tensor, resolution: Resolution, layer: int, queue: HostExpertQueue) -> None:
    """Do what kernels.moe.paging.post_reference does, on the device."""
    _gather_and_post(resolution, None, None, x, queue, layer, 0, GATHER_BYTES, GATHER_WARPS)


def gather_and_post(
    x: Tensor, resolution: Resolution, layer: int, records: Tensor, slots: Tensor, queue: HostExpertQueue,
) -> None:
    """Run `gather` and `post` concurrently in one launch."""
    _gather_and_post(resolution, records, slots, x, queue, layer, GATHER_PROGRAMS, GATHER_BYTES, GATHER_WARPS)


def _gather_and_post(
    resolution: Resolution, records: Tensor | None, slots: Tensor | None, x: Tensor | None,
    queue: HostExpertQueue | None, layer: int, programs: int, nbytes: int, warps: int,
) -> None:
    words = 0
    if records is not None and slots is not None:
        assert records.shape[1] == slots.shape[1]
        records, slots = records.view(torch.int64), slots.view(torch.int64)
        words = records.shape[1]
        assert records.stride(0) == slots.stride(0) == words
    if x is not None and queue is not None:
        assert x.shape[0] <= len(queue.x)
        assert len(resolution.place) <= len(queue.pairs)
    device = resolution.counts.device
    posted = None if queue is None or x is None else (
        queue.header, queue.pairs, queue.x, queue.state, layer, x.shape[0], x.shape[1], x.stride(0)
    )
    _gather_or_post[(programs + (posted is not None),)](
        resolution.counts, resolution.gathers, records, slots, words, x, resolution.hosted, *(posted or (None,) * 8),
        WORDS=nbytes // 8, num_warps=warps, **pdl_options(device),
    )


def collect(
    rows: Tensor, shares: Tensor, resolution: Resolution | None, queue: HostExpertQueue | None, dtype: torch.dtype,
    shared: bool = False, patience: int = PATIENCE,
) -> Tensor:
    """Do what kernels.moe.paging.collect_reference does, on the device."""
    tokens, k = shares.shape
    hidden = rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=rows.device)
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (tokens, triton.cdiv(hidden, block))
    awaited = None if resolution is None or queue is None else (
        resolution.counts, resolution.place, queue.header, queue.out, queue.state, patience
    )
    awaits = awaited is not None and grid[0] * grid[1] <= FEW_PROGRAMS
    if resolution is not None and queue is not None and not awaits:
        _await_answer[(1,)](resolution.counts, queue.header, queue.state, patience, num_warps=1,
                            **pdl_options(rows.device))
    _collect[grid](
        rows, shares, out, hidden, *(awaited or (None,) * 6), K=k, SHARED=shared, AWAIT=awaits, BLOCK=block,
        num_warps=4, **pdl_options(rows.device),
    )
    return out


@triton.jit(do_not_specialize=["layer", "pairs"])
def _resolve(
    ids_ptr, slot_of_ptr, owner_ptr, first_ptr, worth_ptr, stamp_ptr, step_ptr, totals_ptr, log_ptr, split_ptr,
    counts_ptr, gathers_ptr, hosted_ptr, place_ptr, rows_ptr, layer, pairs, split_last, transit_first,
    PASSES: tl.constexpr, TRANSIT: tl.constexpr, LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, PADDED_PAIRS: tl.constexpr,
    LOG_ROWS: tl.constexpr, LOG_PAIRS: tl.constexpr, PADDED_LOG: tl.constexpr, EARLY: tl.constexpr,
):
    """Resolve in one program, with the layer's experts and slots in registers."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    layer = layer.to(tl.int64)
    pair = tl.arange(0, PADDED_PAIRS)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=0)
    expert = tl.arange(0, PADDED)
    real = expert < EXPERTS
    row = layer * EXPERTS + expert
    slot = tl.load(slot_of_ptr + row, mask=real, other=_NONE)
    stamp = tl.load(stamp_ptr + row, mask=real, other=0)
    worth = tl.load(worth_ptr + row, mask=real, other=0.0) + 0.0  # turns minus zero into zero
    step = tl.load(step_ptr)
    first = tl.load(first_ptr + layer)
    end = tl.load(first_ptr + layer + 1)

    resident = slot >= 0
    tokens = tl.histogram(ids, PADDED, mask=pair < pairs)
    requested = tokens > 0
    missing = requested & (slot < 0)
    misses = tl.sum(missing.to(tl.int32), 0)
    hosts = misses * 0
    to_host = tl.zeros((PADDED,), tl.int32)
    if split_ptr is not None:
        hosts = tl.load(split_ptr + tl.minimum(misses, split_last))
        hosts = tl.minimum(tl.maximum(hosts, 0), misses)
        fewest = tl.where(missing, tokens * PADDED + PADDED - 1 - expert, 0x7FFFFFFF)
        for _ in range(hosts):
            lowest = tl.min(fewest, 0)
            to_host = tl.where(fewest == lowest, 1, to_host)
            fewest = tl.where(fewest == lowest, 0x7FFFFFFF, fewest)
    missing = missing & (to_host == 0)
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    gathered = misses - hosts

    key = _order(worth, stamp, step, slot - first)
    key = tl.where(resident & (requested == 0), key, _NO_KEY)
    # A slot of the layer is free only before all have been filled: the owners are read only then.
    slots = tl.where(tl.sum(resident.to(tl.int32), 0) < end - first, end - first, 0)
    free = tl.load(owner_ptr + first + expert, mask=expert < slots, other=0) == _NONE
    free_key = tl.where(free, expert, PADDED)
    room = tl.sum(free.to(tl.int32), 0) + tl.sum((key != _NO_KEY).to(tl.int32), 0)
    placed = tl.minimum(gathered, room)
    for turn in range(placed):
        lowest_free = tl.min(free_key, 0)
        lowest = tl.min(key, 0)
        is_free = lowest_free < PADDED
        taken = tl.where(is_free, lowest_free, (lowest & (_MOST_SLOTS - 1)).to(tl.int32)) + first
        newcomer = tl.sum(tl.where(missing & (rank == turn), expert, 0), 0)
        leaving = (key == lowest) & (is_free == 0)
        slot = tl.where(leaving, _NONE, slot)
        slot = tl.where(expert == newcomer, taken, slot)
        key = tl.where(leaving, _NO_KEY, key)
        free_key = tl.where(free_key == lowest_free, PADDED, free_key)
        tl.store(owner_ptr + taken, newcomer)
        tl.store(gathers_ptr + turn * 2, newcomer)
        tl.store(gathers_ptr + turn * 2 + 1, taken)
    tl.store(slot_of_ptr + row, slot, mask=real)
    tl.store(stamp_ptr + row, step, mask=requested)

    passing = missing & (rank >= placed)
    over = rank - placed  # index among the experts that pass through stream buffers
    through = transit_first + over % TRANSIT
    for turn in tl.static_range(PASSES):
        now = passing & (over // TRANSIT == turn)
        begun = placed if turn == 0 else 0
        entry = gathers_ptr + (turn * pairs + begun + over % TRANSIT) * 2
        tl.store(entry, expert, mask=now)
        tl.store(entry + 1, through, mask=now)
        tl.store(counts_ptr + turn * 2, begun + tl.sum(now.to(tl.int32), 0))
        tl.store(rows_ptr + turn * EXPERTS + expert, tl.where(now, through, slot if turn == 0 else _NONE), mask=real)
        if turn > 0:
            tl.store(counts_ptr + turn * 2 + 1, 0)

    for_host = (tl.gather(to_host, ids, 0) > 0) & (pair < pairs)
    _to_host(ids, pair, for_host, pair < pairs, hosted_ptr, place_ptr, K)
    tl.store(counts_ptr + 1, tl.sum(for_host.to(tl.int32), 0))

    totals = totals_ptr + layer * 3
    tl.store(totals, tl.load(totals) + tl.sum((requested & resident).to(tl.int32), 0))
    tl.store(totals + 1, tl.load(totals + 1) + gathered)
    tl.store(totals + 2, tl.load(totals + 2) + hosts)
    entry = tl.arange(0, PADDED_LOG)
    seen = tl.load(ids_ptr + entry, mask=entry < pairs, other=-1)
    log = log_ptr + ((step % LOG_ROWS).to(tl.int64) * LAYERS + layer) * LOG_PAIRS
    tl.store(log + entry, seen.to(tl.int16), mask=entry < LOG_PAIRS)


@triton.jit(do_not_specialize=["pairs"])
def _assign(
    ids_ptr, hosted_ptr, counts_ptr, to_host_ptr, place_ptr, pairs, K: tl.constexpr, PADDED_PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.arange(0, PADDED_PAIRS)
    real = pair < pairs
    ids = tl.load(ids_ptr + pair, mask=real, other=0)
    for_host = (tl.load(hosted_ptr + ids, mask=real, other=0) > 0) & real
    _to_host(ids, pair, for_host, real, to_host_ptr, place_ptr, K)
    tl.store(counts_ptr, 0)
    tl.store(counts_ptr + 1, tl.sum(for_host.to(tl.int32), 0))


@triton.jit
def _to_host(ids, pair, for_host, real, to_host_ptr, place_ptr, K: tl.constexpr):
    """Write the pairs that the host computes, and for every pair its index among them."""
    place = tl.cumsum(for_host.to(tl.int32), 0) - 1
    tl.store(place_ptr + pair, tl.where(for_host, place, _NONE), mask=real)
    tl.store(to_host_ptr + place * _PAIR, pair // K, mask=for_host)
    tl.store(to_host_ptr + place * _PAIR + 1, ids, mask=for_host)
    tl.store(to_host_ptr + place * _PAIR + 2, pair, mask=for_host)
    tl.store(to_host_ptr + place * _PAIR + 3, 0, mask=for_host)


@triton.jit
def _order(worth, stamp, step, slot):
    """Return an int64 key that sorts by: worth is infinite, used in this or the last step, worth, last use, slot."""
    # The bits of floats are ordered as the floats are once the bits below the sign of negative ones are inverted.
    bits = worth.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    protected = (worth == float("inf")).to(tl.int64) * 2 + (stamp >= step - 1).to(tl.int64)
    used = (tl.maximum(stamp - step, -_OLDEST) + _OLDEST).to(tl.int64)
    return (((protected << 32) | ordered) * (_OLDEST + 1) + used) * _MOST_SLOTS + slot.to(tl.int64)


@triton.jit(do_not_specialize=["layer", "tokens"])
def _gather_or_post(
    counts_ptr, gathers_ptr, records_ptr, slots_ptr, words, x_ptr, hosted_ptr, header_ptr, pairs_ptr, queue_x_ptr,
    state_ptr, layer, tokens, hidden, x_stride, WORDS: tl.constexpr, EARLY: tl.constexpr,
):
    """Copy records into slots; the first program posts rows for the host, if there are any."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if header_ptr is not None:
        if program == 0:
            _post(counts_ptr, x_ptr, hosted_ptr, header_ptr, pairs_ptr, queue_x_ptr, state_ptr, layer, tokens, hidden,
                  x_stride, 1024)
        program -= 1
        programs -= 1
    if records_ptr is not None:
        pieces = tl.cdiv(words, WORDS)
        word = tl.arange(0, WORDS)
        count = tl.where(program < 0, program, tl.load(counts_ptr) * pieces)  # the program that posts copies nothing
        for piece in range(program, count, programs):
            entry = gathers_ptr + piece // pieces * 2
            expert = tl.load(entry).to(tl.int64)
            slot = tl.load(entry + 1).to(tl.int64)
            at = piece % pieces * WORDS + word
            inside = at < words
            value = tl.load(records_ptr + expert * words + at, mask=inside)
            tl.store(slots_ptr + slot * words + at, value, mask=inside)


@triton.jit
def _post(
    counts_ptr, x_ptr, hosted_ptr, header_ptr, pairs_ptr, queue_x_ptr, state_ptr, layer, tokens, hidden, x_stride,
    BLOCK: tl.constexpr,
):
    count = tl.load(counts_ptr + 1)
    if count > 0:
        lane = tl.arange(0, BLOCK)
        for start in range(0, count * _PAIR, BLOCK):
            at = start + lane
            inside = at < count * _PAIR
            tl.store(pairs_ptr + at, tl.load(hosted_ptr + at, mask=inside), mask=inside)
        # Copy the row of each pair, or all rows if those are no more.
        for item in range(tl.minimum(count, tokens)):
            token = tl.load(hosted_ptr + item * _PAIR) if count < tokens else item
            for start in range(0, hidden, BLOCK):
                column = start + lane
                x = tl.load(x_ptr + tl.cast(token, tl.int64) * x_stride + column, mask=column < hidden)
                tl.store(queue_x_ptr + token * hidden + column, x.to(tl.float32), mask=column < hidden)
        tl.store(header_ptr + _LAYER, layer)
        tl.store(header_ptr + _COUNT, count)
        tl.store(header_ptr + _TOKENS, tokens)
        turn = tl.load(state_ptr + _TURN) + 1
        tl.debug_barrier()  # all threads have stored their data and read the turn
        tl.store(state_ptr + _TURN, turn)
        _release(header_ptr + _POSTED, turn)


@triton.jit
def _collect(
    rows_ptr, shares_ptr, out_ptr, hidden, counts_ptr, place_ptr, header_ptr, answers_ptr, state_ptr, patience,
    K: tl.constexpr, SHARED: tl.constexpr, AWAIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if AWAIT:
        _await(counts_ptr, header_ptr, state_ptr, patience)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        share = tl.load(shares_ptr + pair)
        if place_ptr is not None:
            place = tl.load(place_ptr + pair).to(tl.int64)
            on_device = inside & (place < 0)
            on_host = inside & (place >= 0)
            row = tl.load(rows_ptr + pair * hidden + column, mask=on_device, other=0.0)
            # The load must bypass caches: the host has written to this address since it was last read.
            answer = tl.load(answers_ptr + place * hidden + column, mask=on_host, other=0.0, volatile=True)
            if SHARED:
                total += tl.where(place >= 0, share * answer, row)
            else:
                row = tl.where(place >= 0, answer.to(row.dtype), row).to(tl.float32)
                total = tl.fma(row, share + tl.zeros_like(row), total)
        else:
            row = tl.load(rows_ptr + pair * hidden + column, mask=inside, other=0.0).to(tl.float32)
            if SHARED:
                total += row
            else:
                total = tl.fma(row, share + tl.zeros_like(row), total)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _await_answer(counts_ptr, header_ptr, state_ptr, patience, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
    _await(counts_ptr, header_ptr, state_ptr, patience)


@triton.jit
def _await(counts_ptr, header_ptr, state_ptr, patience):
    """Wait until the host has answered the latest post, if any. After one timeout the device does not wait again."""
    if tl.load(counts_ptr + 1) > 0:
        turn = tl.load(state_ptr + _TURN)
        polls = tl.where(tl.load(state_ptr + _GIVEN_UP) != 0, 0, patience)
        done = _acquire(header_ptr + _DONE)
        while (done - turn < 0) & (polls > 0):
            done = _acquire(header_ptr + _DONE)
            polls -= 1
        if done - turn < 0:
            tl.store(state_ptr + _GIVEN_UP, 1)
            tl.store(header_ptr + _FAILED, 1)


@triton.jit
def _acquire(ptr):
    """Load a number that the host writes after the data it announces, so that the data is visible too."""
    if _ASSEMBLY:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        value = tl.load(ptr)
    return value


@triton.jit
def _release(ptr, value):
    """Store a number that the host reads first; everything that this program stored before is then visible to it."""
    if _ASSEMBLY:
        tl.inline_asm_elementwise(
            "st.release.sys.global.s32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [ptr.to(tl.int64), value], dtype=tl.int32,
            is_pure=False, pack=1,
        )
    else:
        tl.store(ptr, value)
