"""Speed and acceptance with and without speculation, alternating, for a repetitive, an ordinary and a random workload.
The last consists of random tokens that are answered at temperature 1, which is the worst case for a drafter.

    python benchmarks/speculation.py                               # the default model, on the CPU
    python benchmarks/speculation.py --requests 4 --repeats 5 --output results.json
    python benchmarks/speculation.py --weight-codes widen --method substitute-int4 --method substitute-int8 \
        --workload ordinary --tokens 6                # the model as float32, with quantised copies as drafters
    python benchmarks/speculation.py --model llama-3.1-8b --device cuda --gpu-memory 45GB --length 256 \
        --simulate 0.8,0.6,0.4,0.28 --requests 1 --head   # a model of gpu_workload.py, with random weights

Every configuration has its own engine, and all engines are loaded at once; in each repeat every engine runs every
workload once, in rotating order. The texts must be equal, or the run fails. With --simulate acceptance is simulated,
texts differ, and every line says so.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from gpu_workload import MODELS, opened

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import DraftCounts
from spillover.engine.speculation.speculator import SpeculationStats

REPETITIVE = [
    "Repeat this list three times, exactly: apples, 3 pears, 12 lemons, bread, oat milk, 4 eggs, butter, tea.",
    'Here is a table as JSON: [{"name": "Ann", "age": 31, "city": "Oslo"}, {"name": "Bob", "age": 45, "city": "Rome"}, '
    '{"name": "Cid", "age": 27, "city": "Bonn"}]. Write the same table again, with every age one year higher.',
    "Copy this code and add a docstring to each function:\ndef add(a, b):\n    return a + b\n\ndef sub(a, b):\n    "
    "return a - b\n\ndef mul(a, b):\n    return a * b\n",
    "Write the lines 'step 1: check the door', 'step 2: check the door' and so on, up to step 20.",
    "Copy these lines, each after a dash:\nred brick wall\ngreen brick wall\nblue brick wall\nred brick house\n",
    "Write a multiplication table, one line each, from '1 x 7 = 7' up to '20 x 7 = 140'.",
    "Repeat this sentence six times: The train to the harbour leaves at nine, and the ferry leaves at ten.",
    'Here is CSV: "id,name,price\\n1,cup,3\\n2,plate,5\\n3,bowl,4\\n4,spoon,2". Write it as a JSON list.',
]
ORDINARY = [
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the advantages and disadvantages of electric cars?",
    "Give me a plan for a weekend in a city by the sea.",
    "How does a vaccine work?",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "What should I know before I adopt a cat?",
    "Explain the difference between weather and climate.",
    "Tell me about the history of bread.",
    "How do I prepare for a job interview at a hospital?",
    "Describe a market in the morning, in one paragraph.",
    "Why do leaves change their colour in autumn?",
]


KNOWN = 32_000  # number of tokens in an EAGLE-3 head's vocabulary


def prompts(llm: LLM, workload: str, count: int, turn: int) -> list[list[int]]:
    """Return different prompts in each turn, as far as there are enough: a drafter that keeps earlier answers would
    know these."""
    rng = random.Random(f"{workload} {turn}")
    if workload == "random":
        return [[rng.randrange(100, 5000) for _ in range(64)] for _ in range(count)]
    texts = {"repetitive": REPETITIVE, "ordinary": ORDINARY}[workload]
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "the workloads are texts"
    chosen = [texts[(turn * count + i) % len(texts)] for i in range(count)]
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in chosen]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


@dataclass(frozen=True)
class Run:
    seconds: float
    drafts: DraftCounts
    steps: int
    verify_steps: int
    draft_seconds: float
    verify_seconds: float


def run(llm: LLM, prompt_ids: list[list[int]], length: int, temperature: float) -> tuple[list[list[int]], Run]:
    """Return the tokens, and the measurements of the run."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=temperature, seed=index, max_tokens=length, ignore_eos=True)
              for index in range(len(prompt_ids))]
    before, begun = llm.stats(), time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompt_ids], params, use_tqdm=False)
    seconds, after = time.perf_counter() - begun, llm.stats()
    drafts = sum((output.drafts for output in outputs), DraftCounts())
    was, now = before.speculation or SpeculationStats(), after.speculation or SpeculationStats()
    return [list(output.outputs[0].token_ids) for output in outputs], Run(
        seconds, drafts, after.steps - before.steps, now.steps - was.steps, now.draft_seconds - was.draft_seconds,
        now.verify_seconds - was.verify_seconds)


