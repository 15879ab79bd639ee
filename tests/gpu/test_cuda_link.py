"""The CUDA link: exact, in order with the steps around it, and harmless to what runs beside it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from spillover.kernels.kv_quant import KVCodec, decode_blocks, encode_blocks
from spillover.memory.link_cuda import CudaLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

BLOCKS, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 48, 4, 2, 16, 64
LONG = 200_000_000  # cycles: a tenth of a second on any device


class Steps:
    """A compute stream, and the event behind the last step launched on it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.ended: torch.cuda.Event | None = None

    def launch(self, *work: object) -> None:
        with torch.cuda.stream(self.stream):
            for each in work:
                each()  # type: ignore[operator]
            self.ended = torch.cuda.Event()
            self.ended.record()


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def pool() -> torch.Tensor:
    made = torch.randn(BLOCKS + 1, LAYERS, 2, HEADS, BLOCK_SIZE * HEAD_DIM, device="cuda").bfloat16()
    torch.cuda.synchronize()
    return made


@pytest.fixture
def link(pool: torch.Tensor, steps: Steps) -> Iterator[CudaLink]:
    made = CudaLink(pool, None, lambda: steps.ended)
    yield made
    made.close()


def slots_of(link: CudaLink, count: int) -> list[memoryview]:
    """In several slabs, some side by side."""
    slots = []
    while len(slots) < count:
        slab = link.allocate(16 * link.slot_bytes)
        slots += [slab[i * link.slot_bytes : (i + 1) * link.slot_bytes] for i in range(16)]
    return slots[:count]


def as_bytes(pool: torch.Tensor) -> list[bytes]:
    return [block.cpu().view(torch.int16).numpy().tobytes() for block in pool]


def test_random_copies_both_ways_at_once_equal_a_plain_model(pool: torch.Tensor, link: CudaLink) -> None:
    """Two threads, one a direction, each with its own blocks and slots; then every byte is compared."""
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


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_narrow_blocks_have_the_bits_of_the_reference(pool: torch.Tensor, steps: Steps, kind: str) -> None:
    codec = KVCodec(LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16, kind)
    link = CudaLink(pool, codec, lambda: steps.ended)
    slots, order = slots_of(link, BLOCKS), random.Random(1).sample(range(1, BLOCKS + 1), BLOCKS)
    before = pool.cpu()
    wanted = encode_blocks(before, BLOCK_SIZE, kind)
    link.copy_out(order, slots)
    assert [bytes(slot) for slot in slots] == [wanted[block].numpy().tobytes() for block in order]
    link.copy_in(slots, order[1:] + order[:1])  # every block to another's place
    decoded = decode_blocks(wanted, BLOCK_SIZE, kind, torch.bfloat16)
    for source, target in zip(order, order[1:] + order[:1], strict=True):
        assert torch.equal(pool[target].cpu(), decoded[source])
    assert torch.equal(pool[0].cpu(), before[0])
    link.close()


def test_a_copy_out_sees_what_the_steps_before_it_write(pool: torch.Tensor, link: CudaLink, steps: Steps) -> None:
    slots = slots_of(link, 2)
    link.copy_out([1], slots[:1])  # pins, so that nothing below waits for anything but the step
    steps.launch(lambda: torch.cuda._sleep(LONG), lambda: pool[1].fill_(3.5), lambda: pool[2].fill_(-2))
    link.copy_out([1, 2], slots)
    for slot, value in zip(slots, (3.5, -2), strict=True):
        assert (torch.frombuffer(slot, dtype=torch.bfloat16) == value).all()


def test_a_copy_in_waits_for_the_steps_that_read_before_it(pool: torch.Tensor, link: CudaLink, steps: Steps) -> None:
    (slot,) = slots_of(link, 1)
    link.copy_out([1], [slot])
    old, seen = pool[2].clone(), torch.empty_like(pool[2])
    torch.cuda.synchronize()
    steps.launch(lambda: torch.cuda._sleep(LONG), lambda: seen.copy_(pool[2]))
    link.copy_in([slot], [2])
    assert torch.equal(seen, old)
    assert torch.equal(pool[2], pool[1])


def test_writes_to_other_blocks_meanwhile_are_not_lost(pool: torch.Tensor, link: CudaLink, steps: Steps) -> None:
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
            steps.launch(lambda value=value: pool[17:].fill_(value % 61))
    finally:
        stop.set()
        thread.join(60)
    torch.cuda.synchronize()
    assert as_bytes(pool)[:17] == model[:17]
    assert (pool[17:] == 199 % 61).all()


def test_copies_run_while_a_graph_is_recorded(pool: torch.Tensor, link: CudaLink, steps: Steps) -> None:
    """Pinning, events and copies of another thread must neither break a capture nor end up in it."""
    x, stop, errors = torch.ones(1 << 20, device="cuda"), threading.Event(), []
    torch.cuda.synchronize()

    def shuttle() -> None:
        try:
            while not stop.is_set():
                slots = slots_of(link, 16)  # new memory each time, which is pinned on the way
                link.copy_out(list(range(1, 17)), slots)
                link.copy_in(slots, list(range(1, 17)))
        except Exception as error:
            errors.append(error)

    model = as_bytes(pool)
    thread = threading.Thread(target=shuttle, daemon=True)
    thread.start()
    try:
        graphs = []
        with torch.cuda.stream(steps.stream):
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
    with pytest.raises(ValueError, match="no link allocated"):
        link.copy_out([1], [memoryview(bytearray(link.slot_bytes))])
