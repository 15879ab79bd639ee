"""`spill bench throughput` and `spill bench latency`: vLLM's flags, numbers beside limits, sweeps in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.bench.bench_restart import restart
from spillover.cli.bench.bench_serve import serve as serve_command
from spillover.cli.bench.bench_sweep import sweep
from spillover.cli.bench.bench_tiers import tiers
from spillover.cli.bench.bench_workload import workload as workload_command
from spillover.cli.bench.measuring import check_counts, make_console, make_vocabulary, measure_limits, write_results
from spillover.cli.options import comma_list, engine_options, engine_sweep_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.bench.target import Generates, Limits
    from spillover.bench.throughput import Setting
    from spillover.bench.workloads.workloads import Workload
    from spillover.engine.assemble import PlannedModel


@click.group()
def bench() -> None:
    """Measure speed, and show it beside the hardware limit.

    \b
    Examples:
      spill bench throughput --input-len 256 --output-len 64 --num-prompts 32
      spill bench latency --batch-size 1,16 --input-len 256 --output-len 64
      spill bench serve --port 8000 --max-concurrency 4
      spill bench sweep --port 8000 --goodput ttft:500 tpot:50
      spill bench tiers
      spill bench restart
    """


bench.add_command(tiers)
bench.add_command(restart)
bench.add_command(serve_command)
bench.add_command(sweep)
bench.add_command(workload_command)


def _range(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    low, comma, high = value.partition(",")
    if not comma or not low.strip().isdigit() or not high.strip().isdigit():
        raise SpilloverError(f"{param.opts[0]} takes LOW,HIGH such as 16,512; got '{value}'")
    return int(low), int(high)


_WORKLOAD_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--backend", default="spillover", callback=comma_list(click.Choice(["spillover", "hf"])),
                 metavar="[spillover|hf],...",
                 help="Engine to measure; hf is transformers.generate with static padding. [default: spillover]"),
    click.option("--dataset-name", default=None, type=click.Choice(["random", "mixed", "sharegpt"]),
                 help="Where requests come from. [default: sharegpt with --dataset-path, else random]"),
    click.option("--dataset-path", "--dataset", "dataset_path", default=None,
                 help="A JSON file in the ShareGPT format."),
    click.option("--num-prompts", default=64, show_default=True, help="Number of requests, all sent at once."),
    click.option("--input-len", type=int, default=None, help="Prompt tokens per request; short for "
                                                             "--random-input-len."),
    click.option("--output-len", type=int, default=None, help="Output tokens per request, in place of the dataset's "
                                                              "own too."),
    click.option("--random-input-len", type=int, default=None, help="Prompt tokens per request, the shared prefix not "
                                                                    "counted. [default: 256]"),
    click.option("--random-output-len", type=int, default=None, help="Output tokens per request. [default: 64]"),
    click.option("--random-range-ratio", default=0.0, show_default=True,
                 help="Vary lengths uniformly by up to this fraction either way."),
    click.option("--random-prefix-len", "--prefix-len", "prefix_len", default=0, show_default=True,
                 help="Length of the prefix that all prompts (mixed: every second one) share."),
    click.option("--mixed-input-range", default="16,512", show_default=True, callback=_range, metavar="LOW,HIGH",
                 help="Prompt tokens of the mixed workload, log-uniform."),
    click.option("--mixed-output-range", default="8,128", show_default=True, callback=_range, metavar="LOW,HIGH",
                 help="Output tokens of the mixed workload, log-uniform."),
    click.option("--num-iters", default=1, show_default=True,
                 help="Number of repeats, each on fresh prompts; the median is shown."),
    click.option("--hf-max-batch-size", default="16", show_default=True, callback=comma_list(click.INT),
                 metavar="INT,...", help="Batch size of --backend hf."),
    click.option("--temperature", default=0.0, show_default=True, help="Sampling temperature; 0 is greedy."),
    click.option("--disable-detokenize", is_flag=True, help="Leave detokenization out of the measurement."),
    click.option("--output-json", default=None, metavar="FILE", help="Write all measurements to a JSON file, repeats "
                                                                     "included."),
]


def _workload_options(command: Any) -> Any:
    for option in reversed(_WORKLOAD_OPTIONS):
        command = option(command)
    return command


@bench.command()
@_workload_options
@engine_sweep_options()
def throughput(configs: list[EngineConfig], **options: Any) -> None:
    """Measure requests per second when all are sent at once. Comma lists in options make a table, one row per
    combination.

    \b
    Examples:
      spill bench throughput --dataset-name mixed --batching static,continuous
      spill bench throughput --max-num-seqs 1,4,16 --block-size 8,16,32
      spill bench throughput --dataset-name mixed --backend hf,spillover
    """
    import sys

    from spillover.bench import report
    from spillover.bench.throughput import measure
    from spillover.cli.loading import look_at

    console = make_console()
    planned = look_at(configs[0])
    workload = _workload(planned, **options)
    settings = _settings(configs, planned, measure_limits(planned, console), options)
    results = []
    for setting in settings:
        results.append(measure(setting, workload, options["num_iters"], progress=sys.stderr.isatty(),
                               compiles=planned.plan.device == "cuda"))
        report.print_throughput(console, results[-1])
    console.print(report.throughput_table(results))
    for line in report.comparison(results):
        console.print(line, highlight=False)
    write_results(options["output_json"], configs[0], [result.as_dict() for result in results])


@bench.command()
@click.option("--batch-size", default="8", show_default=True, callback=comma_list(click.INT), metavar="INT,...",
              help="Requests in the batch.")
@click.option("--input-len", default=32, show_default=True, help="Prompt tokens per request.")
@click.option("--output-len", default=128, show_default=True, help="Output tokens per request.")
@click.option("--num-iters-warmup", default=1, show_default=True, help="Warm-up iterations, not measured.")
@click.option("--num-iters", default=5, show_default=True, help="Measured iterations.")
@click.option("--temperature", default=0.0, show_default=True, help="Sampling temperature; 0 is greedy.")
@click.option("--disable-detokenize", is_flag=True, help="Leave detokenization out of the measurement.")
@click.option("--output-json", default=None, metavar="FILE", help="Write all measurements to a JSON file, each "
                                                                  "iteration included.")
@click.option("--profile", default=None, metavar="DIR",
              help="Profile one more iteration: write a trace for Perfetto to DIR and print where the time went.")
@engine_options(defaults={"enable_prefix_caching": False})
def latency(config: EngineConfig, batch_size: tuple[int, ...], input_len: int, output_len: int, num_iters_warmup: int,
            num_iters: int, temperature: float, disable_detokenize: bool, output_json: str | None,
            profile: str | None) -> None:
    """Measure the time of one batch alone: prefill (to the first token) and decode apart, each beside its limit.

    \b
    Example:
      spill bench latency --batch-size 1,16 --input-len 256 --output-len 64
    """
    from spillover.bench import report
    from spillover.bench.latency import measure
    from spillover.cli.bench.targets import EngineTarget
    from spillover.cli.loading import look_at, open_llm

    console = make_console()
    check_counts(num_iters=num_iters, input_len=input_len, output_len=output_len, batch_size=min(batch_size))
    planned = look_at(config)
    limits, vocabulary = measure_limits(planned, console), make_vocabulary(planned)
    results = []
    with open_llm(config) as llm:
        if max(batch_size) > llm.plan.max_num_seqs:
            raise SpilloverError(f"--batch-size {max(batch_size)} does not run as one batch under --max-num-seqs "
                                 f"{llm.plan.max_num_seqs}; raise --max-num-seqs")
        if input_len + output_len > llm.plan.max_model_len:
            raise SpilloverError(f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len} "
                                 f"tokens but --max-model-len is {llm.plan.max_model_len}; shorten them or raise it")
        target = EngineTarget(llm, limits, temperature, not disable_detokenize)
        for size in batch_size:
            results.append(measure(target, vocabulary, size, input_len, output_len, num_iters,
                                   num_iters_warmup, config.seed))
            report.print_latency(console, results[-1])
            if profile is not None:
                from spillover.cli.profiling import profile_batch

                profile_batch(target, planned, limits, vocabulary, size, input_len, output_len, profile, console)
    console.print(report.latency_table(results))
    if planned.plan.placement is not None:
        from spillover.cli.plan.plan_weights import print_predicted

        print_predicted(console, planned.plan.placement, results)
    write_results(output_json, config, [result.as_dict() for result in results])


def _workload(planned: PlannedModel, dataset_name: str | None, dataset_path: str | None,
              num_prompts: int, input_len: int | None, output_len: int | None, random_input_len: int | None,
              random_output_len: int | None, random_range_ratio: float, prefix_len: int,
              mixed_input_range: tuple[int, int], mixed_output_range: tuple[int, int], num_iters: int,
              **_others: Any) -> Workload:
    from spillover.bench.workloads.workloads import MixedWorkload, RandomWorkload, load_sharegpt
    from spillover.models.tokenizer import load_tokenizer

    check_counts(num_iters=num_iters)
    seed, vocabulary = planned.config.seed, make_vocabulary(planned)
    name = dataset_name or ("sharegpt" if dataset_path else "random")
    if dataset_path is not None and name != "sharegpt":
        raise SpilloverError(f"--dataset-path is read for --dataset-name sharegpt only, not for {name}")
    if name == "sharegpt":
        if dataset_path is None:
            raise SpilloverError("--dataset-name sharegpt needs --dataset-path, a JSON file in the ShareGPT format")
        return load_sharegpt(dataset_path, load_tokenizer(planned.config.tokenizer or planned.path), vocabulary,
                             num_prompts, output_len, seed, planned.plan.max_model_len)
    if name == "mixed":
        return MixedWorkload(vocabulary, num_prompts, mixed_input_range, mixed_output_range, prefix_len, seed)
    return RandomWorkload(vocabulary, num_prompts, _one_of("input", input_len, random_input_len, 256),
                          _one_of("output", output_len, random_output_len, 64), random_range_ratio, prefix_len, seed)


def _one_of(which: str, short: int | None, long: int | None, default: int) -> int:
    if short is not None and long is not None and short != long:
        raise SpilloverError(f"--{which}-len {short} and --random-{which}-len {long} contradict each other: give one")
    chosen = short if short is not None else long
    return default if chosen is None else chosen


def _settings(configs: list[EngineConfig], planned: PlannedModel, limits: Limits,
              options: dict[str, Any]) -> list[Setting]:
    """Backends are the outermost axis: the engine's options mean nothing to transformers, nor its batch size to us."""
    from spillover.bench.throughput import Setting

    names = [name for name in EngineConfig.__dataclass_fields__
             if len({getattr(config, name) for config in configs}) > 1]
    backends, hf_sizes = options["backend"], options["hf_max_batch_size"]
    settings = []
    for backend in backends:
        shown = {"backend": backend} if len(backends) > 1 else {}
        if backend == "hf":
            for size in hf_sizes:
                label = {**shown, "hf-max-batch-size": str(size)} if len(hf_sizes) > 1 else shown
                settings.append(Setting(label, _make_hf(planned, size, limits)))
            continue
        for config in configs:
            axes = {name.replace("_", "-"): _shown(getattr(config, name)) for name in names}
            settings.append(Setting({**shown, **axes}, _make_engine(config, limits, options)))
    return settings


def _make_engine(config: EngineConfig, limits: Limits, options: dict[str, Any]) -> Callable[[], Generates]:
    from spillover.cli.bench.targets import EngineTarget
    from spillover.cli.loading import open_llm

    return lambda: EngineTarget(open_llm(config), limits, options["temperature"], not options["disable_detokenize"])


def _make_hf(planned: PlannedModel, batch_size: int, limits: Limits) -> Callable[[], Generates]:
    from spillover.bench.hf import TransformersTarget

    return lambda: TransformersTarget(str(planned.path), batch_size, planned.plan.dtype, planned.plan.device, limits)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)