@click.command()
@click.option("--model", default=None, help="A model; default: SmolLM2-135M-Instruct.")
@click.option("--device", default="cpu")
@click.option("--gpu-memory", default=None, help="Device memory of each engine.")
@click.option("--method", "methods", multiple=True, default=("ngram", "suffix"),
              help="ngram, suffix, substitute-int4, substitute-int8, draft_model:PATH, eagle3:PATH.")
@click.option("--weight-codes", default="keep", help="How weights in codes are stored, as for `spill serve`.")
@click.option("--workload", "workloads", multiple=True, default=("repetitive", "ordinary", "random"))
@click.option("--tokens", default=None, type=int, help="Maximum number of draft tokens.")
@click.option("--always", is_flag=True, help="Draft always, even where it does not pay off.")
@click.option("--simulate", default=None, help="Simulated acceptance by position, for random weights.")
@click.option("--draft-passes", is_flag=True,
              help="With --simulate: also with a draft model of the size of an EAGLE-3 head, whose passes are real.")
@click.option("--head", is_flag=True,
              help="With --simulate: also with an EAGLE-3 head of random weights, whose passes are real.")
@click.option("--requests", default=1)
@click.option("--length", default=96, help="Tokens of an answer.")
@click.option("--temperature", default=0.0)
@click.option("--repeats", default=3)
@click.option("--output", default=None, type=click.Path(path_type=Path), help="A file for the results, as JSON.")
def main(model: str | None, device: str, gpu_memory: str | None, methods: tuple[str, ...], weight_codes: str,
         workloads: tuple[str, ...], tokens: int | None, always: bool, simulate: str | None, draft_passes: bool,
         head: bool, requests: int, length: int, temperature: float, repeats: int, output: Path | None) -> None:
    flags: dict[str, Any] = {"device": device, "gpu_memory": gpu_memory, "max_model_len": 1024,
                             "max_num_seqs": max(requests, 1), "weight_codes": weight_codes}
    if device == "cuda":
        flags["graph_capture"] = "start"
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    if simulate is not None:
        ways["simulated"], workloads = {"speculative_simulate": simulate}, ("random",)
        if draft_passes:
            ways["passes"] = {"speculative_simulate": simulate}
        if head:
            ways["head"] = {"speculative_simulate": simulate}
    else:
        ways |= {method: speculating(method, tokens) for method in methods}
    for way in ways.values():
        if way and always:
            way["speculative_adaptive"] = False
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if "passes" in ways:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways["passes"] |= {"speculative_model": head_sized(MODELS[str(model)], Path(folder)),
                               "num_speculative_tokens": simulate.count(",") + 1 if simulate else 1}
        if "head" in ways:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways["head"]["speculative_config"] = {
                "method": "eagle3", "model": eagle_head(MODELS[str(model)], Path(folder)),
                "num_speculative_tokens": simulate.count(",") + 1 if simulate else 1}
        engines = {name: stack.enter_context(opened(model, **flags, **way) if model in MODELS
                                             else LLM(model, **flags, **way)) for name, way in ways.items()}
        for workload in workloads:
            found: dict[str, list[Run]] = {name: [] for name in engines}
            for llm in engines.values():
                run(llm, prompts(llm, workload, requests, -1), 8, temperature)
            for repeat in range(repeats):
                prompt_ids, expected = prompts(engines["plain"], workload, requests, repeat), None
                order = list(engines)[repeat % len(engines):] + list(engines)[:repeat % len(engines)]
                for name in order:
                    heat = max(temperature, 1.0) if workload == "random" else temperature
                    answers, measured = run(engines[name], prompt_ids, length, heat)
                    expected = expected or answers
                    if simulate is None and answers != expected:
                        raise click.ClickException(f"{name} gave different tokens than the others on '{workload}'")
                    found[name].append(measured)
            results += [summary(workload, name, runs, found["plain"], requests * length, simulate is not None)
                        for name, runs in found.items()]
            for row in results[-len(found):]:
                click.echo(describe(row))
    if output is not None:
        about = {"model": model or "SmolLM2-135M-Instruct", "device": device, "requests": requests, "length": length,
                 "temperature": temperature, "repeats": repeats, "always": always, "simulated": simulate,
                 "weight_codes": weight_codes, "tokens": tokens}
        output.write_text(json.dumps({"settings": about, "results": results}, indent=2) + "\n")


