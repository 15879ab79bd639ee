"""A served run as `vllm bench serve` reports it: its console block, and its JSON keys with additional ones.

Lines that vLLM's block does not have are printed below it, so that parsers of the block keep working: the steady state,
waiting in the client, the cache, and whether the client kept up. The last lines repeat the main figures followed by
their units, which other parsers look for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spillover.bench.records import Run
from spillover.bench.serving.serving_metrics import Spread, gaps, measure, ttft
from spillover.bench.serving.speculation_counters import acceptance_by_position, speculation_metrics
from spillover.bench.target import PHASES

WIDTH = 50
DEFINITIONS = ("TTFT: first chunk with text or token ids, from when the request was sent. TPOT: (last - first) / "
               "(n - 1) of a request. ITL: gaps between tokens, all requests together, k gaps for a chunk of k. E2EL: "
               "sent to last chunk. Failed requests are not included.")
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True)
class ReportOptions:
    """The options of the command line that a report needs."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    ranks: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] | None = None  # objectives in seconds by metric
    backend: str = "openai"
    label: str | None = None
    tokenizer: str | None = None
    metadata: Mapping[str, str] | None = None


class Report:
    """One run with its metrics, for the whole run and for its steady state."""

    def __init__(self, run: Run, options: ReportOptions) -> None:
        ranks = sorted({*options.ranks, 50.0, 90.0, 95.0, 99.0})
        self.run, self.options = run, options
        self.whole = measure(run, options.goodput, None, ranks)
        self.steady = measure(run, options.goodput, run.window, ranks)

    def block(self) -> str:
        """Return vLLM's result block."""
        run, whole, options = self.run, self.whole, self.options
        rate, limit = run.details.get("request_rate"), run.details.get("max_concurrency")
        lines = [_title(" Serving Benchmark Result ", "="),
                 _line("Successful requests:", whole.completed), _line("Failed requests:", whole.failed)]
        if limit is not None:
            lines.append(_line("Maximum request concurrency:", limit))
        if isinstance(rate, int | float):
            lines.append(_line("Request rate configured (RPS):", float(rate)))
        lines += [_line("Benchmark duration (s):", run.duration), _line("Total input tokens:", whole.prompt_tokens),
                  _line("Total generated tokens:", whole.output_tokens),
                  _line("Request throughput (req/s):", whole.request_throughput)]
        if whole.goodput is not None:
            lines.append(_line("Request goodput (req/s):", whole.goodput))
        lines += [_line("Output token throughput (tok/s):", whole.output_throughput),
                  _line("Peak output token throughput (tok/s):", whole.peak_output_throughput),
                  _line("Peak concurrent requests:", float(whole.peak_concurrency)),
                  _line("Total token throughput (tok/s):", whole.total_token_throughput)]
        for metric in options.metrics:
            name, title = METRICS[metric]
            spread: Spread = getattr(whole, metric)
            lines += [_title(title, "-"), _line(f"Mean {name} (ms):", spread.mean * 1e3),
                      _line(f"Median {name} (ms):", spread.median * 1e3),
                      *(_line(f"P{rank:g} {name} (ms):", spread.percentiles[rank] * 1e3) for rank in options.ranks)]
        return "\n".join([*lines, "=" * WIDTH])

    def notes(self) -> list[str]:
        """Return lines with what vLLM does not report."""
        run, whole, steady = self.run, self.whole, self.steady
        begin, end = run.window
        lines = [
            f"Throughput: {whole.request_throughput:.2f} requests/s, {whole.total_token_throughput:.2f} total "
            f"tokens/s, {whole.output_throughput:.2f} output tokens/s",
            *(f"Mean {name}: {_ms(spread.mean)} ms, P99 {name}: {_ms(spread.percentiles[99.0])} ms (n={spread.count:,})"
              for name, spread in (("TTFT", whole.ttft), ("ITL", whole.itl))),
            f"TTFT from when each request was due, waiting in the client included: mean "
            f"{_ms(whole.ttft_scheduled.mean)} ms, P99 {_ms(whole.ttft_scheduled.percentiles[99.0])} ms",
            f"Steady state ({begin:.1f} s to {end:.1f} s): {steady.request_throughput:.2f} requests/s, "
            f"{steady.output_throughput:.2f} output tokens/s, {steady.mean_concurrency:.1f} requests at once; median "
            f"TTFT {_ms(steady.ttft.median)} ms, TPOT {_ms(steady.tpot.median)} ms",
        ]
        if whole.attainment is not None:
            lines.append(f"Objectives met by {whole.attainment:.1%} of requests")
        return lines + self._cache() + self._speculation() + self._parts() + self._faults()

    def _cache(self) -> list[str]:
        counters = self.run.counters
        with_sources = [record for record in self.run.completed if record.sources is not None]
        lines = []
        sources: dict[str, int] = {}
        for record in with_sources:
            for source, count in (record.sources or {}).items():
                sources[source] = sources.get(source, 0) + count
        total = sum(sources.values())
        if total:
            lines.append("Prompt tokens by source: " + ", ".join(
                f"{source} {count:,} ({count / total:.1%})" for source, count in sources.items() if count))
        queries = counters.get("prefix_cache_queries", 0.0)
        if queries:
            hits = counters.get("prefix_cache_hits", 0.0)
            lines.append(f"Prefix cache: {hits:,.0f} of {queries:,.0f} tokens looked up were found "
                         f"({hits / queries:.1%})")
        preempted = counters.get("num_preemptions", 0.0)
        return [*lines, f"Preemptions: {preempted:.0f}"] if preempted else lines

    def _speculation(self) -> list[str]:
        found = speculation_metrics(self.run.counters)
        if not found:
            return []
        line = f"Speculation: {found['spec_tokens_per_pass']:.2f} tokens per pass with a draft"
        if "spec_verified_tokens" in found:
            line += (f", {found['spec_accepted_tokens']:,.0f} of {found['spec_verified_tokens']:,.0f} verified tokens "
                     f"accepted ({found['spec_acceptance_rate']:.1%}), {found['spec_wasted_tokens']:,.0f} wasted")
        by_position = acceptance_by_position(found)
        if by_position:
            line += "; by position " + " ".join(f"{share:.0%}" for share in by_position)
        return [line + (" (simulated acceptance)" if "spec_simulated" in found else "")]

    def _parts(self) -> list[str]:
        """Return where the time of requests went, as the server reports it."""
        timings = [record.timings for record in self.run.completed if record.timings]
        if not timings:
            return []
        means = {name: sum(times.get(name, 0.0) for times in timings) / len(timings)
                 for name in PHASES if any(name in times for times in timings)}
        return ["Mean time in the server: " + ", ".join(f"{name} {_ms(value)} ms" for name, value in means.items())]

    def _faults(self) -> list[str]:
        run, lines = self.run, []
        client = run.client
        if client.saturated is not None:
            lines.append(f"CLIENT SATURATED, the client limited these numbers: {client.saturated}")
        else:
            lines.append(f"Client: {client.processes} process{'es' * (client.processes > 1)}, {client.busy:.0%} busy, "
                         f"requests sent {_ms(client.lag_p99)} ms after they were due at p99")
        if run.details.get("stopped"):
            lines.append(f"STOPPED EARLY: {run.details['stopped']}; {run.details['not_sent']:,} requests were not sent")
        short = [record for record in run.completed if record.output_tokens != record.requested_output_len]
        if short:
            lines.append(f"Lengths: {len(short):,} of {len(run.completed):,} answers do not have the requested "
                         "length (--ignore-eos enforces it)")
        reasons: dict[str, int] = {}
        for record in run.failed:
            reasons[record.error or ""] = reasons.get(record.error or "", 0) + 1
        lines += [f"Failed: {count:,} x {reason}"
                  for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:5]]
        return lines

    def to_json(self, detailed: bool = False) -> dict[str, Any]:
        """Return a JSON object with vLLM's keys at the top level, and additional values under names of our own."""
        run, whole, options = self.run, self.whole, self.options
        details = run.details
        result: dict[str, Any] = {
            "date": datetime.fromtimestamp(run.start_unix).strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": options.backend, "backend": options.backend, "label": options.label,
            "model_id": details.get("model"), "tokenizer_id": options.tokenizer, "num_prompts": details.get("offered"),
            **(options.metadata or {}),
            "request_rate": details.get("request_rate"), "burstiness": details.get("burstiness"),
            "max_concurrency": details.get("max_concurrency"),
            **{key: value for key, value in details.items() if key.startswith("ramp_up_")},
            "duration": run.duration, "completed": whole.completed, "failed": whole.failed,
            "total_input_tokens": whole.prompt_tokens, "total_output_tokens": whole.output_tokens,
            "request_throughput": whole.request_throughput, "request_goodput": whole.goodput,
            "output_throughput": whole.output_throughput, "total_token_throughput": whole.total_token_throughput,
            "max_output_tokens_per_s": whole.peak_output_throughput,
            "max_concurrent_requests": whole.peak_concurrency,
        }
        for metric in METRICS:
            result |= _spread_keys(metric, getattr(whole, metric), options.ranks)
        result |= _spread_keys("ttft_scheduled", whole.ttft_scheduled, options.ranks)
        if detailed:
            result |= self._detailed()
        return result | {"steady_state": self.steady.to_json(), "client": run.client.to_json(),
                         "counters": dict(run.counters), "details": dict(details), "start_unix": run.start_unix}

    def _detailed(self) -> dict[str, Any]:
        records = self.run.records
        return {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens if record.ok else 0 for record in records],
            "ttfts": [ttft(record) if record.chunks else 0.0 for record in records],
            "itls": [gaps(record).tolist() for record in records],
            "start_times": [record.sent for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error or "" for record in records],
            "records": [record.to_json() for record in records],
        }


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse objectives like `ttft:500 tpot:50`, in milliseconds; return them in seconds."""
    from spillover.bench.serving.serving_metrics import OBJECTIVES
    from spillover.errors import SpilloverError

    objectives = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            objectives[name] = float(value) / 1e3
        except ValueError:
            objectives[name] = math.nan
        if name not in OBJECTIVES or not objectives[name] >= 0:
            raise SpilloverError(f"--goodput takes NAME:MILLISECONDS such as ttft:500 tpot:50, with "
                                 f"{', '.join(OBJECTIVES)}; got '{pair}'")
    return objectives


def _spread_keys(metric: str, spread: Spread, ranks: Sequence[float]) -> dict[str, float]:
    values = {f"mean_{metric}_ms": spread.mean, f"median_{metric}_ms": spread.median, f"std_{metric}_ms": spread.std,
              **{f"p{rank:g}_{metric}_ms": spread.percentiles[rank] for rank in ranks}}
    # vLLM writes 0 if there is no sample, and JSON has no NaN.
    return {key: 0.0 if math.isnan(value) else value * 1e3 for key, value in values.items()}


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{WIDTH}}"


def _line(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{name:<40} {value:<10}"
    return f"{name:<40} {0.0 if math.isnan(value) else value:<10.2f}"


def _ms(seconds: float) -> str:
    return "0.00" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"
