"""Checks whether greedy answers depend on how they were scheduled: the same chats one by one and in other schedules.

    python benchmarks/same_bits.py --output benchmarks/results/same-bits.json
    python benchmarks/same_bits.py --requests 8 --tokens 16 --random 2

The other schedules: one batch; prompts in small chunks; a KV pool that is too small, over host and disk tiers, twice;
without CUDA graphs; with weights streamed from the host; then random schedules. Every answer is compared token by token
with that of the first run, and every schedule reports what it moved: it fails if it should move something and did not.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from made_by import made_by

from spillover import LLM, SamplingParams
from spillover.units import format_bytes

SUBJECTS = ("a heap", "the tides", "a fugue", "inflation", "the liver", "a compiler", "the Silk Road", "yeast",
            "a transistor", "plate tectonics", "a sonnet", "the immune system", "a lighthouse", "zero", "a glacier",
            "the printing press")
WISHES = ("Explain {} to a child.", "What is the history of {}? Name three dates.", "List five facts about {}.",
          "Write the opening of a story in which {} matters, then go on for as long as you can.")
MAX_LEN = 1024


def chats(count: int) -> list[list[dict[str, str]]]:
    """Return conversations of several lengths, half of which share a beginning."""
    made = []
    for index in range(count):
        wish, subject = WISHES[index // len(SUBJECTS) % len(WISHES)], SUBJECTS[index % len(SUBJECTS)]
        system = "You are a patient teacher. " * (1 + 8 * (index % 2))
        made.append([{"role": "system", "content": system}, {"role": "user", "content": wish.format(subject)}])
    return made


class Comparison:
    def __init__(self, flags: dict[str, Any], requests: int, tokens: int, output: Path | None) -> None:
        self.flags = flags
        self.output = output
        self.params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.chats = chats(requests)
        self.rows: list[dict[str, Any]] = []
        self._expected: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def one_by_one(self) -> None:
        with LLM(**self.flags) as llm:
            self.prompts = [llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
                            for chat in self.chats]
            llm.reset_prefix_cache()
            self._expected = [self._ask(llm, [prompt])[0] for prompt in self.prompts]
        print(f"{len(self.prompts)} requests of {min(map(len, self.prompts))} to {max(map(len, self.prompts))} tokens, "
              f"{self.params.max_tokens} out, one by one", flush=True)

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each request, prompt and output."""
        return [len(prompt) + (self.params.max_tokens or 0) for prompt in self.prompts]

    def run(self, name: str, moves: str = "", times: int = 1, order: Sequence[int] | None = None, **flags: Any) -> None:
        """Send all requests at once, `times` times. `moves`: what must have moved: preempted, tiers or weights."""
        order = order or range(len(self.prompts))
        different: dict[int, int] = {}  # position of the first different token, by request
        if "num_gpu_blocks_override" in flags:
            flags["gpu_memory"] = None  # the number of blocks replaces it
        with LLM(**{**self.flags, **flags}) as llm:
            for _ in range(times):
                found = self._ask(llm, [self.prompts[index] for index in order])
                for index, tokens in zip(order, found, strict=True):
                    if tokens != self._expected[index]:
                        first = next(i for i, pair in enumerate(zip(tokens, self._expected[index], strict=True))
                                     if pair[0] != pair[1])
                        different[index] = min(first, different.get(index, first))
            stats = llm.stats()
            moved = {"preempted": stats.preemptions, "tiers": sum(tier.bytes_out for tier in stats.tiers),
                     "weights": llm.engine.runner.weight_traffic().bytes_moved}
        if moves and not moved[moves]:
            raise click.ClickException(f"{name}: nothing moved ({moves}), so it shows nothing")
        self.rows.append({"schedule": name, "flags": flags, "times": times, "differ": len(different),
                          "first_difference": different, "moved": moved})
        print(f"{name:44s} {len(different):3d} of {len(self.prompts)} differ; {moved['preempted']} preempted, "
              f"{format_bytes(moved['tiers'])} from tiers, {format_bytes(moved['weights'])} of weights", flush=True)
        self._write()

    def _write(self) -> None:
        """Write the results after every schedule, so that an interrupted run leaves them."""
        if self.output is not None:
            self.output.write_text(json.dumps({
                **made_by(), "model": self.flags["model"] or "SmolLM2-135M-Instruct", "flags": self.flags,
                "requests": len(self.chats), "tokens": self.params.max_tokens, "schedules": self.rows},
                indent=2) + "\n")

    def _ask(self, llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self.params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def starved_blocks(comparison: Comparison, block_size: int) -> int:
    """Return the number of blocks of a pool that holds a quarter of all requests, and at least any one of them."""
    each = [-(-length // block_size) for length in comparison.lengths]
    return max(max(each) + 1, sum(each) // 4)


@click.command()
@click.option("--model", default=None, help="As for spill serve; default: the default model.")
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
@click.option("--fast", is_flag=True)
@click.option("--gpu-memory", default=None, help="As for spill serve, if other processes use the GPU.")
@click.option("--requests", default=64, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--random", "draws", default=4, show_default=True, help="Number of random schedules.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=None, metavar="FILE")
def main(model: str | None, device: str, dtype: str, fast: bool, gpu_memory: str | None, requests: int, tokens: int,
         draws: int, seed: int, output: Path | None) -> None:
    flags: dict[str, Any] = {
        "model": model, "device": device, "dtype": dtype, "fast": fast, "gpu_memory": gpu_memory,
        "max_model_len": MAX_LEN, "max_num_seqs": 64, "block_size": 16}
    compared = Comparison(flags, requests, tokens, output)
    compared.one_by_one()
    few = starved_blocks(compared, 16)
    flags["max_model_len"] = max(compared.lengths)
    with LLM(**flags) as llm:
        plan, on_cuda = llm.plan, llm.plan.device == "cuda"
    compared.run("batched")
    compared.run("chunks of 67", max_num_batched_tokens=67, max_num_seqs=16)
    with tempfile.TemporaryDirectory() as folder:
        compared.run("starved, host and disk", "tiers", times=2, num_gpu_blocks_override=few, host_memory="64MB",
                     disk=(f"{folder}:2GB",), restore="always")
    if on_cuda:
        compared.run("eager", enforce_eager=True)
    compared.run("half of the weights streamed", "weights", cpu_offload_gb=plan.weight_bytes / 2 / (1 << 30))
    rng = random.Random(seed)
    for draw in range(draws):
        order = rng.sample(range(requests), requests)
        compared.run(f"random {draw + 1}", times=2, order=order, max_num_seqs=rng.randint(1, 64),
                     max_num_batched_tokens=rng.randint(64, 2048), num_gpu_blocks_override=rng.randint(few, 4 * few),
                     schedule_policy=rng.choice(["fcfs", "lpm"]), enable_prefix_caching=rng.random() < 0.7)
    total = sum(row["differ"] for row in compared.rows)
    print(f"{total} answers differ" if total else "No answer differs.")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
