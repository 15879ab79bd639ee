"""Cost of loading a checkpoint: by ranks that each read their part, and by replicas whose weights are in one pool.

    python benchmarks/sharded_load.py --output-json benchmarks/results/sharded-load.json

A checkpoint of random weights is written, in several files. It is loaded, with none of it in the page cache, by 1, 2
and 4 ranks on a CPU (`ranks`); and, with a budget in which most of its weights do not fit, by two engines one after the
other, first with separate weights, then with a shared pool (`replicas`). For each: seconds, the bytes that all
processes read and those that came from the disk, relative to the size of the checkpoint, and the peak memory of all
processes together, next to what the plan says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from host_pool_processes import OwnerProcess

from spillover.bench.provenance import provenance
from spillover.plan.hardware import probe

SHAPE = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}
ENGINE = """
import json, sys
from spillover import LLM, SamplingParams
with LLM(**json.loads(sys.argv[1])) as llm:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = llm.generate([[1, 2, 3, 4, 5]], params, use_tqdm=False)[0]
    print(json.dumps({"tokens": output.outputs[0].token_ids, "planned": llm.plan.total_bytes,
                      "weights": llm.plan.weight_bytes}), flush=True)
    sys.stdin.read()
"""
READY_SECONDS = 300.0


class Engine:
    """An engine in a separate process, with the ranks that it starts."""

    def __init__(self, flags: dict[str, Any], log: Path) -> None:
        self.started = time.monotonic()
        with log.open("ab") as stream:
            self.process = subprocess.Popen([sys.executable, "-c", ENGINE, json.dumps(flags)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=stream)
        self.seconds = 0.0

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(READY_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        self.seconds = time.monotonic() - self.started
        if not line:
            raise SystemExit("an engine did not start; its log says why")
        report: dict[str, Any] = json.loads(line)
        return report

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()


class Watch:
    """The peak memory of all processes together, private and shared, sampled all the time."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.peak = 0
        self._engines = engines
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, sum(_memory(process) for engine in self._engines
                                           for process in engine.processes()))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(10)
        return self.peak


def _memory(process: psutil.Process) -> int:
    """Return the memory that is no copy of a file; shared memory is divided by the processes that share it."""
    with contextlib.suppress(OSError, psutil.Error):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in rollup.splitlines()[1:]}
        return sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
    return 0


def _read(engines: Sequence[Engine]) -> tuple[int, int]:
    """Return the bytes that processes have read, and those of them that came from the disk."""
    requested_bytes = stored = 0
    for engine in engines:
        for process in engine.processes():
            with contextlib.suppress(psutil.Error):
                counters = process.io_counters()
                requested_bytes += counters.read_chars
                stored += counters.read_bytes
    return requested_bytes, stored


def write_checkpoint(folder: Path) -> int:
    """Write random weights in files of at most 300 MB; return their total bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop a checkpoint from the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextlib.contextmanager
def loaded(all_flags: Sequence[dict[str, Any]], log: Path) -> Iterator[dict[str, Any]]:
    """Start engines one after another; yield the measurements of their loading."""
    engines: list[Engine] = []
    watch = Watch(engines)
    try:
        reports = []
        for flags in all_flags:
            engines.append(Engine(flags, log))
            reports.append(engines[-1].ready())
        requested_bytes, stored = _read(engines)
        time.sleep(0.2)
        now = sum(_memory(process) for engine in engines for process in engine.processes())
        assert all(each["tokens"] == reports[0]["tokens"] for each in reports)
        yield {"seconds": [engine.seconds for engine in engines], "requested_bytes": requested_bytes,
               "disk_bytes": stored, "memory_bytes": now, "peak_bytes": watch.stop(), "told": reports,
               "processes": sum(len(engine.processes()) for engine in engines)}
    finally:
        watch.stop()
        for engine in engines:
            engine.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": {}, "replicas": {}}
    with tempfile.TemporaryDirectory(prefix="sharded-load-", dir=arguments.folder) as name:
        folder = Path(name)
        nbytes = write_checkpoint(folder)
        result["checkpoint_bytes"] = nbytes
        flags = {"model": str(folder), "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 2,
                 "num_gpu_blocks_override": 32}
        for ranks in arguments.ranks:
            forget(folder)
            with loaded([{**flags, "tensor_parallel_size": ranks}], folder / "log") as found:
                (report,) = found["told"]
                found["planned_bytes"] = ranks * report["planned"]
                result["ranks"][str(ranks)] = _shares(found, nbytes)
        budget = {**flags, "gpu_memory": arguments.gpu_memory, "weights": "sequential"}
        budget.pop("num_gpu_blocks_override")
        forget(folder)
        with loaded([budget, budget], folder / "log") as found:
            result["replicas"]["own"] = _shares(found, nbytes)
        forget(folder)
        owner = OwnerProcess(arguments.pool, folder)
        try:
            shared = {**budget, "host_pool": str(owner.socket)}
            with loaded([shared, shared], folder / "log") as found:
                found["pool_weights_bytes"] = owner.report().weights
                result["replicas"]["pool"] = _shares(found, nbytes)
        finally:
            owner.kill()
    return result


def _shares(found: dict[str, Any], nbytes: int) -> dict[str, Any]:
    return {**found, "requested": found["requested_bytes"] / nbytes, "from_disk": found["disk_bytes"] / nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--gpu-memory", default="700MB", help="memory of each replica; its weights are larger")
    parser.add_argument("--pool", type=int, default=6 << 30, help="bytes of the pool")
    parser.add_argument("--folder", help="folder on a disk for the temporary checkpoint")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    machine = probe()
    result = {**provenance({"cpu": machine.cpu, "cores": machine.cores, "device": "cpu"}),
              "command": " ".join(["python", "benchmarks/sharded_load.py", *sys.argv[1:]]), **measure(arguments)}
    print(json.dumps(result, indent=2))
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
