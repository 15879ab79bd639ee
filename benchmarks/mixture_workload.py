"""Decode at batch 1 and prefill of 512 tokens of a mixture of experts that lies whole on the device."""

from __future__ import annotations

import random

from gpu_workload import Figure, opened, roofline, run

from spillover import LLM

PREFILL = 512
CONTEXT = 16  # prompt of the decode runs


def figures(model: str, weights: str, output_len: int, repeats: int, eager: bool) -> list[Figure]:
    """The two figures of a model in `gpu_workload.MODELS`; `weights` says in what form its experts are."""
    limits = roofline(model)
    memory = limits.shape.weight_bytes + (8 << 30)  # room for a few contexts; what is left is for the next model
    rng = random.Random(0)
    decode: list[float] = []
    prefill: list[float] = []
    with opened(model, gpu_memory=str(memory), max_num_seqs=8, max_model_len=4096, max_num_batched_tokens=2048,
                enable_prefix_caching=False, enforce_eager=eager) as llm:
        for index in range(repeats + 2):  # the first two compile and record
            rates = decode_rate(llm, rng, output_len), prefill_rate(llm, rng)
            if index >= 2:
                decode.append(rates[0])
                prefill.append(rates[1])
    details = {"weights": weights, "routing": "uniform"}
    return [
        Figure(f"decode, batch 1, {weights}", "tok/s", decode,
               limits.decode(1, CONTEXT + output_len // 2).tokens_per_second, details=details),
        Figure(f"prefill, {PREFILL} tokens, {weights}", "tok/s", prefill, limits.prefill(PREFILL).tokens_per_second,
               details=details),
    ]


def decode_rate(llm: LLM, rng: random.Random, output_len: int) -> float:
    """Tokens a second after the first."""
    output = run(llm, [random_tokens(rng, CONTEXT)], [output_len + 1], 0.0)[0]
    assert output.timings is not None
    return output_len / output.timings.decode


def prefill_rate(llm: LLM, rng: random.Random) -> float:
    output = run(llm, [random_tokens(rng, PREFILL)], [1], 0.0)[0]
    assert output.timings is not None
    return PREFILL / output.timings.prefill


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(count)]
