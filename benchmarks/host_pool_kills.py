"""Engines and the owner of their shared pool, killed and stopped in random order under load: are tokens the same?

    python benchmarks/host_pool_kills.py --rounds 100 --output-json benchmarks/results/host_pool_kills.json

In each round every engine gets prompts that all engines share, and one of these faults happens while it works: none,
the owner is killed (SIGKILL) or stopped for a moment (SIGSTOP), an engine is killed, or both are, in either order.
Killed processes are restarted. Every answer is compared with that of an engine without a pool. At the end nothing may
be left: no process, file in /dev/shm or slot held by a dead engine. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from host_pool_processes import EngineProcess, OwnerProcess, model_flags, vocabulary

FAULTS = ("none", "owner", "engine", "owner, engine", "engine, owner", "stop")
ANSWER_SECONDS = 300.0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    shm = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="pool-") as name:
        folder = Path(name)
        flags = {**model_flags(arguments.model, folder), "device": arguments.device, "max_model_len": 256,
                 "num_gpu_blocks_override": 48, "restore": "always", "spill": "eager"}
        words = vocabulary(arguments.model)
        prompts = [[rng.randrange(1, words) for _ in range(arguments.prompt)] for _ in range(arguments.prompts)]
        expected = _expected(flags, prompts, folder)
        owner = OwnerProcess(arguments.memory, folder)
        engines = [EngineProcess({**flags, "host_pool": str(owner.socket)}, folder / "engine.log")
                   for _ in range(arguments.engines)]
        try:
            for engine in engines:
                engine.wait_ready()
            result = _rounds(rng, arguments, prompts, expected, owner, engines)
            for engine in engines:
                engine.stop()
            result.update(left_behind(owner))
        finally:
            for engine in engines:
                engine.kill()
            owner.kill()
        result["socket_left"] = owner.socket.exists()
    result["shm_left"] = sorted(set(os.listdir("/dev/shm")) - shm)
    return result


def _expected(flags: dict[str, Any], prompts: list[list[int]], folder: Path) -> list[list[int]]:
    plain = EngineProcess({name: value for name, value in flags.items() if name not in ("restore", "spill")},
                          folder / "plain.log")
    try:
        plain.wait_ready()
        plain.send(prompts, 4)
        answer = plain.answer(ANSWER_SECONDS)
        assert answer is not None
        return list(answer["tokens"])
    finally:
        plain.kill()


def _rounds(rng: random.Random, arguments: argparse.Namespace, prompts: list[list[int]], expected: list[list[int]],
            owner: OwnerProcess, engines: list[EngineProcess]) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    answers = wrong = lost = 0
    longest = 0.0
    # All faults are about equally frequent, in random order.
    plan = [FAULTS[number % len(FAULTS)] for number in range(arguments.rounds)]
    rng.shuffle(plan)
    for fault in plan:
        faults[fault] += 1
        victim = rng.randrange(len(engines))
        batches = [rng.sample(range(len(prompts)), k=min(6, len(prompts))) for _ in engines]
        for engine, chosen in zip(engines, batches, strict=True):
            engine.send([prompts[number] for number in chosen], 4)
        time.sleep(rng.random() * 0.2)
        for step in fault.split(", "):
            if step == "owner":
                owner.kill()
            elif step == "engine":
                engines[victim].kill()
            elif step == "stop":
                owner.signal(signal.SIGSTOP)
                time.sleep(rng.random())
                owner.signal(signal.SIGCONT)
            time.sleep(rng.random() * 0.05)
        if "owner" in fault:
            owner.start()
        for number, (engine, chosen) in enumerate(zip(engines, batches, strict=True)):
            answer = engine.answer(ANSWER_SECONDS)
            if answer is None:
                assert number == victim, "an engine exited without a fault"
                assert "engine" in fault, "an engine exited without a fault"
                lost += 1
                engine.start()
                engine.wait_ready()
                continue
            longest = max(longest, answer["seconds"])
            for which, tokens, found in zip(chosen, answer["tokens"], answer["sources"], strict=True):
                answers += 1
                wrong += tokens != expected[which]
                sources.update(found)
            if number == victim and "engine" in fault:  # the engine had answered before it was killed
                engine.start()
                engine.wait_ready()
    return {"rounds": arguments.rounds, "faults": dict(faults), "answers": answers, "wrong": wrong,
            "batches_lost_with_their_engine": lost, "prompt_tokens_by_source": dict(sources),
            "longest_batch_seconds": longest}


def left_behind(owner: OwnerProcess) -> dict[str, Any]:
    """Return what is left in a pool after its engines have exited; stop the owner."""
    deadline = time.monotonic() + 30
    while owner.report().engines and time.monotonic() < deadline:
        time.sleep(0.01)
    report, files = owner.report(), owner.open_files
    stride = -(-max((model.payload_bytes for model in report.models), default=1) // 4096) * 4096
    held = report.used - sum(model.blocks for model in report.models) * stride
    owner.stop()
    return {"engines_left": report.engines, "bytes_held_by_nobody": held, "owner_open_files": files,
            "owner_exit_code": owner.process.returncode, "pool_blocks": sum(model.blocks for model in report.models)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", default="small", help="small, qwen3-0.6b (both with random weights), or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=64 << 20, help="bytes of the pool")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=193, help="tokens of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    result = run(arguments)
    result["seconds"] = time.monotonic() - started
    result["command"] = " ".join(["python", "benchmarks/host_pool_kills.py", *sys.argv[1:]])
    print(json.dumps(result, indent=2))
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(result, indent=2) + "\n")
    clean = not (result["wrong"] or result["engines_left"] or result["bytes_held_by_nobody"] or result["shm_left"]
                 or result["socket_left"] or result["owner_exit_code"] or result["owner_open_files"] > 32)
    sys.exit(0 if clean and result["prompt_tokens_by_source"].get("pool") else 1)


if __name__ == "__main__":
    main()
