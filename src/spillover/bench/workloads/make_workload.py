"""Construction of a workload from its options, for the model that will be queried."""

from __future__ import annotations

from collections.abc import Callable

from spillover.bench.serving.serve_request import ServeWorkload
from spillover.bench.serving.served_model import ServedModel
from spillover.bench.workloads import workloads_synthetic as synthetic
from spillover.bench.workloads.traces import Replay, TraceRow, read_azure, read_burstgpt, read_mooncake, trace_shapes
from spillover.bench.workloads.workload_options import (
    CUSTOM,
    GSP,
    MIXED,
    MULTI_TURN,
    PREFILL_MIX,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    TRACES,
    VARIABLE_OUTPUT,
    WorkloadOptions,
)
from spillover.bench.workloads.workload_stats import Shape, whole_prompts
from spillover.bench.workloads.workloads_recorded import custom, sharegpt
from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
from spillover.errors import SpilloverError


def make_workload(options: WorkloadOptions, served: ServedModel | None = None) -> ServeWorkload:
    """Make a workload from its options. `served`: the model to query; without it only statistics are available."""
    longest = served.max_model_len if served is not None else None
    tokenizer = served.tokenizer if served is not None else None
    if options.dataset == SHAREGPT:
        return sharegpt(options.file, tokenizer, options.num_prompts, options.sharegpt_output_len,
                        options.sharegpt_turns, not options.disable_shuffle, options.seed, longest)
    if options.dataset == CUSTOM:
        output_len = options.custom_output_len
        return custom(options.file, tokenizer, options.limit, None if output_len == -1 else output_len,
                      not options.skip_chat_template, not options.disable_shuffle, options.seed, longest)
    notes: tuple[str, ...] = ()
    if options.dataset in TRACES:
        shapes, notes = trace_shapes(_rows(options), Replay(options.limit, options.trace_speedup,
                                                            options.trace_length_scale, longest))
    else:
        shapes = _SHAPES[options.dataset](options)
        _check_fits(options, shapes, longest)
    vocabulary = None if served is None else served.vocabulary
    return SyntheticWorkload(options.dataset, shapes, vocabulary, options.seed, notes)


def _rows(options: WorkloadOptions) -> list[TraceRow]:
    if options.dataset == "burstgpt":
        return read_burstgpt(options.file, options.trace_model)
    return read_mooncake(options.file) if options.dataset == "mooncake" else read_azure(options.file)


_SHAPES: dict[str, Callable[[WorkloadOptions], tuple[Shape, ...]]] = {
    RANDOM: lambda given: synthetic.random_shapes(
        given.num_prompts, input_len=given.random_input_len, output_len=given.random_output_len,
        range_ratio=given.random_range_ratio, prefix_len=given.random_prefix_len, seed=given.seed),
    MIXED: lambda given: synthetic.mixed_shapes(
        given.num_prompts, input_range=_range("mixed-input-range", given.mixed_input_range),
        output_range=_range("mixed-output-range", given.mixed_output_range), prefix_len=given.random_prefix_len,
        seed=given.seed),
    GSP: lambda given: synthetic.generated_shared_prefix_shapes(
        groups=given.gsp_num_groups, per_group=given.gsp_prompts_per_group,
        system_prompt_len=given.gsp_system_prompt_len, question_len=given.gsp_question_len,
        output_len=given.gsp_output_len, range_ratio=given.gsp_range_ratio, turns=given.gsp_num_turns,
        ordered=given.gsp_ordered, limit=given.limit, seed=given.seed),
    PREFIX_REPETITION: lambda given: synthetic.prefix_repetition_shapes(
        given.num_prompts, prefix_len=given.prefix_repetition_prefix_len,
        suffix_len=given.prefix_repetition_suffix_len, num_prefixes=given.prefix_repetition_num_prefixes,
        output_len=given.prefix_repetition_output_len, shuffle=not given.disable_shuffle, seed=given.seed),
    MULTI_TURN: lambda given: synthetic.multi_turn_shapes(
        sessions=given.multi_turn_num_sessions, turns=given.multi_turn_num_turns,
        shared_len=given.multi_turn_shared_len, prefix_len=given.multi_turn_prefix_len,
        input_len=given.multi_turn_input_len, output_len=given.multi_turn_output_len,
        range_ratio=given.multi_turn_range_ratio, think_time=given.multi_turn_think_time, seed=given.seed),
    PREFILL_MIX: lambda given: synthetic.prefill_mix_shapes(
        given.num_prompts, long_share=given.prefill_mix_long_share, long_input_len=given.prefill_mix_long_input_len,
        long_output_len=given.prefill_mix_long_output_len, short_input_len=given.prefill_mix_short_input_len,
        short_output_len=given.prefill_mix_short_output_len),
    VARIABLE_OUTPUT: lambda given: synthetic.variable_output_shapes(
        given.num_prompts, output_lens=given.variable_output_lens, input_len=given.variable_output_input_len,
        seed=given.seed)}


def _range(option: str, bounds: tuple[int, ...]) -> tuple[int, int]:
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise SpilloverError(f"--{option} takes LOW,HIGH with 1 <= LOW <= HIGH; got {','.join(map(str, bounds))}")
    return bounds[0], bounds[1]


def _check_fits(options: WorkloadOptions, shapes: tuple[Shape, ...], longest: int | None) -> None:
    """Refuse requests that do not fit: promised lengths are not truncated."""
    if longest is None:
        return
    most = max(sum(part.length for part in prompt) + answer.length for prompt, answer in whole_prompts(shapes))
    if most > longest:
        raise SpilloverError(f"the workload {options.dataset} has requests of {most:,} tokens, but the model takes "
                             f"{longest:,}; shorten them, or raise --max-model-len")
