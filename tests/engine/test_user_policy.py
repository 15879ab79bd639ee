"""A user's policies in an engine: one that pins too much changes no token, one that fails is reported with its flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from spillover.engine.cuda.policy_thread import PolicyThread
from spillover.errors import SpilloverError
from spillover.kernels.moe.page_table import PageTable
from spillover.memory.policies.experts import expert_policy
from spillover.memory.transfer.cuda_transfers import CudaTransfers
from spillover.memory.transfer.link_queue import Priority
from support import starved
from support.policy_of_my_own import Backwards

MODEL = "mixtral"
HERE = __name__


class Pinned(Backwards):
    """A policy that pins every expert, more than there are slots."""

    def worth(self, layer: int) -> Sequence[float]:
        return [float("inf")] * self.experts


class ShortWorth(Backwards):
    def worth(self, layer: int) -> Sequence[float]:
        return [1.0, 2.0]


class NoSuchExpert(Backwards):
    def prefetch(self, layer: int) -> Sequence[int]:
        return [-1, 9999]


class LosesCount(Backwards):
    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        raise KeyError(layer)


class Doorman:
    """An admission policy that always raises an error."""

    def admit(self, key: bytes, tier: str) -> bool:
        raise RuntimeError("closed")


def starving(folder: str, whole: starved.Answers, policy: str) -> starved.Answers:
    budget = (whole.plan.weight_bytes + whole.plan.workspace_bytes) * 3 // 4
    return starved.answer(folder, starved.prompts(), weights="experts", policy=f"{HERE}:{policy}",
                          gpu_memory=str(budget))


def test_more_is_pinned_than_there_is_room_for(tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, MODEL)
    whole = starved.answer(folder, starved.prompts())
    found = starving(folder, whole, "Pinned")
    assert found.tokens == whole.tokens
    assert found.traffic.expert_misses > 0
    found.weights.experts.slots.cache.check()


def test_a_policy_that_fails_in_a_step_is_named(tmp_path: Path) -> None:
    folder = starved.write_config(tmp_path, MODEL)
    whole = starved.answer(folder, [])
    for policy, method in (("ShortWorth", "worth"), ("NoSuchExpert", "prefetch"), ("LosesCount", "on_route")):
        with pytest.raises(SpilloverError, match=f"--policy {HERE}:{policy}: its method {method} "):
            starving(folder, whole, policy)


def test_a_policy_that_fails_beside_the_device_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    table = PageTable.make([2], 8, 4, 4, torch.device("cpu"))
    policy = expert_policy(f"{HERE}:LosesCount")
    policy.on_load(1, 8, 2)
    thread = PolicyThread(policy, table, None)
    try:
        table.log[1] = 3  # step 1 requested expert 3, and step 2 has begun
        table.step.fill_(2)
        thread.step_completed()
        thread._thread.join(10)
        assert not thread._thread.is_alive()
    finally:
        thread.close()
    (line,) = [record for record in caplog.records if "--policy" in record.getMessage()]
    assert f"--policy {HERE}:LosesCount: its method on_route failed (KeyError: 0)" in line.getMessage()
    assert line.exc_info is None


def test_the_worth_goes_to_the_device_as_a_counted_copy() -> None:
    transfers = FakeTransfers()
    table = PageTable.make([2, 2], 8, 4, 4, torch.device("cpu"))
    policy = Backwards()
    policy.on_load(2, 8, 2)
    thread = PolicyThread(policy, table, cast(CudaTransfers, transfers))
    thread.close()
    assert table.worth.tolist() == [list(policy.worth(layer)) for layer in range(2)]
    assert transfers.started == [(Priority.DEMAND, table.worth.nbytes)]


class FakeTransfers:
    """Copies at once."""

    def __init__(self) -> None:
        self.started: list[tuple[Priority, int]] = []

    def start_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], priority: Priority) -> FakeTransfers:
        for target, source in pairs:
            target.copy_(source)
            self.started.append((priority, target.nbytes))
        return self

    def synchronize(self) -> None: ...


def test_an_admission_that_fails_stores_nothing_and_changes_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = starved.write_config(tmp_path, "llama")
    whole = starved.answer(folder, starved.prompts())
    found = starved.answer(folder, starved.prompts(), host_memory="64MB", spill="eager",
                           spill_admission=f"{HERE}:Doorman")
    assert found.tokens == whole.tokens
    assert sum("--spill-admission" in record.getMessage() for record in caplog.records) == 1
