"""Models larger than their budget with and without substitutes: layers are streamed, and their quantised copies draft.

    python benchmarks/substitute.py --model qwen3-32b --gpu-memory 24GB --output results
    python benchmarks/substitute.py --model llama-3.1-8b --gpu-memory 8GB --output results
    python benchmarks/substitute.py --model tiny --device cpu --gpu-memory 52MB --length 40    # tests the script

Weights are random, so acceptance is simulated (--speculative-simulate) and texts are meaningless; draft passes, verify
passes and copies of weights are real. A draft has --tokens tokens; each is right with the same probability if those
before it are, such that a pass yields --tokens-per-pass on average. There is one request. The limit is the plan's
prediction for the same number of tokens at measured rates.
"""

from __future__ import annotations

import time
from typing import Any

import click
from gpu_workload import MODELS, Figure, opened, run, write

from spillover import LLM
from spillover.units import format_bytes

MODELS["tiny"] = {
    **MODELS["llama-3.1-8b"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}


def falling(tokens: int, tokens_per_pass: float) -> list[float]:
    """Return the probability that a draft is right up to each position, if a pass yields `tokens_per_pass` on average,
    including the model's own token."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(middle**n for n in range(1, tokens + 1)) < tokens_per_pass else (
            low, middle)
    return [low**n for n in range(1, tokens + 1)]


def speed(llm: LLM, prompt: int, length: int, repeats: int) -> list[float]:
    """Return the tokens per second of decoding, one request after another."""
    found = []
    for repeat in range(repeats + 1):
        prompt_ids = [[1 + (7 * index + repeat) % 1000 for index in range(prompt)]]
        begun = time.perf_counter()
        run(llm, prompt_ids, [1], 0.0)
        first = time.perf_counter() - begun
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        run(llm, prompt_ids, [length], 0.0)
        found.append((length - 1) / (time.perf_counter() - begun - first))
        llm.reset_prefix_cache()
    return found[1:]  # the first compiles and captures


@click.command()
@click.option("--model", type=click.Choice([*MODELS]), default="qwen3-32b")
@click.option("--gpu-memory", default="24GB")
@click.option("--device", default="cuda")
@click.option("--substitute-dtype", "rounded", default="int4")
@click.option("--tokens", default=28, help="Number of draft tokens.")
@click.option("--tokens-per-pass", default=20.0, help="Mean tokens of a pass (simulated).")
@click.option("--prompt", default=64, help="Tokens of a prompt.")
@click.option("--length", default=320, help="Tokens of an answer.")
@click.option("--plain-length", default=6, help="Tokens of an answer without substitutes; 0 skips it.")
@click.option("--repeats", default=3)
@click.option("--output", default=None, help="File for the results, as JSON; `results` is benchmarks/results/.")
def main(model: str, gpu_memory: str, device: str, rounded: str, tokens: int, tokens_per_pass: float, prompt: int,
         length: int, plain_length: int, repeats: int, output: str | None) -> None:
    flags: dict[str, Any] = {"device": device, "gpu_memory": gpu_memory, "max_num_seqs": 1, "max_model_len": 1024,
                             "max_num_batched_tokens": 512, "weights": "sequential"}
    figures = []
    if plain_length:
        with opened(model, **flags) as llm:
            placement = llm.plan.placement
            assert placement is not None, "nothing streams"
            assert placement.predicted is not None
            figures.append(Figure("decode, streamed", "tok/s", speed(llm, prompt, plain_length, 1),
                                  placement.predicted.decode_tokens_per_second))
    rates = falling(tokens, tokens_per_pass)
    with opened(model, **flags, speculative_simulate=",".join(f"{rate:.6f}" for rate in rates),
                speculative_config={"method": "substitute", "num_speculative_tokens": tokens,
                                    "substitute_dtype": rounded, "adaptive": False}) as llm:
        planned = llm.plan.substitutes
        assert planned is not None
        print(f"copies in {rounded} of {planned.layers} layers: {format_bytes(planned.nbytes)}; a pass moves "
              f"{format_bytes(planned.moved)}", flush=True)
        before, moved = llm.stats().speculation, llm.engine.runner.weight_traffic().bytes_moved
        assert before is not None
        found = speed(llm, prompt, length, repeats)
        after = llm.stats().speculation
        assert after is not None
        counts = after.counts
        moved = llm.engine.runner.weight_traffic().bytes_moved - moved
        per_token = (after.draft_seconds - before.draft_seconds) / max(1, counts.tokens)
        limit = tokens_per_pass / (planned.pass_seconds + tokens * planned.draft_seconds)
        details = {"simulated_acceptance": rates, "tokens_per_pass": counts.tokens_per_pass, "draft_tokens": tokens,
                   "draft_seconds_per_token": per_token, "planned_pass_seconds": planned.pass_seconds,
                   "planned_draft_seconds_per_token": planned.draft_seconds, "bytes_moved": moved,
                   "copies_bytes": planned.nbytes, "substitute_dtype": rounded}
        figures.append(Figure("decode, substitutes, simulated acceptance", "tok/s", found, limit, details=details))
        print(f"{counts.tokens_per_pass:.1f} tokens/pass (simulated acceptance), {1e3 * per_token:.2f} ms to draft a "
              f"token, by the plan {1e3 * planned.draft_seconds:.2f}; by the plan a pass {planned.pass_seconds:.3f} s")
    write(f"substitute-{model}", figures, output, model=model, gpu_memory=gpu_memory, device=device)


if __name__ == "__main__":
    main()
