"""vLLM's metrics with vLLM's names and labels (`--metrics-prefix vllm`), for gateways that only support those.

They are derived from the metrics under `spillover:`, which are exported too. `vllm:kv_cache_usage_perc` covers only the
device, as gateways derive from it how many more requests fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from spillover.server.telemetry.tier_metrics import PREFIX

VLLM_PREFIX = "vllm:"
# Families that vLLM has too, with their labels there besides `model_name` and `engine`.
VLLM_FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
        "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits", "prompt_tokens",
        "prompt_tokens_cached", "generation_tokens", "num_preemptions", "iteration_tokens_total",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_prefill_kv_computed_tokens", "request_params_n",
        "request_params_max_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens"), ()),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
    "request_success": ("finished_reason",),
    "cache_config_info": ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
}
_ENGINE = {"engine": "0"}


class VllmNames(Collector):
    """A collector that exports another collector's families with vLLM's names."""

    def __init__(self, ours: Collector) -> None:
        self._ours = ours

    def collect(self) -> Iterator[Metric]:
        return vllm_families(self._ours.collect())


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield those of our families that vLLM has, renamed."""
    for family in families:
        name = family.name.removeprefix(PREFIX)
        if name == family.name or name not in VLLM_FAMILIES:
            continue
        labels = {"model_name", "le", *VLLM_FAMILIES[name]}
        renamed = Metric(VLLM_PREFIX + name, family.documentation, family.type)
        for sample in family.samples:
            if sample.labels.get("tier", "device") == "device" and not sample.name.endswith("_created"):
                kept = {label: value for label, value in sample.labels.items() if label in labels}
                renamed.samples.append(Sample(VLLM_PREFIX + sample.name.removeprefix(PREFIX), kept | _ENGINE,
                                              sample.value))
        yield renamed
