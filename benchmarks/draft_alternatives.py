"""Tokens per pass that trees of draft tokens would give, compared with chains, if a quantised copy of the model drafts.

    python benchmarks/draft_alternatives.py --output benchmarks/results/draft-alternatives.json

The model answers ordinary questions greedily; its int4 and int8 copies then score these answers, which gives the rank
of each token of an answer in the copy's distribution. The number of tokens that a pass would have accepted follows from
these ranks: a chain of K draft tokens ends at the first token that is not the copy's most likely one; a comb, which
adds the next most likely tokens at each position of the chain, accepts one more token if one of them is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from made_by import made_by
from speculation import ORDINARY

from spillover import LLM, SamplingParams

LENGTHS = (4, 8, 16, 28)
WIDTHS = (1, 2, 4)  # candidates at each position, including the chain's token


def tokens_per_pass(ranks: list[list[int]], most: int, width: int) -> float:
    """Return the mean number of tokens per pass. `ranks`: each token's rank in the copy's distribution, from 1."""
    passes = 0
    for answer in ranks:
        done = 0
        while done < len(answer):
            right = 0
            while right < most and done + right < len(answer) and answer[done + right] == 1:
                right += 1
            beside = right < most and done + right < len(answer) and 1 < answer[done + right] <= width
            done += right + beside + 1
            passes += 1
    return sum(map(len, ranks)) / passes


def measured(ranks: list[list[int]]) -> dict[str, Any]:
    every = [rank for answer in ranks for rank in answer]
    missed = [rank for rank in every if rank > 1]
    return {"tokens": len(every), "likeliest": 1 - len(missed) / len(every),
            "second_of_misses": missed.count(2) / max(1, len(missed)),
            "lengths": [{"drafts": most, "width": [{"guesses": width, "tokens_per_pass": tokens_per_pass(
                ranks, most, width)} for width in WIDTHS]} for most in LENGTHS]}


@click.command()
@click.option("--model", default=None, help="Default: SmolLM2-135M-Instruct, as float32.")
@click.option("--tokens", default=128, show_default=True, help="Number of tokens of each of twelve answers.")
@click.option("--output", default=None, type=click.Path(path_type=Path), metavar="FILE")
def main(model: str | None, tokens: int, output: Path | None) -> None:
    flags: dict[str, Any] = {"device": "cpu", "max_model_len": 512 + tokens, "weight_codes": "widen"}
    with LLM(model, **flags) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        prompt_ids = [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": question}]),
                                       add_special_tokens=False) for question in ORDINARY]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompt_ids], params, use_tqdm=False)
    answers = [list(each.outputs[0].token_ids) for each in outputs]
    found: dict[str, Any] = {}
    for copy in ("int4", "int8"):
        with LLM(model, quantization=copy, **flags) as llm:
            scored = llm.generate([{"prompt_token_ids": prompt + answer}
                                   for prompt, answer in zip(prompt_ids, answers, strict=True)],
                                  SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        ranks = []
        for prompt, answer, one in zip(prompt_ids, answers, scored, strict=True):
            rows = (one.prompt_logprobs or [])[len(prompt):]
            ranks.append([position[token].rank or 0 for token, position in zip(answer, rows, strict=True)
                          if position is not None])
        found[copy] = measured(ranks)
        click.echo(f"{copy}: {json.dumps(found[copy])}")
    if output is not None:
        output.write_text(json.dumps({**made_by(), "model": model or "SmolLM2-135M-Instruct", "copies": found},
                                     indent=2) + "\n")


if __name__ == "__main__":
    main()
