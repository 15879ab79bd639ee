"""Cost of KV with one byte per value: HellaSwag with full, fp8 and int8 KV, on the device or in host memory (--spill).

    python benchmarks/kv_dtype.py ../shared/data/eval/hellaswag_val_full.txt.bz2 --tasks 200 --output-json results.json
    python benchmarks/kv_dtype.py ... --spill    # full KV on the device, and a pool so small that contexts are restored

Every ending is decoded token by token after its context, so that each token reads the stored KV of the tokens before.
With --spill the contexts run first and are evicted from the device; the tokens that are then restored are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from made_by import made_by

from spillover import LLM, SamplingParams
from spillover.engine.requests.request import Request, Status
from spillover.eval.tasks.base import DataFile
from spillover.eval.tasks.choices import Question, choose, encode, read_hellaswag

KINDS = ("auto", "fp8", "int8")
SPILL_POOL = 64  # blocks: about ten contexts
SPILL_FLAGS: dict[str, Any] = {
    "host_memory": "2GB", "num_gpu_blocks_override": SPILL_POOL, "max_num_seqs": 4, "spill": "eager",
    "restore": "always",
}


class Forced:
    """A replacement for a grammar: it allows only the next token of the text to be scored."""

    error = None

    def __init__(self, token_ids: list[int]) -> None:
        self._left = token_ids[::-1]

    def mask(self) -> bytes:
        words = np.zeros(self._left[-1] // 32 + 1, dtype=np.uint32)
        words[-1] = 1 << self._left[-1] % 32
        return words.tobytes()

    def accept(self, token_id: int) -> bool:
        return self._left.pop() == token_id

    @property
    def finished(self) -> bool:
        return not self._left


def score(llm: LLM, tasks: list[Question]) -> tuple[list[tuple[int, int]], list[float], dict[str, int]]:
    """Return the choices, the sums of log probabilities that they follow from, and the sources of the contexts' KV."""
    requests = []
    for task in tasks:
        for prompt in encode(llm.tokenizer.encode, task):
            ids, context = prompt.token_ids, prompt.start
            params = SamplingParams(temperature=0, max_tokens=len(ids) - context, logprobs=0, ignore_eos=True)
            request = Request(str(len(requests)), ids[:context], params, grammar=Forced(ids[context:]))
            requests.append(request)
            llm.engine.scheduler.add(request)
    while any(request.status is not Status.FINISHED for request in requests):
        if not llm.engine.step():
            llm.engine.wait(0.001)
    sums = [
        sum(row[token].logprob for row, token in zip(request.logprobs, request.output_token_ids, strict=True))
        for request in requests
    ]
    sources = {
        name: sum(getattr(request.sources, name) for request in requests)
        for name in ("computed", "device", "host", "disk", "remote")
    }
    return [choose(task, sums[4 * i:4 * i + 4]) for i, task in enumerate(tasks)], sums, sources


def measure(tasks: list[Question], flags: dict[str, Any]) -> tuple[list[tuple[int, int]], list[float], dict[str, Any]]:
    # Without async scheduling, because the next forced token is known only after the last one was accepted.
    with LLM(max_model_len=512, async_scheduling=False, **flags) as llm:
        if "spill_dtype" in flags:
            firsts = [encode(llm.tokenizer.encode, task)[0] for task in tasks]
            contexts = [prompt.token_ids[:prompt.start] for prompt in firsts]
            llm.generate(contexts, SamplingParams(max_tokens=1), use_tqdm=False)
        start = time.perf_counter()
        choices, sums, sources = score(llm, tasks)
        seconds = time.perf_counter() - start
        row = {**flags, "block_bytes": llm.plan.block_bytes, "slot_bytes": llm.plan.slot_bytes, "sources": sources,
               "seconds": seconds,
               "acc": sum(plain == task.right for task, (plain, _) in zip(tasks, choices, strict=True)) / len(tasks),
               "acc_norm": sum(norm == task.right for task, (_, norm) in zip(tasks, choices, strict=True)) / len(tasks)}
    return choices, sums, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--spill", action="store_true", help="use these types in host memory, not on the device")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    tasks = read_hellaswag(DataFile(options.data, options.data.read_bytes()))[:options.tasks]
    rows: list[dict[str, Any]] = []
    full: tuple[list[tuple[int, int]], list[float]] | None = None
    for kind in KINDS:
        flags = {**SPILL_FLAGS, "spill_dtype": kind} if options.spill else {"kv_cache_dtype": kind}
        choices, sums, row = measure(tasks, flags)
        full = full or (choices, sums)
        row["same_choice"] = sum(a == b for a, b in zip(full[0], choices, strict=True))
        row["mean_difference"] = sum(abs(a - b) for a, b in zip(full[1], sums, strict=True)) / len(sums)
        rows.append(row)
        print(f"{kind:5} acc {row['acc']:.3f} acc_norm {row['acc_norm']:.3f}, {row['same_choice']} of {len(tasks)} "
              f"choices as with full KV, an ending's log probability differs by {row['mean_difference']:.4f}; "
              f"tokens {row['sources']}, {row['seconds']:.0f} s", flush=True)
        if options.spill and row["sources"]["host"] == 0:
            raise SystemExit("nothing was restored from host memory: the pool is too large for this many tasks")
    result = {"tasks": len(tasks), "kv": rows, **made_by()}
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
