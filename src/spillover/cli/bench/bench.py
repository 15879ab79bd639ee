"""`spill bench throughput` and `spill bench latency`: vLLM's flags, numbers with their limits, sweeps in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from spillover.bench.workloads.workload_options import FILES, WorkloadOptions
from spillover.cli.bench.bench_batches import batches
from spillover.cli.bench.bench_restart import restart
from spillover.cli.bench.bench_serve import serve as serve_command
from spillover.cli.bench.bench_sweep import sweep
from spillover.cli.bench.bench_tiers import tiers
from spillover.cli.bench.bench_workload import workload as workload_command
from spillover.cli.bench.measuring import check_counts, make_console, make_vocabulary, measure_limits, write_results
from spillover.cli.bench.workload_options import workload_options
from spillover.cli.options import comma_list, engine_options, engine_sweep_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.bench.serving.serve_request import ServeWorkload
    from spillover.bench.target import Generates, Limits
    from spillover.bench.throughput import Setting
    from spillover.engine.planned import PlannedModel


@click.group()
def bench() -> None:
    """Measure speed, and compare it with the hardware limit.

    \b
    Examples:
      spill bench throughput --input-len 256 --output-len 64 --num-prompts 32
      spill bench latency --batch-size 1,16 --input-len 256 --output-len 64
      spill bench serve --port 8000 --max-concurrency 4
      spill bench sweep --port 8000 --goodput ttft:500 tpot:50
      spill bench tiers
      spill bench restart
    """


bench.add_command(batches)
bench.add_command(tiers)
bench.add_command(restart)
bench.add_command(serve_command)
bench.add_command(sweep)
bench.add_command(workload_command)


_RUN_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--backend", default="spillover", callback=comma_list(click.Choice(["spillover", "hf"])),
                 metavar="[spillover|hf],...",
                 help="Engine to measure; hf is transformers.generate with static padding. [default: spillover]"),
    click.option("--num-iters", default=1, show_default=True,
                 help="Number of repeats, each on fresh prompts; the median is shown."),
    click.option("--hf-max-batch-size", default="16", show_default=True, callback=comma_list(click.INT),
                 metavar="INT,...", help="Batch size of --backend hf."),
    click.option("--temperature", default=0.0, show_default=True, help="Sampling temperature; 0 is greedy."),
    click.option("--disable-detokenize", is_flag=True, help="Leave detokenization out of the measurement."),
    click.option("--output-json", default=None, metavar="FILE", help="Write all measurements to a JSON file, repeats "
                                                                     "included."),
]


def _run_options(command: Any) -> Any:
    for option in reversed(_RUN_OPTIONS):
        command = option(command)
    return command


@bench.command()
@_run_options
@workload_options(of_engine=("seed", "tokenizer"), num_prompts=64, random_input_len=256, random_output_len=64)
@engine_sweep_options()
def throughput(configs: list[EngineConfig], workload: WorkloadOptions, **options: Any) -> None:
    """Measure requests per second if all are sent at once. Comma lists in options make a table with one row per
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
    from spillover.cli.loading import plan_only

    console = make_console()
    planned = plan_only(configs[0])
    check_counts(num_iters=options["num_iters"])
    made = _workload(planned, workload)
    settings = _settings(configs, planned, measure_limits(planned, console), options)
    results = []
    for setting in settings:
        results.append(measure(setting, made, options["num_iters"], progress=sys.stderr.isatty(),
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
@click.option("--profile", default=None, is_flag=False, flag_value="", metavar="[DIR]",
              help="Profile one more iteration and print where the time of a step goes, part by part, with its limit. "
                   "With DIR: write a trace for Perfetto there too.")
@engine_options(defaults={"enable_prefix_caching": False})
def latency(config: EngineConfig, batch_size: tuple[int, ...], input_len: int, output_len: int, num_iters_warmup: int,
            num_iters: int, temperature: float, disable_detokenize: bool, output_json: str | None,
            profile: str | None) -> None:
    """Measure the latency of one batch: prefill (to the first token) and decode separately, each with its limit.

    \b
    Example:
      spill bench latency --batch-size 1,16 --input-len 256 --output-len 64
    """
    from spillover.bench import report
    from spillover.bench.latency import measure
    from spillover.cli.bench.targets import EngineTarget
    from spillover.cli.loading import open_llm, plan_only

    console = make_console()
    check_counts(num_iters=num_iters, input_len=input_len, output_len=output_len, batch_size=min(batch_size))
    planned = plan_only(config)
    limits, vocabulary = measure_limits(planned, console), make_vocabulary(planned)
    results, profiles = [], []
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

                profiles.append({"profile": profile_batch(llm.engine, target, planned, limits, vocabulary, size,
                                                          input_len, output_len, profile or None, console)})
    console.print(report.latency_table(results))
    if planned.plan.placement is not None:
        from spillover.cli.plan.plan_weights import print_predicted

        print_predicted(console, planned.plan.placement, results)
    measured = [result.as_dict() for result in results]
    if profiles:
        measured = [{**result, **found} for result, found in zip(measured, profiles, strict=True)]
    write_results(output_json, config, measured)


def _workload(planned: PlannedModel, options: WorkloadOptions) -> ServeWorkload:
    from spillover.bench.serving.served_model import ServedModel
    from spillover.bench.workloads.make_workload import make_workload
    from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
    from spillover.cli.bench.workload_options import LocalTokenizer

    # Random tokens need no tokenizer, and a model may come without one.
    tokenizer = LocalTokenizer(str(planned.config.tokenizer or planned.path)) if options.dataset in FILES else None
    made = make_workload(options, ServedModel(str(planned.path), planned.plan.max_model_len, tokenizer))
    if any(shape.session is not None or shape.at is not None for shape in made.shapes):
        raise SpilloverError(f"--dataset-name {options.dataset} has requests that wait for answers or for their time, "
                             "but here all are sent at once; it is for spill bench serve")
    if isinstance(made, SyntheticWorkload):
        made = dataclasses.replace(made, vocabulary=make_vocabulary(planned))
    return made


def _settings(configs: list[EngineConfig], planned: PlannedModel, limits: Limits,
              options: dict[str, Any]) -> list[Setting]:
    """Return all settings, by backend first: the engine's options do not apply to transformers."""
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
