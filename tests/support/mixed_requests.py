"""Requests of every kind, for comparing the output of runs with and without speculation."""

from __future__ import annotations

import random
from typing import Any

from spillover import SamplingParams
from spillover.engine.output.outputs import RequestOutput

COUNT = 64


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Return prompts that repeat phrases; some share a prefix."""
    shared = [rng.randrange(256) for _ in range(24)]
    found = []
    for _ in range(COUNT):
        phrase = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        start = shared[:rng.randint(0, 24)] if rng.random() < 0.5 else []
        found.append((start + phrase * rng.randint(1, 5))[:60])
    return found


def params_of(rng: random.Random) -> SamplingParams:
    """Return the sampling parameters of a random kind of request."""
    kind: dict[str, Any] = rng.choice([
        {}, {}, {"repetition_penalty": 1.2, "presence_penalty": 0.4}, {"frequency_penalty": 0.3},
        {"logit_bias": {65: 4.0, 66: -5.0}}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.1}, {"n": 2},
        {"stop": ["a", "\u00a4"]}, {"stop": ["e"], "include_stop_str_in_output": True},
        {"stop_token_ids": [70, 71, 72]}, {"structured_outputs": {"regex": "(ab|ba){2,9}"}},
    ])
    most = rng.randint(1, 30)
    return SamplingParams(temperature=rng.choice([0, 0, 0.5, 1.0]), seed=rng.randrange(1000), max_tokens=most,
                          min_tokens=rng.choice([0, 0, most // 2]), ignore_eos=rng.random() < 0.5,
                          logprobs=rng.choice([None, None, 0, 3]),
                          prompt_logprobs=rng.choice([None, None, None, 1]), **kind)


def facts(output: RequestOutput) -> list[object]:
    return [output.prompt_logprobs, *((one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)
                                      for one in output.outputs)]
