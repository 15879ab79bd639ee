"""The native kernels' threads: any caller, from any number of threads or after a fork, gets the same numbers."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spillover.kernels import native
from spillover.kernels.formats.packed import pack
from spillover.kernels.linear import linear

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def test_callers_at_once_get_what_each_gets_alone() -> None:
    packed = pack(torch.randn(200, 96))
    inputs = [torch.randn(rows, 96) for rows in range(1, 21)]
    alone = [linear(x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            together = list(pool.map(lambda x: linear(x, packed), inputs))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_without_its_parents_threads() -> None:
    x, packed = torch.randn(16, 96), pack(torch.randn(400, 96))
    expected = linear(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, packed), expected) else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_threads_without_work_sleep() -> None:
    linear(torch.randn(16, 96), pack(torch.randn(400, 96)))
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1
