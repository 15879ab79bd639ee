"""The CUDA link: exact, and harmless to concurrent work."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from spillover.kernels.kv_quant import KVCodec, decode_blocks, encode_blocks
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_cuda import CudaLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

BLOCKS, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 48, 4, 2, 16, 64


@pytest.fixture
def steps() -> torch.cuda.Stream:
    """Return the stream that steps are launched on."""
    return torch.cuda.Stream()


@pytest.fixture
def pool() -> torch.Tensor:
    made = torch.randn(BLOCKS + 1, LAYERS, 2, HEADS, BLOCK_SIZE * HEAD_DIM, device="cuda").bfloat16()
    torch.cuda.synchronize()
    return made


@pytest.fixture
def link(pool: torch.Tensor) -> Iterator[CudaLink]:
    transfers = CudaTransfers(pool.device)
    made = CudaLink(pool, transfers)
    yield made
    made.close()
    transfers.close()


def slots_of(link: CudaLink, count: int) -> list[memoryview]:
    """Return slots in several slabs, some of them adjacent."""
    slots = []
    while len(slots) < count:
        slab = link.allocate(16 * link.slot_bytes)
        slots += [slab[i * link.slot_bytes : (i + 1) * link.slot_bytes] for i in range(16)]
    return slots[:count]


def as_bytes(pool: torch.Tensor) -> list[bytes]:
    return [block.cpu().view(torch.int16).numpy().tobytes() for block in pool]


def test_random_copies_both_ways_at_once_equal_a_plain_model(pool: torch.Tensor, link: CudaLink) -> None:
    """Two threads, one per direction, copy with separate blocks and slots; afterwards every byte is right."""
    slots, rng = slots_of(link, 2 * BLOCKS), random.Random(0)
    model, stored = as_bytes(pool), [bytes(slot) for slot in slots]
    for _ in range(20):
        blocks = rng.sample(range(1, BLOCKS + 1), BLOCKS)
        places = rng.sample(range(len(slots)), BLOCKS)
        if rng.random() < 0.3:
            places.sort()
            blocks.sort()
        half = rng.randint(0, BLOCKS)
        out = threading.Thread(target=link.copy_out, args=(blocks[:half], [slots[p] for p in places[:half]]))
        back = threading.Thread(target=link.copy_in, args=([slots[p] for p in places[half:]], blocks[half:]))
        for thread in (out, back):
            thread.start()
        for thread in (out, back):
            thread.join(60)
        for block, place in zip(blocks[:half], places[:half], strict=True):
            stored[place] = model[block]
        for block, place in zip(blocks[half:], places[half:], strict=True):
            model[block] = stored[place]
    assert as_bytes(pool) == model
    assert [bytes(slot) for slot in slots] == stored


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_narrow_blocks_have_the_bits_of_the_reference(pool: torch.Tensor, kind: str) -> None:
    codec = KVCodec(LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16, kind)
    transfers = CudaTransfers(pool.device)
    link = CudaLink(pool, transfers, codec)
    slots, order = slots_of(link, BLOCKS), random.Random(1).sample(range(1, BLOCKS + 1), BLOCKS)
    before = pool.cpu()
    wanted = encode_blocks(before, BLOCK_SIZE, kind)
    link.copy_out(order, slots)
    assert [bytes(slot) for slot in slots] == [wanted[block].numpy().tobytes() for block in order]
    link.copy_in(slots, order[1:] + order[:1])  # every block to the place of another
    decoded = decode_blocks(wanted, BLOCK_SIZE, kind, torch.bfloat16)
    for source, target in zip(order, order[1:] + order[:1], strict=True):
        assert torch.equal(pool[target].cpu(), decoded[source])
    assert torch.equal(pool[0].cpu(), before[0])
    link.close()


def test_writes_to_other_blocks_meanwhile_are_not_lost(pool: torch.Tensor, link: CudaLink,
                                                       steps: torch.cuda.Stream) -> None:
    slots = slots_of(link, 16)
    blocks = list(range(1, 17))
    model = as_bytes(pool)
    stop = threading.Event()

    def shuttle() -> None:
        while not stop.is_set():
            link.copy_out(blocks, slots)
            link.copy_in(slots, blocks)

    thread = threading.Thread(target=shuttle, daemon=True)
    thread.start()
    try:
        for value in range(200):
            with torch.cuda.stream(steps):
                pool[17:].fill_(value % 61)
    finally:
        stop.set()
        thread.join(60)
    torch.cuda.synchronize()
    assert as_bytes(pool)[:17] == model[:17]
    assert (pool[17:] == 199 % 61).all()


def test_copies_run_while_a_graph_is_recorded(pool: torch.Tensor, link: CudaLink, steps: torch.cuda.Stream) -> None:
    """Pinning, events and copies of another thread neither break a capture nor become part of it."""
    x, stop, errors = torch.ones(1 << 20, device="cuda"), threading.Event(), []
    torch.cuda.synchronize()

    def shuttle() -> None:
        try:
            while not stop.is_set():
                slots = slots_of(link, 16)  # new memory each time, which is pinned first
                link.copy_out(list(range(1, 17)), slots)
                link.copy_in(slots, list(range(1, 17)))
        except Exception as error:
            errors.append(error)

    model = as_bytes(pool)
    thread = threading.Thread(target=shuttle, daemon=True)
    thread.start()
    try:
        graphs = []
        with torch.cuda.stream(steps):
            for _ in range(10):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                for _ in range(200):
                    x.add_(1)
                graph.capture_end()
                graphs.append(graph)
            for graph in graphs:
                graph.replay()
    finally:
        stop.set()
        thread.join(60)
    torch.cuda.synchronize()
    assert not errors
    assert (x == 2001).all()
    assert as_bytes(pool) == model


def test_memory_that_is_not_the_links_is_refused(link: CudaLink) -> None:
    link.allocate(link.slot_bytes)
    with pytest.raises(ValueError, match="not of this pool"):
        link.copy_out([1], [memoryview(bytearray(link.slot_bytes))])
