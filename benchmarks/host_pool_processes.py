"""Engines, and the owner of a shared pool, as processes, for host_pool.py and host_pool_kills.py.

Run as a program, this file is an engine: its argument holds the flags of `LLM` as JSON, it reads one job per line from
standard input and writes one answer per line to its output; it exits at the end of its input, so when its parent dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillover.memory.shared_pool.client import PoolUnavailableError, ask_owner
from spillover.memory.shared_pool.wire import Ask, Report

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768,
              "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "hidden_act": "silu",
              "torch_dtype": "float32", "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 0},
    "qwen3-0.6b": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
                   "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
                   "max_position_embeddings": 40960, "hidden_act": "silu", "torch_dtype": "bfloat16",
                   "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": 151645},
}


def model_flags(model: str, folder: Path) -> dict[str, Any]:
    """Return the flags for a shape with random weights, or for a model in a folder."""
    if model not in SHAPES:
        return {"model": model, "skip_tokenizer_init": True}
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


def vocabulary(model: str) -> int:
    config = SHAPES.get(model) or json.loads(Path(model, "config.json").read_text())
    return int(config["vocab_size"])


class EngineProcess:
    """An engine in a separate process; wait_ready() returns its sizes."""

    def __init__(self, flags: dict[str, Any], log: Path) -> None:
        self._flags, self._log = flags, log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, __file__, json.dumps(self._flags)], stderr=log, text=True,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()

    def wait_ready(self, seconds: float = 300.0) -> dict[str, Any]:
        answer = self.answer(seconds)
        if answer is None:
            raise RuntimeError(f"an engine did not start: {self._log.read_text()[-2000:]}")
        return answer

    def send(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer, None if the engine has exited; raise TimeoutError if there is none in time."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"an engine gave no answer within {seconds} s") from None
        return None if line is None else json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def stop(self) -> None:
        """Close the engine's input, as the exit of its parent would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.kill()

    def _close(self) -> None:
        self.process.wait(30)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)


class OwnerProcess:
    """A `spill pool serve` process, with its socket in a folder."""

    def __init__(self, memory: int, folder: Path) -> None:
        self.socket = folder / "pool" / "sock"
        self._command = [sys.executable, "-c", "from spillover.cli.main import main; main()", "pool", "serve",
                         "--memory", str(memory), "--socket", str(self.socket)]
        self._log = folder / "owner.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                if self.report().pid == self.process.pid:
                    return
            except PoolUnavailableError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the pool's owner did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def report(self) -> Report:
        return ask_owner(self.socket, Ask(), Report)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.kill()

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def main() -> None:
    from spillover import LLM, SamplingParams

    with LLM(**json.loads(sys.argv[1])) as llm:
        print(json.dumps({"slot_bytes": llm.plan.slot_bytes, "blocks": llm.plan.num_blocks,
                          "device": llm.plan.device_name}), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            outputs = llm.generate(job["prompts"], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            print(json.dumps({
                "seconds": seconds, "tokens": [output.outputs[0].token_ids for output in outputs],
                "sources": [{name: getattr(output.sources, name) for name in (
                    "computed", "device", "host", "pool", "disk", "remote")} for output in outputs]}), flush=True)


if __name__ == "__main__":
    main()
