"""The engine as a target of the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from spillover.bench.target import BenchRequest, Bound, Completion, Counters, Limits, TierTraffic
from spillover.engine.llm import LLM
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.memory.spill.report import by_name
from spillover.plan.measure import measure_rates
from spillover.plan.rates import Rates
from spillover.plan.roofline import Roofline

CALIBRATION_SECONDS = 1.0  # time to measure rates between two iterations
SETTLE_SECONDS = 0.1  # OpenMP threads spin for a while after use, on cores that the engine's threads need


class RooflineLimits:
    """Limits by `plan.roofline`, as an implementation of the benchmarks' protocol."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self.memory_rate = roofline.rates.memory_read
        self.matrix_rate = roofline.rates.flops(roofline.shape.dtype)

    def again(self) -> RooflineLimits:
        rates = measure_rates(self._roofline.rates.device, CALIBRATION_SECONDS)
        time.sleep(SETTLE_SECONDS)
        return self._at(rates)

    def mean(self, other: Limits) -> RooflineLimits:
        rates = self._roofline.rates
        memory = (self.memory_rate + other.memory_rate) / 2
        scale = (self.matrix_rate + other.matrix_rate) / 2 / self.matrix_rate
        wide = None if rates.bfloat16 is None else rates.bfloat16 * scale
        return self._at(replace(rates, memory_read=memory, float32=rates.float32 * scale, bfloat16=wide))

    def _at(self, rates: Rates) -> RooflineLimits:
        return RooflineLimits(Roofline(self._roofline.shape, rates))

    def step(self, batch: Sequence[tuple[int, int]]) -> Bound:
        roof = self._roofline.step(batch)
        return Bound(roof.seconds, roof.limit.bytes, roof.limit.flops, roof.bound)


class EngineTarget:
    def __init__(self, llm: LLM, limits: Limits | None = None, temperature: float = 0.0, detokenize: bool = True,
                 cache_salt: str | None = None, links: Mapping[str, tuple[float, float]] | None = None) -> None:
        """Wrap an engine. `links`: bytes per second (to, from) of tiers whose link the engine does not time."""
        self._llm = llm
        self._cache_salt = cache_salt
        self._links = links or {}
        self._temperature = temperature
        self._detokenize = detokenize and llm.tokenizer is not None
        self.limits = limits

    @property
    def max_num_seqs(self) -> int:
        return self._llm.plan.max_num_seqs

    @property
    def planned_bytes(self) -> int | None:
        return self._llm.plan.total_bytes if self._llm.plan.device == "cpu" else None

    def generate(self, requests: Sequence[BenchRequest], progress: bool = False) -> list[Completion]:
        params = [SamplingParams(max_tokens=request.output_len, ignore_eos=True, temperature=self._temperature,
                                 detokenize=self._detokenize) for request in requests]
        prompts = [list(request.prompt_token_ids) for request in requests]
        return [_completion(output) for output in self._llm.generate(prompts, params, use_tqdm=progress,
                                                                     cache_salt=self._cache_salt)]

    def counters(self) -> Counters:
        stats = self._llm.stats()
        return Counters(num_blocks=self._llm.plan.num_blocks, block_size=stats.block_size, steps=stats.steps,
                        preemptions=stats.preemptions, slots_held=stats.slots_held, slots_wasted=stats.slots_wasted)

    def tiers(self) -> tuple[TierTraffic, ...]:
        tiers = []
        for report in by_name(self._llm.engine.scheduler.connector.reports()):
            link_in, link_out = self._links.get(report.name, (report.link_in, report.link_out))
            tiers.append(TierTraffic(report.name, report.blocks, report.bytes_in, report.bytes_out, report.seconds_in,
                                     report.seconds_out, report.failures, link_in, link_out))
        return tuple(tiers)

    def reset_prefix_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._llm.close()
        del self._llm


def _completion(output: RequestOutput) -> Completion:
    timings, sources = output.timings, output.sources
    count = sum(len(each.token_ids) for each in output.outputs)
    by_source = asdict(sources)
    token_ids = tuple(token for each in output.outputs for token in each.token_ids)
    if timings is None:
        return Completion(count, by_source, token_ids=token_ids)
    return Completion(count, by_source, timings.queue, timings.prefill, timings.decode,
                      timings.first_token - timings.arrived, token_ids)