def head_sized(target: dict[str, Any], folder: Path) -> str:
    """Write the configuration of a draft model as large as an EAGLE-3 head: one layer and 32,000 of the tokens."""
    folder.joinpath("config.json").write_text(json.dumps({**target, "num_hidden_layers": 1, "vocab_size": KNOWN + 1}))
    folder.joinpath("draft_vocab.json").write_text(json.dumps({"target_ids": list(range(KNOWN))}))
    return str(folder)


def eagle_head(target: dict[str, Any], folder: Path) -> str:
    """Write the configuration of an EAGLE-3 head as published: one layer like those of the model, 32,000 tokens."""
    config = {**target, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": KNOWN}
    folder.joinpath("config.json").write_text(json.dumps(config))
    return str(folder)


def speculating(method: str, tokens: int | None) -> dict[str, Any]:
    """Return the flags of a method: "substitute-int8" names the type of the quantised copy, "draft_model:PATH" a draft
    model and "eagle3:PATH" a head."""
    kind, _, drafting = method.partition(":")
    name, _, rounded = kind.partition("-")
    config = {"method": name, "substitute_dtype": rounded} if rounded else {"method": name}
    if drafting:
        config["model"] = drafting
    return {"speculative_config": config if tokens is None else {**config, "num_speculative_tokens": tokens}}


def summary(workload: str, name: str, runs: list[Run], plain: list[Run], tokens: int,
            simulated: bool) -> dict[str, Any]:
    ratios = [usual.seconds / each.seconds for usual, each in zip(plain, runs, strict=True)]
    drafts = sum((each.drafts for each in runs), DraftCounts())
    verify = sum(each.verify_steps for each in runs)
    return {"workload": workload, "way": name,
            "tokens_per_second": tokens / statistics.median(each.seconds for each in runs),
            "step_ms": 1e3 * sum(each.seconds for each in runs) / sum(each.steps for each in runs),
            "draft_ms": 1e3 * sum(each.draft_seconds for each in runs) / max(1, verify),
            "verify_ms": 1e3 * sum(each.verify_seconds for each in runs) / max(1, verify),
            "speed": statistics.median(ratios), "speeds": ratios, "drafts": drafts.drafts, "drafted": drafts.tokens,
            "accepted": drafts.accepted, "accepted_by_position": list(drafts.by_position),
            "tokens_per_pass": drafts.tokens_per_pass, "simulated": simulated and name != "plain"}


def describe(row: dict[str, Any]) -> str:
    line = (f"{row['workload']:10} {row['way']:9} {row['tokens_per_second']:8.1f} tok/s  {row['speed']:.2f}x "
            f"({min(row['speeds']):.2f} to {max(row['speeds']):.2f})")
    if row["drafts"]:
        shares = " ".join(f"{count / row['drafts']:.2f}" for count in row["accepted_by_position"])
        line += (f"  {row['accepted']} of {row['drafted']} accepted, {row['tokens_per_pass']:.2f} tokens/pass with a "
                 f"draft; by position {shares}; {row['draft_ms']:.2f} ms/draft, {row['verify_ms']:.2f} ms/verify")
    return line + (" (simulated acceptance)" if row["simulated"] else "")


if __name__ == "__main__":
    main()
