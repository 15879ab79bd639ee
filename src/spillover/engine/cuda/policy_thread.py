"""The thread that runs the policy of experts for a CUDA device: it reads the routing log and writes experts' worth.

Steps do not wait for it, and it does not wait for steps: the device evicts by the worth that was written last.
"""

from __future__ import annotations

import logging
import threading

import torch

from spillover.errors import SpilloverError
from spillover.kernels.moe.page_table import PageTable
from spillover.memory.policies.experts.protocol import ExpertPolicy
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority

log = logging.getLogger("spillover.engine")

PAUSE = 0.002  # seconds between two reads of the log, so that several steps are read at once


class PolicyThread:
    def __init__(self, policy: ExpertPolicy, table: PageTable, transfers: CudaTransfers | None) -> None:
        self._policy = policy
        self._table = table
        self._worth = torch.zeros(table.worth.shape, pin_memory=table.worth.is_cuda)
        self._transfers = transfers
        self._read = 0  # number of the last step that was read from the log
        self._step_completed = False  # whether another step has completed since the thread last woke up
        self._news = threading.Condition()
        self._stopping = False
        policy.on_phase("decode")  # larger steps do not use the page table
        self.write()
        self._thread = threading.Thread(target=self._run, name="spillover-policy", daemon=True)
        self._thread.start()

    def step_completed(self) -> None:
        """Record that another step that used the page table has completed."""
        with self._news:
            self._step_completed = True
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()
        self._thread.join()

    def read(self, last: int) -> None:
        """Report the steps up to number `last` to the policy, as far as the log still contains them."""
        rows = self._table.log.shape[0]
        for step in range(max(self._read + 1, last - rows + 2), last + 1):
            row = self._table.log[step % rows]
            for layer in range(row.shape[0]):
                experts = [expert for expert in dict.fromkeys(row[layer].tolist()) if expert >= 0]
                if experts:
                    self._policy.on_route(step, layer, experts)
        self._read = last

    def write(self) -> None:
        for layer in range(self._worth.shape[0]):
            self._worth[layer] = torch.tensor(self._policy.worth(layer), dtype=torch.float32)
        if self._transfers is None:
            self._table.worth.copy_(self._worth)
            return
        target, source = (each.view(-1).view(torch.uint8) for each in (self._table.worth, self._worth))
        ended = self._transfers.start_all([(target, source)], Priority.DEMAND)
        ended.synchronize()  # the copy must complete before the pinned buffer is written again

    def _complete(self) -> int:
        """Return the number of the last step whose log is complete; the one after it may still be running."""
        with torch.cuda.stream(self._transfers.stream(Priority.DEMAND) if self._transfers is not None else None):
            return int(self._table.step.item()) - 1

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._stopping and not self._step_completed:
                    self._news.wait()
                if self._stopping:
                    return
                self._step_completed = False
            try:
                self.read(self._complete())
                self.write()
            except SpilloverError as error:  # from a user's own policy; the message explains the error without a trace
                log.error("%s; the device keeps evicting by the last worth it received", error)
                return
            except Exception:
                log.exception("the policy of experts failed; the device keeps evicting by the last worth it received")
                return
            threading.Event().wait(PAUSE)
