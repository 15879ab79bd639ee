"""From options to a workload, for the model that will be asked."""

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
    """Make a workload from its options. `served`: the model to ask; without one there are only statistics."""
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


def _random(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.random_shapes(options.num_prompts, options.random_input_len, options.random_output_len,
                                   options.random_range_ratio, options.random_prefix_len, options.seed)


def _mixed(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.mixed_shapes(options.num_prompts, _range("mixed-input-range", options.mixed_input_range),
                                  _range("mixed-output-range", options.mixed_output_range), options.random_prefix_len,
                                  options.seed)


def _generated_shared_prefix(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.generated_shared_prefix_shapes(
        options.gsp_num_groups, options.gsp_prompts_per_group, options.gsp_system_prompt_len, options.gsp_question_len,
        options.gsp_output_len, options.gsp_range_ratio, options.gsp_num_turns, options.gsp_ordered, options.limit,
        options.seed)


def _prefix_repetition(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.prefix_repetition_shapes(
        options.num_prompts, options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len,
        options.prefix_repetition_num_prefixes, options.prefix_repetition_output_len, not options.disable_shuffle,
        options.seed)


def _multi_turn(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.multi_turn_shapes(
        options.multi_turn_num_sessions, options.multi_turn_num_turns, options.multi_turn_shared_len,
        options.multi_turn_prefix_len, options.multi_turn_input_len, options.multi_turn_output_len,
        options.multi_turn_range_ratio, options.multi_turn_think_time, options.seed)


def _prefill_mix(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.prefill_mix_shapes(
        options.num_prompts, options.prefill_mix_long_share, options.prefill_mix_long_input_len,
        options.prefill_mix_long_output_len, options.prefill_mix_short_input_len, options.prefill_mix_short_output_len)


def _variable_output(options: WorkloadOptions) -> tuple[Shape, ...]:
    return synthetic.variable_output_shapes(options.num_prompts, options.variable_output_lens,
                                            options.variable_output_input_len, options.seed)


_SHAPES: dict[str, Callable[[WorkloadOptions], tuple[Shape, ...]]] = {
    RANDOM: _random, MIXED: _mixed, GSP: _generated_shared_prefix, PREFIX_REPETITION: _prefix_repetition,
    MULTI_TURN: _multi_turn, PREFILL_MIX: _prefill_mix, VARIABLE_OUTPUT: _variable_output}


def _range(option: str, bounds: tuple[int, ...]) -> tuple[int, int]:
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise SpilloverError(f"--{option} takes LOW,HIGH with 1 <= LOW <= HIGH; got {','.join(map(str, bounds))}")
    return bounds[0], bounds[1]


def _check_fits(options: WorkloadOptions, shapes: tuple[Shape, ...], longest: int | None) -> None:
    """Refuse requests that do not fit: a length that was promised is not cut."""
    if longest is None:
        return
    most = max(sum(part.length for part in prompt) + answer.length for prompt, answer in whole_prompts(shapes))
    if most > longest:
        raise SpilloverError(f"the workload {options.dataset} has requests of {most:,} tokens, but the model takes "
                             f"{longest:,}; shorten them, or raise --max-model-len")
