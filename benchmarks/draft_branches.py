"""Tokens per pass with branches of drafts, if a rounded copy of the model drafts.

    python benchmarks/draft_branches.py --output benchmarks/results/draft-branches.json
    python benchmarks/draft_branches.py --pass-seconds 1.1 --output benchmarks/results/draft-branches-emulated.json

The model, in float32, answers ordinary questions greedily, one at a time, with copies in int4 or int8 and drafts of
given lengths, each with a given number of branches whatever they cost. Tokens per pass do not depend on the machine's
speed. They are what a model whose weights are streamed would get from a pass over the link.

With `--pass-seconds` the link is EMULATED: each step of the model, not of its copy, takes at least that long, as if its
weights were streamed. All else is real, and the engine chooses lengths and branches by what pays off.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from made_by import made_by

from spillover import LLM, SamplingParams
from spillover.bench.workloads.workload_options import shipped
from spillover.engine.loop import LaunchedStep
from spillover.engine.step import Step, StepResult

ORDINARY = [json.loads(line)["prompt"] for line in shipped()["chats"].read_text().splitlines()]
COPIES = ("int4", "int8")
LENGTHS = (8, 20)
BRANCHES = (0, 1, 2, 4, 8)
ADAPTIVE_BRANCHES = (0, 4, 8)


@dataclass(frozen=True)
class DelayedStep:
    """A step that completes no earlier than at a given time."""

    launched: LaunchedStep
    end: float

    @property
    def step(self) -> Step:
        return self.launched.step

    def wait(self) -> None:
        self.launched.wait()
        time.sleep(max(0.0, self.end - time.perf_counter()))

    def done(self) -> bool:
        return self.launched.done() and time.perf_counter() >= self.end

    def result(self) -> StepResult:
        self.wait()
        return self.launched.result()


def delay_steps(llm: LLM, seconds: float) -> None:
    """Make each step of the engine's model take at least so long, one after another."""
    runner = llm.engine.runner
    launch, free = runner.launch, 0.0  # `free`: when the emulated link has streamed the weights for all steps so far

    def delayed(step: Step) -> DelayedStep:
        nonlocal free
        free = max(free, time.perf_counter()) + seconds
        return DelayedStep(launch(step), free)

    setattr(runner, "launch", delayed)  # noqa: B010


def measured(model: str | None, copy: str, length: int, branches: int, questions: int, tokens: int,
             pass_seconds: float = 0.0) -> dict[str, Any]:
    """Answer the questions. `pass_seconds`: minimum seconds of the model's steps; then the engine chooses what pays
    off."""
    config = {"method": "substitute", "substitute_dtype": copy, "num_speculative_tokens": length,
              "adaptive": pass_seconds > 0, "max_branches": branches}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, device="cpu", max_model_len=512 + tokens, weight_codes="widen", enable_prefix_caching=False,
             speculative_config=config) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None, "the questions are texts"
        answers = []
        if pass_seconds:
            delay_steps(llm, pass_seconds)
        begun = time.perf_counter()
        for question in ORDINARY[:questions]:
            chat = tokenizer.apply_chat_template([{"role": "user", "content": question}])
            prompt = {"prompt_token_ids": tokenizer.encode(chat, add_special_tokens=False)}
            answers.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
        seconds = time.perf_counter() - begun
        stats = llm.stats().speculation
    assert stats is not None
    counts = stats.counts
    return {"copy": copy, "drafts_of": length, "most_branches": branches, "tokens_per_pass": counts.tokens_per_pass,
            "passes": counts.drafts, "verified_tokens_per_pass": counts.tokens / counts.drafts,
            "branches": stats.branches, "branches_accepted": stats.branches_accepted, "answers": answers,
            **({"tokens_per_second": questions * tokens / seconds} if pass_seconds else {})}


@click.command()
@click.option("--model", default=None, help="Default: SmolLM2-135M-Instruct, as float32.")
@click.option("--questions", default=len(ORDINARY), show_default=True, help="Number of questions.")
@click.option("--tokens", default=128, show_default=True, help="Number of tokens of each answer.")
@click.option("--pass-seconds", default=0.0, help="Seconds of a pass over an EMULATED link; 0: there is none.")
@click.option("--output", default=None, type=click.Path(path_type=Path), metavar="FILE")
def main(model: str | None, questions: int, tokens: int, pass_seconds: float, output: Path | None) -> None:
    results: list[dict[str, Any]] = []
    answers = None
    for copy, length, branches in itertools.product(COPIES, LENGTHS[-1:] if pass_seconds else LENGTHS,
                                                    ADAPTIVE_BRANCHES if pass_seconds else BRANCHES):
        found = measured(model, copy, length, branches, questions, tokens, pass_seconds)
        said = found.pop("answers")
        if answers is not None and said != answers:
            raise click.ClickException(f"other answers with {found}")
        answers = said
        chain = next((each for each in results if (each["copy"], each["drafts_of"]) == (copy, length)), found)
        found["of_chain"] = found["tokens_per_pass"] / chain["tokens_per_pass"]
        results.append(found)
        click.echo(json.dumps(found))
    if output is not None:
        emulated = {"emulated_link": True, "pass_seconds": pass_seconds} if pass_seconds else {}
        output.write_text(json.dumps({**made_by(), "model": model or "SmolLM2-135M-Instruct", **emulated,
                                      "questions": questions, "tokens": tokens, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
