"""Copies of a CUDA device: bytes arrive, priorities hold, sleep and wake work, and CUDA graphs repeat copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spillover.memory.transfer import cuda_transfers
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MB = 1 << 20
LAYER = 512 * MB


@pytest.fixture
def transfers() -> Iterator[CudaTransfers]:
    made = CudaTransfers(torch.device("cuda"))
    yield made
    torch.cuda.synchronize()
    made.pool.release("kv")
    made.close()


def host(transfers: CudaTransfers, nbytes: int, pinned: bool = True) -> torch.Tensor:
    tensor = torch.frombuffer(transfers.pool.allocate(nbytes, "weights", pinned), dtype=torch.uint8)
    return tensor.random_(0, 256)


@pytest.mark.parametrize("priority", [Priority.DEMAND, Priority.PREFETCH])
@pytest.mark.parametrize("nbytes", [1, 1000, 16 * MB, 16 * MB + 1, 50 * MB])
def test_what_is_copied_arrives(transfers: CudaTransfers, priority: Priority, nbytes: int) -> None:
    source, target = host(transfers, nbytes), torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    transfers.wait(transfers.start(target, source, priority, transfers.record_event()))
    transfers.wait(transfers.start(target[: nbytes // 2], lambda: source[: nbytes // 2], priority))
    assert torch.equal(target.cpu(), source)
    found = {each.priority: each for each in transfers.queue.report().transfers}[priority.name.lower()]
    assert (found.copies, found.bytes) == (2 if nbytes > 1 else 1, nbytes + nbytes // 2)


def test_a_tensor_sleeps_on_the_host_and_comes_back(transfers: CudaTransfers) -> None:
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in ((3,), (7, 5), (1024, 1025))
               for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32)]
    asleep = [transfers.to_host(tensor) for tensor in tensors]
    assert transfers.pool.bytes_by_use["sleep"] == sum(tensor.nbytes for tensor in tensors)
    for tensor, kept in zip(tensors, asleep, strict=True):
        back = transfers.to_device(kept)
        assert (back.dtype, back.shape, back.is_cuda) == (tensor.dtype, tensor.shape, True)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert transfers.pool.bytes_by_use["sleep"] == 0


def restore_seconds(transfers: CudaTransfers, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds of a copy in batches of 32 MB, as the KV link makes them."""
    start = time.perf_counter()
    for at in range(0, source.nbytes, 32 * MB):
        places = np.arange(at, at + 32 * MB, 2 * MB)
        sources = (source.data_ptr() + places).astype(np.uint64)
        targets = (target.data_ptr() + places).astype(np.uint64)
        transfers.copy(targets, sources, np.full(len(places), 2 * MB, dtype=np.uint64), sources, Priority.RESTORE)
    return time.perf_counter() - start


def test_a_restore_passes_the_prefetches_queued_before_it(transfers: CudaTransfers,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """While gigabytes of layers are queued, KV arrives several times as fast as without priorities, and the layers
    still arrive."""
    monkeypatch.setattr(cuda_transfers, "BURST_SECONDS", 10.0)
    layer, buffer = host(transfers, LAYER), torch.zeros(LAYER, dtype=torch.uint8, device="cuda")
    source, target = host(transfers, 256 * MB), torch.zeros(256 * MB, dtype=torch.uint8, device="cuda")
    restore_seconds(transfers, source, target)
    seconds = {}
    for gated in (True, False):
        if not gated:
            monkeypatch.setattr(transfers, "_wait_at_gates", lambda priority: None)
            monkeypatch.setattr(transfers, "_may_block_prefetches", lambda: False)
        target.zero_()
        torch.cuda.synchronize()
        tickets = [transfers.start(buffer, layer, Priority.PREFETCH) for _ in range(8)]
        seconds[gated] = restore_seconds(transfers, source, target)
        busy = not tickets[-1].query()
        transfers.wait(tickets[-1])
        torch.cuda.synchronize()
        assert torch.equal(target.cpu(), source)
        assert torch.equal(buffer.cpu(), layer)
        if gated:
            assert busy, "the layers were there before the restore: nothing was shown"
    assert seconds[True] < seconds[False] / 2, seconds


def test_restores_without_end_do_not_keep_prefetches_waiting(transfers: CudaTransfers) -> None:
    layer, buffer = host(transfers, LAYER), torch.zeros(LAYER, dtype=torch.uint8, device="cuda")
    source, target = host(transfers, 64 * MB), torch.zeros(64 * MB, dtype=torch.uint8, device="cuda")
    stop = threading.Event()

    def restore() -> None:
        while not stop.is_set():
            restore_seconds(transfers, source, target)

    threads = [threading.Thread(target=restore, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    ticket = transfers.start(buffer, layer, Priority.PREFETCH)
    deadline = time.monotonic() + 20
    while not ticket.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    arrived = ticket.query()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert arrived
    assert torch.equal(buffer.cpu(), layer)


def test_a_captured_prefetch_gives_way_too(transfers: CudaTransfers) -> None:
    layer, buffer = host(transfers, 64 * MB), torch.zeros(64 * MB, dtype=torch.uint8, device="cuda")
    queue, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(queue):
        graph.capture_begin(capture_error_mode="thread_local")
        transfers.stream(Priority.PREFETCH).wait_stream(queue)
        transfers.wait(transfers.start_all([(buffer, layer)], Priority.PREFETCH, counted=False))
        graph.capture_end()
    torch.cuda.synchronize()
    transfers._gates[Priority.RESTORE] = 1
    torch.cuda.synchronize()
    with torch.cuda.stream(queue):
        graph.replay()
    time.sleep(0.05)
    assert not queue.query(), "it was copied while the gate was shut"
    transfers._driver.write_value(transfers.stream(Priority.RESTORE).cuda_stream, transfers._gate(Priority.RESTORE), 0)
    torch.cuda.synchronize()
    assert torch.equal(buffer.cpu(), layer)
