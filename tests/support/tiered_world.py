"""A simulated engine with KV tiers: there is no model, and every token read back is checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from spillover.engine.loop import Engine
from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.kv.loans import BlockLender
from spillover.memory.spill.store import SpillStore
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.tiers.base import Tier
from support.simulated import VOCAB, SimulatedRunner, expected_tokens
from support.simulated_tiers import SimulatedLink

SIZE = 4
LENGTH = 400
PATIENCE = 20.0  # maximum seconds of a whole run; above it the run counts as hanging


class World:
    """A simulated engine with tiers."""

    def __init__(self, num_blocks: int = 24, windows: tuple[int | None, ...] = (None,), host: int = 0,
                 tiers: Sequence[Callable[[Callable[[], None]], Tier]] = (), restore: str = "always",
                 eager: bool = False, overlap: bool = True, fault: Callable[[], bool] = lambda: False,
                 tokens: int = 32, prefill_seconds: float = 1e-3, staging: int = 8,
                 margin: int = 4, most_blocks: int | None = None, lender: BlockLender | None = None,
                 **options: object) -> None:
        self.runner = SimulatedRunner(SIZE, windows)
        self.link = SimulatedLink(self.runner, fault)
        self.wake = threading.Event()
        self.tiers = [make(self.wake.set) for make in tiers]
        self.store = SpillStore(self.link, self.tiers, host, staging, eager, wake=self.wake, **options)
        self.runner.host_slots = self.store.slots
        self.kv = KVCache(num_blocks, SIZE, windows, most_blocks=most_blocks, lender=lender)
        self.connector = TieredConnector(self.kv, self.store, margin, restore, prefill_seconds)
        self.scheduler = Scheduler(SchedulerConfig(8, tokens, LENGTH, len(windows)), self.kv, self.connector)
        self.engine = Engine(self.scheduler, self.runner, overlap)
        self.made = 0

    def request(self, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> Request:
        self.made += 1
        request = Request(str(self.made), prompt, SamplingParams(temperature=0, max_tokens=max_tokens), cache_salt=salt)
        self.scheduler.add(request)
        return request

    def run(self, check: bool = True) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.engine.has_work:
            steps = self.engine.num_steps
            if not self.engine.step() and self.engine.num_steps == steps:
                self.engine.wait(0.002)
            if check:
                self.scheduler.check()
            assert time.monotonic() < deadline, "the engine hangs"

    def ask(self, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> Request:
        request = self.request(prompt, max_tokens, salt)
        self.run()
        assert request.output_token_ids == expected_tokens(request, LENGTH)
        assert request.sources is not None
        assert request.sources.total == len(prompt)
        return request

    def check(self) -> None:
        self.kv.check()
        self.connector.check()

    def close(self) -> None:
        self.engine.close()


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]
