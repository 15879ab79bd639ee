"""Engines of one model on one machine: a shared pool compared with private host tiers, at the same total memory.

    python benchmarks/host_pool.py --output-json benchmarks/results/host_pool.json
    python benchmarks/host_pool.py --device cuda --model qwen3-0.6b --prefix 2048 --output-json ...

Requests begin with one of several long prefixes and are assigned to the engines in turn, whatever these have cached,
as by a load balancer that does not know about caches. Each engine answers one batch at a time, all engines at once.
`--memory` is the host memory of all engines together, as a share of the KV of all prefixes: private tiers get equal
parts, the pool gets all of it minus the staging slots of its engines. In each repeat both arms run the same requests,
in alternating order; their tokens must be the same. The hit rate counts prompt tokens. After the last repeat one engine
of the pool is killed and restarted, to see where its first prefixes come from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from host_pool_processes import EngineProcess, OwnerProcess, model_flags, vocabulary

from spillover.bench.provenance import provenance
from spillover.plan.hardware import probe
from spillover.plan.tiers import STAGING_BLOCKS, slot_stride

ANSWER_SECONDS = 600.0


class Arm:
    """Running engines, with a private tier each or with one shared pool."""

    def __init__(self, name: str, flags: dict[str, Any], arguments: argparse.Namespace, folder: Path, total: int,
                 stack: ExitStack) -> None:
        self.name = name
        if name == "pool":
            staging = arguments.engines * STAGING_BLOCKS * arguments.stride
            self.host_bytes = {"pool": total - staging, "staging": staging}
            owner = OwnerProcess(total - staging, folder)
            stack.callback(owner.stop)
            tier = {"host_pool": str(owner.socket)}
        else:
            self.host_bytes = {"each": total // arguments.engines}
            tier = {"host_memory": str(total // arguments.engines)}
        self.engines = [EngineProcess({**flags, **tier}, folder / f"{name}.log") for _ in range(arguments.engines)]
        for engine in self.engines:
            stack.callback(engine.kill)
            engine.wait_ready()

    def run(self, batches: list[list[list[list[int]]]], max_tokens: int) -> dict[str, Any]:
        """Answer each engine's batches, all engines at once; return the duration and the sources of prompt tokens."""
        sources: Counter[str] = Counter()
        tokens: list[Any] = []
        started = time.perf_counter()
        for engine, mine in zip(self.engines, batches, strict=True):
            for batch in mine:  # batches queue in the engine's pipe, so that no engine waits for another
                engine.send(batch, max_tokens)
        for engine, mine in zip(self.engines, batches, strict=True):
            for _ in mine:
                answer = engine.answer(ANSWER_SECONDS)
                assert answer is not None, f"an engine of {self.name} died"
                tokens += answer["tokens"]
                for found in answer["sources"]:
                    sources.update(found)
        seconds = time.perf_counter() - started
        requests = sum(len(batch) for mine in batches for batch in mine)
        return {"arm": self.name, "seconds": seconds, "requests_per_second": requests / seconds,
                "hit_rate": 1 - sources["computed"] / sources.total(), "sources": dict(sources), "tokens": tokens}


def workload(arguments: argparse.Namespace, rng: random.Random, prefixes: list[list[int]],
             words: int) -> list[list[list[list[int]]]]:
    """Return batches of prompts for each engine: prefixes in random order, each followed by a different question."""
    prompts = [rng.choice(prefixes) + [rng.randrange(1, words) for _ in range(arguments.question)]
               for _ in range(arguments.requests)]
    mine = [prompts[number :: arguments.engines] for number in range(arguments.engines)]
    return [[part[start : start + arguments.batch] for start in range(0, len(part), arguments.batch)] for part in mine]


def restarted(arm: Arm, prefixes: list[list[int]]) -> dict[str, Any]:
    """Kill an engine and start it again; return the sources of its first prompts, and how long they take."""
    engine = arm.engines[0]
    engine.kill()
    started = time.perf_counter()
    engine.start()
    engine.wait_ready()
    up = time.perf_counter() - started
    firsts = []
    for prefix in prefixes[:4]:
        engine.send([[*prefix, 1, 2, 3]], 1)
        answer = engine.answer(ANSWER_SECONDS)
        assert answer is not None
        firsts.append({"seconds": answer["seconds"], **answer["sources"][0]})
    return {"seconds_to_start": up, "first_prompts": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--model", default="small", help="small, qwen3-0.6b (both with random weights), or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prefix")
    parser.add_argument("--question", type=int, default=32, help="tokens of a question")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=192, help="number of requests per repeat, over all engines")
    parser.add_argument("--batch", type=int, default=4, help="requests that an engine answers at a time")
    parser.add_argument("--memory", type=float, default=1.5, help="total host memory, as a share of all prefixes' KV")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    rng, words = random.Random(arguments.seed), vocabulary(arguments.model)
    prefixes = [[rng.randrange(1, words) for _ in range(arguments.prefix)] for _ in range(arguments.prefixes)]
    length = arguments.prefix + arguments.question + arguments.answer + 16
    block = 16
    with tempfile.TemporaryDirectory(prefix="pool-") as name, ExitStack() as stack:
        folder = Path(name)
        flags = {**model_flags(arguments.model, folder), "device": arguments.device, "max_model_len": length,
                 "max_num_seqs": arguments.batch, "block_size": block,
                 "num_gpu_blocks_override": (arguments.batch + 1) * -(-length // block)}
        first = EngineProcess({**flags, "host_memory": "64MB"}, folder / "first.log")
        ready = first.wait_ready()
        first.kill()
        arguments.stride = slot_stride(ready["slot_bytes"])
        total = int(arguments.memory * arguments.prefixes * (arguments.prefix // block) * arguments.stride)
        arms = [Arm(name, flags, arguments, folder, total, stack) for name in ("private", "pool")]
        repeats: list[dict[str, Any]] = []
        same = True
        for repeat in range(-1, arguments.repeats):  # the first is a warm-up that fills the tiers
            batches = workload(arguments, random.Random(arguments.seed + 1000 + repeat), prefixes, words)
            done = [arm.run(batches, arguments.answer) for arm in (arms if repeat % 2 else arms[::-1])]
            same &= done[0].pop("tokens") == done[1].pop("tokens")
            for entry in done if repeat >= 0 else ():
                repeats.append({"repeat": repeat, **entry})
                print(f"{repeat} {entry['arm']:8} {entry['requests_per_second']:8.2f} requests/s, "
                      f"{100 * entry['hit_rate']:5.1f}% hits, {entry['sources']}", flush=True)
        again = restarted(arms[1], prefixes)
    machine = probe()
    result = {
        **provenance({"cpu": machine.cpu, "cores": machine.cores, "device": ready["device"]}),
        "command": " ".join(["python", "benchmarks/host_pool.py", *sys.argv[1:]]),
        "workload": {key: value for key, value in vars(arguments).items() if key != "output_json"},
        "host_bytes_in_all": total, "host_bytes": {arm.name: arm.host_bytes for arm in arms}, "same_tokens": same,
        "repeats": repeats, "restart": again,
        "median": {arm.name: {key: statistics.median(entry[key] for entry in repeats if entry["arm"] == arm.name)
                              for key in ("requests_per_second", "hit_rate")} for arm in arms},
    }
    print(json.dumps({key: result[key] for key in ("median", "same_tokens", "restart")}, indent=2))
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
