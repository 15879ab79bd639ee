"""`spill bench restart`: the same prompts cold, warm, and after closing or killing the engine, by block size."""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import click

from spillover.cli.bench.bench_tiers import fresh_disk
from spillover.cli.bench.measuring import check_counts, make_console, make_vocabulary, write_results
from spillover.cli.options import engine_sweep_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.bench.restart import Stage
    from spillover.bench.target import BenchRequest
    from spillover.bench.workloads.workloads import Vocabulary
    from spillover.cli.bench.targets import EngineTarget

BLOCK_SIZES = (64, 128, 256, 512, 1024)
SPARE_BLOCKS = 4
WARMUP_TOKENS = 256  # at most, and less than a block, so that no block of the warm-up is stored
LIFE_SECONDS = 600.0  # timeout in seconds of the engine that is killed


@click.command()
@click.option("--num-prompts", default=4, show_default=True, help="Number of requests, sent one after the other.")
@click.option("--prefix-len", default=256, show_default=True, help="Length of the prefix that all prompts share.")
@click.option("--input-len", default=1024, show_default=True, help="Prompt tokens after the shared prefix.")
@click.option("--output-len", default=8, show_default=True, help="Output tokens per request.")
@click.option("--kill", is_flag=True, help="Run the first engine in a process of its own, which stores blocks eagerly "
                                           "and is killed by SIGKILL; otherwise it is closed, and stores them then.")
@click.option("--output-json", default=None, metavar="FILE", help="Write all measurements to a JSON file, each "
                                                                  "request included.")
@engine_sweep_options(defaults={"block_size": BLOCK_SIZES, "disk": (f"{tempfile.gettempdir()}:4GB",)})
def restart(configs: list[EngineConfig], num_prompts: int, prefix_len: int, input_len: int, output_len: int,
            kill: bool, output_json: str | None) -> None:
    """Measure the same prompts cold, warm, and after a restart on the same disk; one row per block size.

    A block is the unit of storage and lookup. All stages must produce the same greedy tokens (exit code 1 if not).
    --disk PATH:SIZE chooses the disk, where a temporary folder is used; the default is the disk of temporary files.

    \b
    Examples:
      spill bench restart
      spill bench restart --kill --block-size 16,256
    """
    from spillover.bench.restart import STAGES, RestartResult, folder_bytes
    from spillover.bench.throughput import offline
    from spillover.bench.tiers import Agreement
    from spillover.bench.tiers_report import agreement_line, restart_table
    from spillover.bench.workloads.workloads_synthetic import random_workload
    from spillover.cli.loading import plan_only
    from spillover.memory.budgets import parse_disk

    check_counts(prefix_len=prefix_len, input_len=input_len, output_len=output_len)
    console = make_console()
    vocabulary = make_vocabulary(plan_only(configs[0]))
    requests = offline(random_workload(vocabulary, num_prompts, input_len, output_len, prefix_len=prefix_len,
                                       seed=configs[0].seed), 0)
    agreement, results = Agreement(), []
    for config in configs:
        with ExitStack() as stack, console.status(f"block size {config.block_size}"):
            disk = fresh_disk(config, stack)
            config = _sized(dataclasses.replace(config, disk=(disk,)), requests, kill)
            stages = (_killed if kill else _closed)(config, vocabulary, requests)
            with _Life(config, vocabulary) as life:
                stages.append(life.stage(STAGES[2], requests, opened=True))
                blocks = sum(tier.blocks for tier in life.target.tiers() if tier.name == "disk")
            results.append(RestartResult(config.block_size, tuple(stages), blocks,
                                         folder_bytes(parse_disk(disk).path)))
        for stage in stages:
            for index, tokens in enumerate(stage.outputs):
                agreement.compare(f"prompt {index}", f"{stage.name} at block size {config.block_size}", tokens)
    console.print(restart_table(results, f"{num_prompts} prompts of {prefix_len} shared and {input_len} own tokens, "
                                         f"{output_len} out; first engine {'killed' if kill else 'closed'}"))
    console.print(agreement_line(agreement), style="bold red" if agreement.different else "bold", highlight=False)
    write_results(output_json, configs[0], [result.as_dict() for result in results],
                  {"same_tokens": agreement.as_dict(), "killed": kill})
    if agreement.different:
        raise SystemExit(1)


class _Life:
    """An engine from opening to closing, used as a context manager."""

    def __init__(self, config: EngineConfig, vocabulary: Vocabulary) -> None:
        import numpy as np

        from spillover.bench.target import BenchRequest
        from spillover.cli.bench.targets import EngineTarget
        from spillover.cli.loading import open_llm

        start = time.perf_counter()
        self.target: EngineTarget = EngineTarget(open_llm(config), detokenize=False)
        self.ready = time.perf_counter() - start
        length = min(WARMUP_TOKENS, config.block_size - 4)
        self.target.generate([BenchRequest(vocabulary.draw(np.random.default_rng([config.seed, 0]), length), 2)])

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *_error: object) -> None:
        self.target.close()

    def stage(self, name: str, requests: list[BenchRequest], opened: bool = False) -> Stage:
        from spillover.bench.restart import run_stage

        return run_stage(name, self.target, requests, self.ready if opened else None)

    def first_stages(self, requests: list[BenchRequest]) -> list[Stage]:
        from spillover.bench.restart import STAGES

        return [self.stage(STAGES[0], requests, opened=True), self.stage(STAGES[1], requests)]


def _closed(config: EngineConfig, vocabulary: Vocabulary, requests: list[BenchRequest]) -> list[Stage]:
    with _Life(config, vocabulary) as life:
        return life.first_stages(requests)


def _killed(config: EngineConfig, vocabulary: Vocabulary, requests: list[BenchRequest]) -> list[Stage]:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    process = context.Process(target=_live_until_killed, args=(child_end, config, vocabulary, requests), daemon=True)
    process.start()
    child_end.close()
    try:
        if not parent_end.poll(LIFE_SECONDS):
            raise SpilloverError(f"the first engine took more than {LIFE_SECONDS:.0f} s; ask for fewer or shorter "
                                 "prompts")
        stages: list[Stage] = parent_end.recv()
    except EOFError:
        raise SpilloverError("the first engine exited unexpectedly; its error is printed above") from None
    finally:
        process.kill()
        process.join()
        parent_end.close()
    return stages


def _live_until_killed(connection: Connection, config: EngineConfig, vocabulary: Vocabulary,
                       requests: list[BenchRequest]) -> None:
    life = _Life(config, vocabulary)
    connection.send(life.first_stages(requests))
    time.sleep(LIFE_SECONDS)


def _sized(config: EngineConfig, requests: list[BenchRequest], kill: bool) -> EngineConfig:
    """Return flags with a device pool for all prompts, unless one is given: the warm stage must hit the device."""
    from spillover.cli.loading import plan_only

    config = dataclasses.replace(config, skip_tokenizer_init=True, spill="eager" if kill else config.spill)
    if config.num_gpu_blocks_override is not None or config.gpu_memory is not None:
        return config
    tokens = max(request.num_tokens for request in requests)
    groups = len(plan_only(config).plan.windows)
    blocks = groups * len(requests) * -(-tokens // config.block_size) + SPARE_BLOCKS
    return dataclasses.replace(config, num_gpu_blocks_override=blocks, max_model_len=config.max_model_len or tokens)
