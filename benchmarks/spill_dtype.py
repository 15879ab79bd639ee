"""Quality loss of KV that is quantised below the device: text is continued after prefixes restored from host memory.

    python benchmarks/spill_dtype.py MODEL --text FILE [--windows 16] [--prefix 384] [--length 512] [--output-json FILE]

FILE (text, .json or .jsonl, as for `spill quantize --calibrate`) is cut into windows. The prefix of each window is
computed, copied to host memory and restored, and the rest of the window is scored after it: perplexity, and KL
divergence and top-1 agreement compared with the same with KV that is not quantised. "int4 plain" omits the rotation of
int4. The error is that of restored keys and values, relative to their norm. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from spillover import LLM, SamplingParams
from spillover.bench.provenance import provenance
from spillover.eval.divergence import divergence
from spillover.kernels import kv_int4
from spillover.kernels.kv_quant import KVCodec
from spillover.models.hub.store import resolve
from spillover.models.quantize.calibration_text import read_tokens
from spillover.models.tokenizer import load_tokenizer
from spillover.plan.hardware import probe

RUNS: dict[str, dict[str, str]] = {
    "auto": {},
    "fp8": {"spill_dtype": "fp8"},
    "int8": {"spill_dtype": "int8"},
    "int4": {"spill_dtype": "int4"},
    "int4 plain": {"spill_dtype": "int4"},
    "int8, then int4": {"kv_cache_dtype": "int8", "spill_dtype": "int4"},
}


class Errors:
    """Sums of squares of blocks, and of their errors after encoding and decoding: of keys, and of values."""

    def __init__(self) -> None:
        self.lost, self.whole = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def add(self, codec: KVCodec, block: memoryview) -> None:
        before = torch.frombuffer(block, dtype=torch.uint8)
        after = codec.decode_tensor(codec.encode_tensor(before))
        shape = (codec.layers, 2, -1)
        x, y = (part.view(torch.float32).view(shape).double() for part in (before, after))
        self.lost += (x - y).square().sum((0, 2))
        self.whole += x.square().sum((0, 2))

    def relative(self) -> list[float] | None:
        return (self.lost / self.whole).sqrt().tolist() if self.whole.all() else None


@contextmanager
def observed(rotated: bool) -> Iterator[Errors]:
    """Measure the error of every float32 block that is encoded in this context, with or without int4's rotation."""
    errors, encode = Errors(), KVCodec.encode

    def encode_and_record(codec: KVCodec, block: memoryview, slot: memoryview) -> None:
        encode(codec, block, slot)
        if codec.pool_dtype == "auto":
            errors.add(codec, block)

    with patch.object(KVCodec, "encode", encode_and_record):
        if rotated:
            yield errors
            return
        with (patch.object(kv_int4, "rotate", lambda x: x), patch.object(kv_int4, "chunk_of", lambda _: 1),
              patch.object(KVCodec, "native", lambda _: None)):
            yield errors


def continued(llm: LLM, windows: Sequence[list[int]], prefix: int) -> Iterator[Tensor]:
    """Yield the logits [length - prefix - 1, V] of each window after its prefix was restored from host memory. They
    start at the token that follows the prefix, as its position is the first that is computed."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=prefix + 1,
                           ignore_eos=True, detokenize=False)
    rows: dict[int, Tensor] = {}
    llm.observe_prompt_logits(lambda _, position, logits: rows.update({position: logits.clone()}))
    for window in windows:
        llm.generate(window[:prefix], one, use_tqdm=False)
    for window in windows:
        llm._thread.run(llm.engine.scheduler.kv.reset_prefix_cache)  # those on the device only
        restored = llm.generate(window[: prefix + 1], one, use_tqdm=False)[0].sources
        if restored.host < prefix:
            raise SystemExit(f"only {restored.host} of {prefix} tokens came from host memory; the prefix must be "
                             "whole blocks of 16, and there must be several windows")
        rows.clear()
        scored = llm.generate(window, score, use_tqdm=False)[0].sources
        assert scored.device >= prefix, scored
        yield torch.cat([rows[position] for position in sorted(rows)])


def measure(name: str, model: str, windows: Sequence[list[int]], prefix: int, wanted: list[Tensor]) -> dict[str, Any]:
    """Score all windows; the first run fills `wanted` with its log probabilities, with which others are compared."""
    blocks = 2 * -(-len(windows[0]) // 16) + 8
    totals = {"kl": 0.0, "same": 0, "logprob": 0.0, "tokens": 0}
    with observed(name != "int4 plain") as errors, LLM(
            model, max_model_len=len(windows[0]) + 16, num_gpu_blocks_override=blocks, max_num_seqs=1,
            host_memory="4GB", spill="eager", restore="always", device="cpu", **RUNS[name]) as llm:
        first = not wanted
        for place, logits in enumerate(continued(llm, windows, prefix)):
            logprobs = logits.float().log_softmax(-1)
            if first:
                wanted.append(logprobs)
            following = torch.tensor(windows[place][prefix + 1:])[:, None]
            assert len(following) == len(logprobs)
            totals["kl"] += float(divergence(wanted[place], logits).sum())
            totals["same"] += int((wanted[place].argmax(-1) == logprobs.argmax(-1)).sum())
            totals["logprob"] += float(logprobs.gather(-1, following).sum())
            totals["tokens"] += len(logprobs)
        plan = llm.plan
        host = next(tier for tier in llm.engine.scheduler.connector.reports() if tier.name == "host")
    count = totals["tokens"]
    return {"kv": name, **RUNS[name], "tokens": count, "block_bytes": plan.block_bytes, "slot_bytes": plan.slot_bytes,
            "host_bytes_in": host.bytes_in, "host_bytes_out": host.bytes_out, "error": errors.relative(),
            "perplexity": math.exp(-totals["logprob"] / count), "kl": totals["kl"] / count,
            "top1": totals["same"] / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--output-json", type=Path)
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve(given.model))
    tokens = read_tokens(given.text, tokenizer, given.windows * given.length, given.length).flatten().tolist()
    windows = [tokens[start : start + given.length] for start in range(0, given.windows * given.length, given.length)]
    rows: list[dict[str, Any]] = []
    wanted: list[Tensor] = []
    print("| KV below the device | bytes of a block | perplexity | KL | top-1 | error of keys, values |\n"
          "|---|---|---|---|---|---|")
    for name in ["auto", *(run for run in given.runs if run != "auto")]:
        row = measure(name, given.model, windows, given.prefix, wanted)
        rows.append(row)
        error = "" if row["error"] is None else ", ".join(f"{part:.3f}" for part in row["error"])
        print(f"| {name} | {row['slot_bytes']:,} | {row['perplexity']:.3f} | {row['kl']:.5f} | {row['top1']:.1%} "
              f"| {error} |", flush=True)
    result = {"model": given.model, "windows": len(windows), "prefix": given.prefix, "length": given.length,
              "kv": rows, **provenance(dataclasses.asdict(probe())),
              "command": shlex.join(["python", "benchmarks/spill_dtype.py", given.model, "--text", given.text.name,
                                     "--windows", str(given.windows)])}
    if given.output_json is not None:
        given.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
