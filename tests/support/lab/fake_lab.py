"""A lab without servers: fake engines, and load whose times vary as on a real machine.

Speed varies by `unrest` from run to run; the machine's speed follows a slow random walk that all arms share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.lab.engines import CacheReset, Engine, EngineFailed, EngineSpec, Missing, Running
from spillover.lab.experiment import Experiment, WorkloadSpec, parse_experiment
from spillover.lab.run import Bench
from spillover.lab.run_metrics import run_metrics
from spillover.lab.traffic import Measured, Progress


def experiment(**changes: Any) -> Experiment:
    document = {"name": "made-up", "arms": {"a": {"engine": "spillover"}, "b": {"engine": "spillover"}},
                "workloads": {"load": {"dataset-name": "random"}}, "warmups": 2,
                **{key.replace("_", "-"): value for key, value in changes.items()}}
    return parse_experiment({key: value for key, value in document.items() if value is not None})


def make_run(count: int = 20, ttft: float = 0.1, tpot: float = 0.02, output: int = 8, speed: float = 1.0,
             gap: float = 0.05, rng: np.random.Generator | None = None, counters: Mapping[str, float] | None = None,
             details: Mapping[str, Any] | None = None, client: ClientHealth | None = None) -> Run:
    """Return a run with a request every `gap` seconds; each takes ttft + 7 tpot, multiplied by `speed`."""
    records = []
    for index in range(count):
        own = speed * (1.0 if rng is None else float(rng.lognormal(0, 0.05)))
        sent = index * gap
        times = [sent + own * (ttft + step * tpot) for step in range(output)]
        records.append(RequestRecord(index, sent, sent, tuple((at, 1) for at in times), times[-1], 100, output, output))
    return Run(tuple(records), 1e9, records[-1].done, client or ClientHealth(), (0.0, records[-1].done),
               {"prefix_queries": 100.0 * count, "prefix_hits": 0.0} if counters is None else counters,
               {"arrival": "constant", "request_rate": 1 / gap, "burstiness": "inf", "ignore_eos": True,
                **(details or {})})


class FakeEngine(Engine):
    kind = "spillover"
    started = 0

    def __init__(self, spec: EngineSpec, log_folder: Path | None = None) -> None:
        super().__init__(spec, log_folder)
        self.dead: EngineFailed | None = None

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        return None

    def start(self) -> Running:
        FakeEngine.started += 1
        if self.spec.args.get("fails") == "start":
            raise EngineFailed("out of memory", "asked for 90 GB of 80", "torch.OutOfMemoryError")
        self._running = Running("http://fake", "fake", None, None, "fake 1", ("fake", *map(str, self.spec.args)))
        return self._running

    def stop(self) -> None:
        self._running = None

    def check(self) -> None:
        if self.dead is not None:
            raise self.dead

    def version(self) -> str:
        return "fake 1"

    def reset_cache(self) -> CacheReset:
        return CacheReset(True, "fake")

    def metrics(self) -> Mapping[str, float]:
        return {}

    def device_pool_tokens(self) -> int | None:
        return self.spec.args.get("pool")


class FakeLoad:
    """Load without requests: an arm is slowed by the factor in its engine's argument `slowdown`."""

    def __init__(self, seed: int = 0, unrest: float = 0.025, walk: float = 0.01,
                 on_measure: Callable[[FakeEngine, int], None] | None = None, **stats: Any) -> None:
        self._rng = np.random.default_rng(seed)
        self._unrest, self._walk, self._machine = unrest, walk, 0.0
        self._on_measure = on_measure
        self.stats = {"sharing": 0.0, "working_set_tokens": 4000, **stats}
        self.engines: dict[str, FakeEngine] = {}
        self.measured: list[tuple[str, str, int]] = []  # (workload, slowdown, repeat)

    def check(self, workload: WorkloadSpec) -> None: ...

    def warm_up(self, workload: WorkloadSpec, running: Running, count: int) -> int:
        return count

    def measure(self, workload: WorkloadSpec, running: Running, repeat: int,
                progress: Progress | None = None) -> Measured:
        engine = self.engines[str(id(running))]
        self.measured.append((workload.name, str(engine.spec.args.get("slowdown", 1)), repeat))
        if self._on_measure is not None:
            self._on_measure(engine, repeat)
        self._machine += float(self._rng.normal(0, self._walk))
        speed = float(engine.spec.args.get("slowdown", 1.0)) * float(
            np.exp(self._machine + self._rng.normal(0, self._unrest)))
        # Closed loop: a request is sent when the one before has finished, so that speed affects throughput.
        run = make_run(count=12, speed=speed, gap=0.24 * speed, rng=self._rng, details={"arrival": "closed"})
        return Measured(run, run_metrics(run), run_metrics(run, None, run.window), self.stats, self.stats["sharing"],
                        self.stats["working_set_tokens"])

    def bench(self, **changes: Any) -> Bench:
        def make(spec: EngineSpec, log_folder: Path | None = None) -> Engine:
            engine = FakeEngine(spec, log_folder)
            start = engine.start

            def started() -> Running:
                running = start()
                self.engines[str(id(running))] = engine
                return running

            engine.start = started  # type: ignore[method-assign]
            return engine

        return Bench(**{"load": self, "make": make, "missing": lambda spec: None, "settle_seconds": 0.0, **changes})
