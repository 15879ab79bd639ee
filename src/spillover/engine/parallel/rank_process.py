"""The process of a rank other than rank 0, which starts it: `python -m spillover.engine.parallel.rank_process FD`.

It builds its part of the model and then runs every step that rank 0 sends. It exits when rank 0 exits for any reason:
on Linux the kernel kills it, and otherwise its socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.kernels.huge_pages import map_file

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main(descriptor: int) -> int:
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes; only rank 0 handles them
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank_0 = Connection(descriptor)
    try:
        line = rank_0.recv_bytes()
    except EOFError:
        return 1
    from spillover.engine.parallel.messages import Lost, decode_launch, encode

    launch = decode_launch(line)
    if os.getppid() != launch.parent:  # rank 0 exited before prctl took effect
        return 1
    try:
        _serve(rank_0, line)
        return 0
    except EOFError:  # rank 0 has exited
        return 1
    except SpilloverError as error:
        lost = Lost(str(error), True)
    except BaseException:
        lost = Lost(traceback.format_exc(), False)
    with contextlib.suppress(OSError):
        rank_0.send_bytes(encode(lost))
    return 1


def _serve(rank_0: Connection, line: bytes) -> None:
    import torch

    from spillover.engine.assemble import make_runner
    from spillover.engine.parallel.messages import STOP, Loaded, Met, Started, decode_launch, encode
    from spillover.engine.parallel.parallel_runner import Follower
    from spillover.engine.parallel.start import meet
    from spillover.engine.planned import planned_rank

    launch = decode_launch(line)
    torch.set_num_threads(launch.threads)
    planned = planned_rank(launch.config, launch.plan, launch.rank)
    rank_0.send_bytes(encode(Started()))
    ranks = meet(launch.plan.device, launch.rank, planned.shard.size, Path(launch.folder),
                 launch.plan.kv_bytes if launch.shares_pool else 0)
    rank_0.send_bytes(encode(Met()))

    def shared(nbytes: int) -> torch.Tensor:
        if launch.pool is None:
            return ranks.pools[0][:nbytes]
        memory = map_file(launch.pool, nbytes)
        os.close(launch.pool)
        return torch.frombuffer(memory, dtype=torch.uint8)

    own = launch.pool is None and not launch.shares_pool
    runner = make_runner(planned, ranks=ranks, allocate=None if own else shared)
    try:
        rank_0.send_bytes(encode(Loaded(runner.weight_bytes)))
        follower = Follower(runner, launch.plan.device == "cuda")
        while (message := rank_0.recv_bytes()) != STOP:
            follower.launch(message)
    finally:
        runner.close()


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the cleanup of gloo and of steps, which could wait for ranks that are gone
