"""Measurement of the engine's step costs: prompts and decodes of several sizes, each step timed by the engine."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

from spillover.engine.config import EngineConfig

if TYPE_CHECKING:
    from spillover.cluster.simulate.costs import Measured, Point
    from spillover.engine.step import Step

BATCHES = (1, 4, 16)
PROMPTS = (16, 128, 512)
OUTPUT = 12


def measure_steps(model: str | None) -> Measured:
    """Load the model and time its steps."""
    import numpy as np

    from spillover.cli.bench.measuring import make_vocabulary
    from spillover.cli.loading import open_llm, plan_only
    from spillover.cluster.simulate.costs import Measured, fit
    from spillover.engine.requests.sampling_params import SamplingParams

    config = EngineConfig(model=model, enable_prefix_caching=False, skip_tokenizer_init=True)
    vocabulary, rng = make_vocabulary(plan_only(config)), np.random.default_rng(0)
    points: list[Point] = []
    steps: list[tuple[Step, float]] = []
    with open_llm(config) as llm:
        plan = llm.plan
        room = plan.num_blocks * plan.block_size
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.0, detokenize=False)
        lengths = sorted({min(length, plan.max_model_len - OUTPUT) for length in PROMPTS})
        for repeat, batch, prompt in itertools.product(range(2), BATCHES, lengths):
            if batch > plan.max_num_seqs or batch * (prompt + OUTPUT) > room:
                continue
            steps.clear()
            llm.engine.on_step = lambda step, seconds: steps.append((step, seconds))
            llm.generate([list(vocabulary.draw(rng, prompt)) for _ in range(batch)], params, use_tqdm=False)
            llm.engine.on_step = None
            if repeat:  # the first round is for warm-up
                points.extend(typical(steps))
        return Measured(fit(points), f"measured on {plan.device} just now", model or "the default model",
                        kv_bytes_per_token=plan.block_bytes // plan.block_size, block_size=plan.block_size,
                        num_blocks=plan.num_blocks, max_num_seqs=plan.max_num_seqs,
                        max_num_batched_tokens=plan.max_num_batched_tokens)


def typical(steps: list[tuple[Step, float]]) -> list[Point]:
    """Return a point for each kind of step, which is given by its prefill tokens and decode rows."""
    from spillover.cluster.simulate.costs import Point, StepLoad
    from spillover.engine.step import Phase

    kinds: dict[tuple[int, int], list[tuple[float, int, float]]] = {}
    for step, seconds in steps:
        prefills = [item for item in step.items if item.phase is Phase.PREFILL]
        decodes = [item for item in step.items if item.phase is not Phase.PREFILL]
        kinds.setdefault((sum(item.count for item in prefills), len(decodes)), []).append(
            (sum(item.count * (item.end - item.count / 2) for item in prefills), sum(item.end for item in decodes),
             seconds))
    return [Point(StepLoad(prefill, statistics.fmean(each[0] for each in found), rows,
                           round(statistics.fmean(each[1] for each in found))),
                  statistics.median(each[2] for each in found)) for (prefill, rows), found in kinds.items()]
