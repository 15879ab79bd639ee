"""A result folder with made-up numbers, written and analysed by the lab's own code: only for tests of the report.

`slow` is a slower engine that reports no phases; `vllm` was not installed; `warm` had a cache with prompts of an
earlier run of the workload 'chats'.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillover.bench.records import ClientHealth, RequestRecord, Run
from spillover.lab.analysis import analyse
from spillover.lab.experiment import Experiment, parse_experiment
from spillover.lab.run_metrics import run_metrics
from spillover.lab.schedule import Visit, visits
from spillover.lab.store import ResultFolder, Results
from spillover.lab.validity import Fault

START = 1_790_000_000.0
SPEED = {"device": 1.0, "host": 1.6, "warm": 1.03, "slow": 0.7, "vllm": 1.0}
HITS = {"device": (70, 30, 0), "host": (21, 30, 49), "warm": (66, 30, 4)}  # tokens: computed, device, host
ARMS = tuple(SPEED)


def write_results(folder: Path, arms: Sequence[str] = ARMS, rates: Sequence[float] = (1, 2, 4, 8), blocks: int = 6,
                  passes: int | None = None, name: str = "made-up", about: str = "Made-up numbers.",
                  crashing: str = "", primary: str = "output_throughput") -> Path:
    """`passes`: stop after this number, as if interrupted. `crashing`: an arm that runs out of memory."""
    experiment = parse_experiment({**document(arms, rates, blocks, name, about), "primary": primary})
    kept = ResultFolder.open(folder, experiment)
    kept.begin({"date": "2026-11-15T08:00:00+00:00", "command": f"spill lab run {name}", "commit": "0" * 40,
                "versions": {"python": "3.11.2", "spillover": "0.1.0"},
                "hardware": {"cpu": "Imagined processor", "cores": 2, "memory": 16 << 30}})
    speeds = random.Random(7)
    for visit in visits(experiment):
        if visit.arm == "vllm" or (passes is not None and visit.pass_ >= passes):
            continue
        if visit.arm == crashing:
            kept.write_visit(visit, {"status": "failed", "reason": "out of memory: killed", "metrics": {}, "faults": [],
                                     "log_tail": "loading weights\nKilled <9>", "started": START})
            continue
        rate = float(experiment.workload(visit.workload).options.get("request-rate", 40))
        same_for_all = random.Random(f"{visit.pass_} {visit.workload}")  # arms share a pass's arrivals, as in the lab
        run = made_up_run(same_for_all, visit.arm, SPEED[visit.arm] * speeds.gauss(1, 0.015), rate)
        write_visit(kept, visit, experiment, run)
    for arm in arms:
        kept.write_arm(arm, _told(arm) if arm != crashing else {"status": "failed", "reason": "out of memory: killed"})
    kept.write_analysis(analyse(Results.open(folder)))
    return folder


def document(arms: Sequence[str], rates: Sequence[float], blocks: int, name: str, about: str) -> dict[str, Any]:
    workloads: dict[str, Any] = {
        "chats": {"dataset-name": "multi-turn", "about": "16 chats over a pool that holds 4 of them",
                  "max-concurrency": 8, "offload": True}}
    if rates:
        workloads["rates"] = {"dataset-name": "random", "about": "256 in, 32 out", "offload": False,
                              "sweep": {"request-rate": list(rates)}}
    return {"name": name, "about": about, "baseline": arms[0], "max-blocks": blocks, "order": "alternate",
            "slo": {"ttft": 500}, "workloads": workloads, "arms": {
                arm: {"engine": {"vllm": "vllm", "slow": "llamacpp"}.get(arm, "spillover"), "about": f"The arm {arm}.",
                      "args": {"num-gpu-blocks-override": 96}, "env": {"OMP_NUM_THREADS": "2"} if arm == "host" else {}}
                for arm in arms}}


def made_up_run(chance: random.Random, arm: str, speed: float, rate: float, requests: int = 40) -> Run:
    """Begin one request at a time, every 0.12 s on a server of speed 1; tokens follow every 20 ms, with spikes."""
    times = [chance.expovariate(rate) for _ in range(requests)]
    records, clock, free = [], 0.0, 0.0
    computed, device, host = HITS.get(arm, (100, 0, 0))
    for index in range(requests):
        clock += times[index]
        begin = max(clock, free)
        free = begin + 0.12 / speed
        first = begin + 0.1 / speed * chance.lognormvariate(0, 0.1)
        chunks = [(first, 1)]
        for _ in range(31):
            spike = 0.15 if chance.random() < 0.01 else 0.0
            chunks.append((chunks[-1][0] + 0.02 / speed * chance.lognormvariate(0, 0.12) + spike, 1))
        told = arm in HITS
        records.append(RequestRecord(
            index, clock, clock + 0.0003, tuple(chunks), chunks[-1][0], 256, 32, 32,
            sources={"computed": 256 * computed // 100, "device": 256 * device // 100, "host": 256 * host // 100,
                     "pool": 0, "disk": 0, "remote": 0} if told else None,
            timings={"queue": begin - clock, "restore": 0.02 * (host > 9), "prefill": first - begin,
                     "decode": chunks[-1][0] - first} if told else None))
    done = max(record.done for record in records)
    return Run(tuple(records), START, done, ClientHealth(lag_p99=0.0012, busy=0.08), (done * 0.1, clock), {},
               {"request_rate": rate})


def write_visit(kept: ResultFolder, visit: Visit, experiment: Experiment, run: Run) -> None:
    metrics = run_metrics(run, experiment.slo)
    timings = [record.timings for record in run.records if record.timings]
    metrics |= {f"{phase}_ms": 1e3 * sum(each[phase] for each in timings) / len(timings) for phase in timings[0]} \
        if timings else {}
    faults = [Fault("contamination", "31% of prompt tokens were hits, but the workload shares only 28%")] \
        if visit.arm == "warm" and visit.workload == "chats" else []
    sources = {key: sum((record.sources or {}).get(key, 0) for record in run.records)
               for key in run.records[0].sources or {}}
    monitors = kept.monitor_file(visit)
    write_monitors(monitors, run, visit.arm)
    kept.write_visit(visit, {
        "status": "ok", "reason": None, "started": run.start_unix, "seconds": run.duration, "metrics": metrics,
        "window_metrics": run_metrics(run, experiment.slo, run.window), "sources": sources or None, "counters": {},
        "faults": [fault.to_json() for fault in faults], "client": run.client.to_json(),
        "limit": {"percent": 63.0, "bound": "memory", "text": "63% (memory)"} if sources else {},
        "workload_stats": {"count": 40, "prompt": {"mean": 256, "p50": 256, "max": 256}, "sharing": 0.28,
                           "output": {"mean": 32, "p50": 32, "max": 32}, "working_set_tokens": 15200},
        "retried_faults": [Fault("client-saturated", "busy").to_json()] if visit.index == 0 else [],
        "version": "0.1.0", "monitors": f"monitors/{monitors.name}"}, run)


def write_monitors(path: Path, run: Run, arm: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for second in range(-1, int(run.duration) + 2):
        at, used = START + second, 1.1e9 + 2e7 * second * SPEED[arm]
        rows += [(at, "process", "rss_bytes", used), (at, "process", 'rss_bytes{pid="1"}', used),
                 (at, "cpu", "busy_percent", 80.0 + second % 7), (at, "cpu", 'busy_percent{core="0"}', 99.0),
                 (at, "engine", 'spillover:kv_cache_usage_perc{model_name="m",tier="device"}', 0.1 * (second % 10))]
    columns = ("time", "source", "metric", "value")
    pq.write_table(pa.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))), path)


def _told(arm: str) -> dict[str, Any]:
    if arm == "vllm":
        return {"status": "skipped", "reason": "vllm is not installed", "install": "pip install vllm"}
    return {"status": "ready", "reason": None, "install": None, "version": "0.1.0", "device_pool_tokens": 1536,
            "command": ["spill", "serve", "--num-gpu-blocks-override", "96", "--port", "8123"]}
