"""Counters of an engine since its start, to print or to take differences of."""

from __future__ import annotations

from dataclasses import dataclass

from spillover.engine.loop import Engine
from spillover.engine.parallel.parallel_runner import ranks_report
from spillover.engine.parallel.report import ONE, RanksReport
from spillover.engine.speculation.speculator import SpeculationStats
from spillover.memory.kv.sequence import CacheStats
from spillover.memory.spill.report import TierReport, by_name


@dataclass(frozen=True)
class EngineStats:
    cache: CacheStats
    block_size: int
    num_running: int
    num_waiting: int
    steps: int
    preemptions: int
    # Summed over steps, so that the ratio of their differences is a mean over steps.
    slots_held: int  # token slots in blocks that running requests hold
    slots_wasted: int  # token slots without a token in these blocks
    tiers: tuple[TierReport, ...] = ()  # the tiers below the device, nearest first
    speculation: SpeculationStats | None = None  # None if speculation is off
    ranks: RanksReport = ONE

    @classmethod
    def of(cls, engine: Engine) -> EngineStats:
        scheduler = engine.scheduler
        return cls(
            cache=scheduler.kv.stats,
            block_size=scheduler.kv.block_size,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            steps=engine.num_steps,
            preemptions=scheduler.num_preemptions,
            slots_held=engine.slots_held,
            slots_wasted=engine.slots_wasted,
            tiers=by_name(scheduler.connector.reports()),
            speculation=scheduler.speculator.stats(),
            ranks=ranks_report(engine.runner),
        )
