"""Smallest ratio of the speed with speculation to the speed without, over models, texts and loads.

    python benchmarks/speculation_floor.py                                        # three models on the CPU
    python benchmarks/speculation_floor.py --model mixture --load batch:1 --load 0.5 --repeats 6 --output floor.json
    python benchmarks/speculation_floor.py --model llama-3.1-8b --device cuda --gpu-memory 45GB   # of gpu_workload.py

Two engines are loaded, one of which speculates. A load `batch:N` is N requests at once; a load of 0.5 is an open loop
of requests that arrive at half the rate that the plain engine serves at its full batch, at the same times for both. In
each repeat both engines run every load, in alternating order; the texts must be equal. A cell's figures are ratios of
plain to speculating: of the time of the batch, or of the mean latency of a request; of the CPU time; and of the decode
time per token. `worst` is the cell with the smallest ratio.

Texts: `random` is random tokens answered at temperature 1, which cannot be guessed; `coins` is answered with one of
three tokens, each about as likely, so that there is always a draft and it is right a third of the time; `chats` are
ordinary questions, answered greedily (models with random weights get random tokens: they fall into loops).
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from gpu_workload import MODELS, origin
from speculation import ORDINARY

from spillover import LLM, SamplingParams
from spillover.bench.statistics import Ratio, paired_ratio
from spillover.bench.workloads.arrivals import Arrivals
from spillover.engine.output.outputs import RequestOutput

MIN_SPEED = 0.97
_SMALL = {"vocab_size": 32000, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
          "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 2048, "hidden_act": "silu",
          "torch_dtype": "float32", "eos_token_id": 2, "tie_word_embeddings": True}
SMALL: dict[str, dict[str, Any]] = {  # with random weights, and steps of a few milliseconds on two cores
    "mixture": {**_SMALL, "architectures": ["MixtralForCausalLM"], "intermediate_size": 512, "num_hidden_layers": 8,
                "num_local_experts": 8, "num_experts_per_tok": 2},
    "dense": {**_SMALL, "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 1536, "num_hidden_layers": 12},
}
TEXTS = ("random", "coins", "chats")


@dataclass
class Cell:
    """One model, text and load, with the measurements of both engines in each repeat."""

    model: str
    text: str
    load: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "speculating": []})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "speculating": []})
    token: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "speculating": []})
    drafted: int = 0
    accepted: int = 0

    def add(self, way: str, run: Run) -> None:
        self.seconds[way].append(run.seconds)
        self.cpu[way].append(run.cpu)
        self.token[way].append(run.token_seconds)
        if way == "speculating":
            self.drafted += sum(output.drafts.tokens for output in run.outputs)
            self.accepted += sum(output.drafts.accepted for output in run.outputs)

    def ratios(self) -> dict[str, Ratio]:
        """Return plain over speculating, so below 1 is slower. Two repeats in opposite order are one block."""
        block = 2 if len(self.seconds["plain"]) % 2 == 0 else 1
        return {name: paired_ratio(taken["plain"], taken["speculating"], block)
                for name, taken in (("speed", self.seconds), ("cpu", self.cpu), ("token", self.token))}

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "text": self.text, "load": self.load, "drafted": self.drafted,
                "accepted": self.accepted, **{name: ratio.as_dict() for name, ratio in self.ratios().items()},
                "seconds": self.seconds, "cpu_seconds": self.cpu, "token_seconds": self.token}


@dataclass(frozen=True)
class Run:
    seconds: float  # time of the batch, or mean latency of a request
    cpu: float
    token_seconds: float  # mean over requests of the time between two tokens
    outputs: Sequence[RequestOutput]


def prompts(llm: LLM, text: str, count: int, turn: int, chats: bool) -> list[list[int]]:
    """Return different prompts in each turn: a drafter that keeps earlier answers would know these."""
    rng = random.Random(f"{text} {turn}")
    if text != "chats" or not chats:
        return [[rng.randrange(100, 5000) for _ in range(48)] for _ in range(count)]
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompt_ids = [f"{rng.choice(ORDINARY)} ({rng.randrange(1000)})" for _ in range(count)]
    return [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": one}]),
                             add_special_tokens=False) for one in prompt_ids]


def params(text: str, count: int, length: int, turn: int) -> list[SamplingParams]:
    if text == "chats":
        return [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _ in range(count)]
    bias = dict.fromkeys((1000, 1001, 1002), 100.0) if text == "coins" else None
    heat = 20.0 if text == "coins" else 1.0
    return [SamplingParams(temperature=heat, top_k=3 if text == "coins" else 0, seed=1000 * turn + index,
                           logit_bias=bias, max_tokens=length, ignore_eos=True) for index in range(count)]


def measure(llm: LLM, prompt_ids: Sequence[list[int]], how: Sequence[SamplingParams],
            times: Sequence[float] | None) -> Run:
    """Send requests, all at once or at their times; return the measurements."""
    llm.reset_prefix_cache()
    cpu, begun = time.process_time(), time.perf_counter()
    if times is None:
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompt_ids], list(how), use_tqdm=False)
        seconds = time.perf_counter() - begun
    else:
        outputs, latencies = _open_loop(llm, prompt_ids, how, times, begun)
        seconds = sum(latencies) / len(latencies)
    used = time.process_time() - cpu
    gaps = [one.timings.decode / max(1, len(one.outputs[0].token_ids) - 1) for one in outputs
            if one.timings is not None]
    return Run(seconds, used, sum(gaps) / len(gaps), outputs)


def _open_loop(llm: LLM, prompt_ids: Sequence[list[int]], how: Sequence[SamplingParams], times: Sequence[float],
               begun: float) -> tuple[list[RequestOutput], list[float]]:
    outputs: list[RequestOutput | None] = [None] * len(prompt_ids)
    latencies = [0.0] * len(prompt_ids)

    def request(index: int) -> None:
        time.sleep(max(0.0, begun + times[index] - time.perf_counter()))
        outputs[index] = llm.generate([{"prompt_token_ids": prompt_ids[index]}], how[index], use_tqdm=False)[0]
        latencies[index] = time.perf_counter() - begun - times[index]

    threads = [threading.Thread(target=request, args=(index,)) for index in range(len(prompt_ids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [output for output in outputs if output is not None], latencies


def arrival_times(share: float, capacity: float, length: int, count: int, turn: int) -> list[float]:
    """Return the arrival times of requests, at a share of the rate that the plain engine serves."""
    return Arrivals(rate=share * capacity / length, seed=turn).times([None] * count)


@click.command()
@click.option("--model", "models", multiple=True, default=("default", "mixture", "dense"), show_default=True,
              help="`default` is SmolLM2-135M-Instruct; `mixture` and `dense` are small, of random weights; or one of "
                   "gpu_workload.py.")
@click.option("--text", "texts", multiple=True, default=TEXTS, show_default=True, type=click.Choice(TEXTS))
@click.option("--load", "loads", multiple=True, default=("batch:1", "batch:4", "batch:16", "0.25", "0.6", "0.95"),
              show_default=True)
@click.option("--method", default="suffix", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--gpu-memory", default=None, help="Device memory of each engine.")
@click.option("--seqs", default=16, show_default=True, help="Maximum number of requests in a step.")
@click.option("--requests", default=12, show_default=True, help="Number of requests of an open loop.")
@click.option("--length", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", default=6, show_default=True, help="An even number: two of opposite order are one block.")
@click.option("--output", default=None, type=click.Path(path_type=Path), help="A file for the results, as JSON.")
def main(models: tuple[str, ...], texts: tuple[str, ...], loads: tuple[str, ...], method: str, device: str,
         gpu_memory: str | None, seqs: int, requests: int, length: int, repeats: int, output: Path | None) -> None:
    cells: list[Cell] = []
    settings = {"models": models, "method": method, "device": device, "seqs": seqs, "requests": requests,
                "length": length, "repeats": repeats, "promise": MIN_SPEED}
    for model in models:
        flags: dict[str, Any] = {"device": device, "gpu_memory": gpu_memory, "max_model_len": 1024,
                                 "max_num_seqs": seqs}
        with ExitStack() as stack:
            engines = {"plain": _opened(stack, model, flags),
                       "speculating": _opened(stack, model, {**flags, "speculative_method": method})}
            capacity = _capacity(engines, seqs, length)
            click.echo(f"{model}: {capacity:.0f} tok/s with {seqs} requests")
            for text in texts:
                cells += measured(engines, [Cell(model, text, load) for load in loads], capacity, requests, length,
                                  repeats)
                for cell in cells[-len(loads):]:
                    click.echo(describe(cell))
                if output is not None:  # so that an interrupted run leaves results
                    output.write_text(json.dumps(result(cells, settings), indent=2) + "\n")
    for name, cell in worst(cells).items():
        click.echo(f"worst {name}, {verdict(cell.ratios()[name])} {MIN_SPEED}: {describe(cell)}")


def worst(cells: Sequence[Cell]) -> dict[str, Cell]:
    return {name: min(cells, key=lambda cell, name=name: cell.ratios()[name].value)  # type: ignore[misc]
            for name in ("speed", "cpu", "token")}


def result(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    return {"settings": settings, **origin(),
            "worst": {name: {"model": cell.model, "text": cell.text, "load": cell.load,
                             "verdict": f"{verdict(cell.ratios()[name])} {MIN_SPEED}",
                             **cell.ratios()[name].as_dict()} for name, cell in worst(cells).items()},
            "cells": [cell.as_dict() for cell in cells]}


def _opened(stack: ExitStack, model: str, flags: dict[str, Any]) -> LLM:
    shape = SMALL.get(model) or MODELS.get(model)
    if shape is None:
        return stack.enter_context(LLM(None if model == "default" else model, **flags))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "config.json").write_text(json.dumps(shape))
    return stack.enter_context(LLM(folder, load_format="dummy", skip_tokenizer_init=True, **flags))


def _capacity(engines: dict[str, LLM], seqs: int, length: int) -> float:
    """Return the plain engine's tokens per second at its full batch, after both have warmed up."""
    rates = []
    for turn in range(2):
        for way, llm in engines.items():
            prompt_ids = prompts(llm, "random", seqs, -1 - turn, False)
            run = measure(llm, prompt_ids, params("random", seqs, length, -1 - turn), None)
            rates += [seqs * length / run.seconds] if way == "plain" else []
    return max(rates)


