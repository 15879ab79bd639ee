"""On a CUDA device: GGUF files whose weights stay in codes give the scores of dequantised weights, and the same bits in
every batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from spillover import LLM, SamplingParams
from spillover.kernels.cuda import coded_linear
from support.models.coded_weights import KINDS
from support.models.gguf_models import HIDDEN, LAYERS, VOCAB, mixed, write_tiled_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != coded_linear.CAPABILITY,
                       reason="no CUDA device of compute capability 9.0"),
]
PROMPTS = [[(11 * i + 7 * j) % VOCAB for j in range(2 + 13 * i)] for i in range(7)]
CASES: dict[str, Callable[[str], Kind]] = {
    **{kind.name: (lambda name, kind=kind: kind) for kind in KINDS}, "mixed": mixed}  # type: ignore[misc]


def scores(path: Path, prompts: list[list[int]], tokens: int = 12, **flags: str) -> list[list[float]]:
    """Return log probabilities of prompt tokens and of generated ones, followed by the generated ids."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=128, gpu_memory="1GB", **flags) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    said = []
    for ids, output in zip(prompts, outputs, strict=True):
        told, made = (output.prompt_logprobs or [])[1:], output.outputs[0]
        prompt = [entry[token].logprob for token, entry in zip(ids[1:], told, strict=True) if entry is not None]
        said.append(prompt + [entry[token].logprob for token, entry
                              in zip(made.token_ids, made.logprobs or [], strict=True)] + list(made.token_ids))
    return said


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in CASES), ("Q6_K", True), ("Q4_0", True)])
def test_scores_are_those_of_dequantised_weights_and_of_every_batch(name: str, tied: bool, tmp_path: Path) -> None:
    """In codes weights are exact, dequantised they are bfloat16: scores differ only by the rounding of bfloat16.

    A rounding changes a number by at most u = 2**-8 of it, and by u / sqrt(3) on average (root mean square). A number
    of the last hidden state has been through about 14 of them per layer, in either run: 4 products, their weights, 2
    norms, 2 sums with the residual, attention and activation. They are independent, so its error is sqrt(28 layers)
    times one. That state has a length of sqrt(HIDDEN), and a row of the head a length of 1, or of sqrt(HIDDEN) if it is
    the embedding: a logit has the state's error times the length of the row, is then rounded itself, and is at most as
    large as the product of the two lengths. A log probability is the difference of two such numbers.
    """
    path = write_tiled_llama(tmp_path / "m.gguf", CASES[name], tied)
    together = scores(path, PROMPTS, device="cuda", dtype="bfloat16")
    alone = [scores(path, [ids], device="cuda", dtype="bfloat16")[0] for ids in PROMPTS[1::3]]
    assert alone == together[1::3]
    widened = scores(path, PROMPTS, tokens=1, device="cuda", dtype="bfloat16", weight_codes="widen")
    differences = [a - b for ids, found, other in zip(PROMPTS, together, widened, strict=True)
                   for a, b in zip(found[: len(ids) - 1], other, strict=False)]
    rounding, row = 2**-8 / 3**0.5, HIDDEN**0.5 if tied else 1.0
    error = 2**0.5 * row * (rounding * (2 * 14 * LAYERS) ** 0.5 + rounding * HIDDEN**0.5)
    moved = torch.tensor(differences).abs()
    assert moved.square().mean().sqrt() < error
    assert moved.max() < 4 * error
