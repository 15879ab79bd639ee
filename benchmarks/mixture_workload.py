"""Decode at batch 1 and prefill of 512 tokens, as the scripts about mixtures of experts measure them."""

from __future__ import annotations

import random

from gpu_workload import run

from spillover import LLM

PREFILL = 512
CONTEXT = 16  # prompt tokens of the decode runs


def decode_rate(llm: LLM, rng: random.Random, output_len: int, context: int = CONTEXT) -> float:
    """Return the tokens per second after the first one, which has `context` tokens before it."""
    output = run(llm, [random_tokens(rng, context)], [output_len + 1], 0.0)[0]
    assert output.timings is not None
    return output_len / output.timings.decode


def prefill_rate(llm: LLM, rng: random.Random) -> float:
    output = run(llm, [random_tokens(rng, PREFILL)], [1], 0.0)[0]
    assert output.timings is not None
    return PREFILL / output.timings.prefill


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(count)]