def measured(engines: dict[str, LLM], cells: Sequence[Cell], capacity: float, requests: int, length: int,
             repeats: int) -> Sequence[Cell]:
    plain = engines["plain"]
    for turn in range(repeats):
        order = list(engines) if turn % 2 == 0 else list(engines)[::-1]
        for place, cell in enumerate(cells):
            count, times = requests, None
            if cell.load.startswith("batch:"):
                count = int(cell.load.removeprefix("batch:"))
            else:
                times = arrival_times(float(cell.load), capacity, length, count, turn)
            prompt_ids = prompts(plain, cell.text, count, 100 * turn + place, plain.tokenizer is not None)
            how, answers = params(cell.text, count, length, 100 * turn + place), []
            for way in order:
                run = measure(engines[way], prompt_ids, how, times)
                cell.add(way, run)
                answers.append([tuple(one.outputs[0].token_ids) for one in run.outputs])
            if answers[0] != answers[1]:
                raise click.ClickException(f"the texts differ with and without speculation: {cell.model}, {cell.text}, "
                                           f"{cell.load}")
    return cells


def verdict(ratio: Ratio) -> str:
    """Return how a ratio's interval compares with the promise; on a machine with other work it is rarely decided."""
    if ratio.low is None or ratio.high is None or ratio.low < MIN_SPEED <= ratio.high:
        return "undecided about"
    return "not below" if ratio.low >= MIN_SPEED else "below"


def describe(cell: Cell) -> str:
    parts = [f"{cell.model:8} {cell.text:7} {cell.load:9}"]
    for name, ratio in cell.ratios().items():
        reach = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.3f} .. {ratio.high:.3f})"
        parts.append(f"{name} {ratio.value:.3f}{reach}")
    return "  ".join(parts) + f"  {cell.accepted} of {cell.drafted} drafted were right"


if __name__ == "__main__":
    main()
