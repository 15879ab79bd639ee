"""`spill bench tiers`: KV tiers off, host, host and disk, host and a remote store, compared in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.bench.measuring import check_counts, make_console, make_vocabulary, measure_limits, write_results
from spillover.cli.options import comma_list, engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from spillover.bench.target import GeneratesWithTiers
    from spillover.bench.tiers import Agreement, Arm
    from spillover.bench.workloads.workloads import Conversations
    from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
    from spillover.cli.bench.targets import RooflineLimits
    from spillover.engine.planned import PlannedModel

ARMS = ("off", "host", "host+disk", "host+remote")
WORKLOADS = ("no-reuse", "multi-turn")
ROOM = 1.25  # device pool in no-reuse: ratio to the KV of all concurrent requests
SPARE_BLOCKS = 4  # added to the computed size of a device pool
DISK_SPARE = 512 << 20
SALT = "spill-bench-"


def _share(_ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Parse a share: '10%' or '0.1'."""
    text = value.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise SpilloverError(f"{param.opts[0]} takes a share such as 10% or 0.1; got '{value}'")
    return share


def size_later(flags: dict[str, Any], given: dict[str, Any]) -> None:
    """Set a provisional size for tiers that were not given, until the workload determines them, so that flags which
    need a tier are not refused."""
    given["host_given"] = flags["host_memory"] is not None or flags["kv_offloading_size"] is not None
    for name in ("num_gpu_blocks_override", "gpu_memory"):
        if flags[name] is not None:
            raise SpilloverError(f"--{name.replace('_', '-')} is set by the workload here (see --pool-share): leave it "
                                 "out")
    if not given["host_given"]:
        flags["host_memory"] = "1GB"


@click.command()
@click.option("--arms", default=",".join(ARMS), show_default=True, callback=comma_list(click.Choice(ARMS)),
              metavar=f"[{'|'.join(ARMS)}],...", help="Configurations to compare; the first is the baseline.")
@click.option("--workload", default=",".join(WORKLOADS), show_default=True,
              callback=comma_list(click.Choice(WORKLOADS)), metavar=f"[{'|'.join(WORKLOADS)}],...",
              help="Prompts that are never repeated, continuing chats, or both.")
@click.option("--num-prompts", default=4, show_default=True, help="no-reuse: number of requests, all sent at once.")
@click.option("--input-len", default=256, show_default=True, help="no-reuse: prompt tokens.")
@click.option("--output-len", default=64, show_default=True, help="no-reuse: output tokens.")
@click.option("--repeats", default=4, show_default=True,
              help="no-reuse: repeats of each arm, in alternating order; two make one pair for the confidence "
                   "interval.")
@click.option("--conversations", default=12, show_default=True, help="multi-turn: number of chats.")
@click.option("--rounds", default=8, show_default=True, help="multi-turn: questions per chat.")
@click.option("--prefix-len", default=1024, show_default=True, help="multi-turn: tokens at the beginning of each chat.")
@click.option("--question-len", default=16, show_default=True, help="multi-turn: tokens of a question.")
@click.option("--answer-len", default=4, show_default=True, help="multi-turn: tokens of an answer.")
@click.option("--pool-share", default="10%", show_default=True, callback=_share, metavar="SHARE",
              help="multi-turn: fraction of all chats' KV that the device holds.")
@click.option("--host-share", default="30%", show_default=True, callback=_share, metavar="SHARE",
              help="multi-turn: fraction of all chats' KV that host memory holds if there is a tier below it.")
@click.option("--off-rounds", default=2, show_default=True,
              help="multi-turn: rounds of the baseline, which computes every prompt again.")
@click.option("--output-json", default=None, metavar="FILE", help="Write all measurements to a JSON file, repeats "
                                                                  "included.")
@engine_options(complete=size_later)
def tiers(config: EngineConfig, arms: tuple[str, ...], workload: tuple[str, ...], output_json: str | None,
          **options: Any) -> None:
    """Compare KV tiers: their cost where nothing is reused, and their gain where everything is.

    The configurations take turns in one run, all on the same prompts, and must produce the same greedy tokens (exit
    code 1 if not). Tiers are sized from the workload unless --host-memory, --disk or --remote are given; a Valkey or
    Redis server is started for the run if one is installed.

    \b
    Examples:
      spill bench tiers
      spill bench tiers --workload no-reuse --arms off,host --output-len 128 --repeats 40
      spill bench tiers --workload multi-turn --conversations 16 --disk /nvme:20GB
    """
    from spillover.bench.tiers import Agreement
    from spillover.bench.tiers_report import agreement_line
    from spillover.bench.workloads.workloads import Conversations
    from spillover.bench.workloads.workloads_synthetic import random_workload
    from spillover.cli.loading import plan_only

    check_counts(**{name: options[name] for name in ("repeats", "off_rounds", "input_len", "output_len")})
    console = make_console()
    planned = plan_only(bare(config))
    vocabulary = make_vocabulary(planned)
    random = random_workload(vocabulary, options["num_prompts"], options["input_len"], options["output_len"],
                             seed=config.seed)
    chats = Conversations(vocabulary, options["conversations"], options["rounds"], options["prefix_len"],
                          options["question_len"], options["answer_len"], config.seed)
    limits = measure_limits(planned, console)
    agreement = Agreement()
    results: list[dict[str, Any]] = []
    setup = Setup(dataclasses.replace(config, skip_tokenizer_init=True), arms, limits, options["host_given"])
    sizes = None
    if "multi-turn" in workload:  # its sizes are checked before anything is run
        sizes = _Sizes.of(setup, chats, options["pool_share"], options["host_share"])
    if "no-reuse" in workload:
        results += _no_reuse(console, setup, random, agreement, options["repeats"])
    if sizes is not None:
        results += _multi_turn(console, setup, chats, sizes, agreement, options["off_rounds"])
    console.print(agreement_line(agreement), style="bold red" if agreement.different else "bold", highlight=False)
    write_results(output_json, config, results, {"same_tokens": agreement.as_dict()})
    if agreement.different:
        raise SystemExit(1)


class Setup:
    """A factory for the arms of a comparison: engines that differ only in their KV tiers."""

    def __init__(self, config: EngineConfig, names: Sequence[str], limits: RooflineLimits, host_given: bool) -> None:
        import secrets

        self._config = config
        self._names = names
        self._limits = limits
        self._host_given = host_given
        self._salt = SALT + secrets.token_hex(8)  # a store that others use may contain the same prompts of another run
        self._links: dict[str, tuple[float, float]] = {}

    def plan(self, tokens: int) -> PlannedModel:
        """Plan for sequences of `tokens` tokens."""
        from spillover.cli.loading import plan_only

        config = bare(self._config)
        blocks = -(-tokens // config.block_size)
        groups = len(plan_only(config).plan.windows)
        return plan_only(dataclasses.replace(self._config, host_pool=None, disk=(), remote=None, max_model_len=tokens,
                                             num_gpu_blocks_override=blocks * groups + SPARE_BLOCKS))

    def arms(self, pool_blocks: int, tokens: int, host_blocks: int, host_blocks_above: int, stored_blocks: int,
             stack: ExitStack) -> tuple[list[Arm], bool]:
        """Return the arms, and whether memory holds all at once. `host_blocks`: size of a host tier alone;
        `host_blocks_above`: of one with a tier below it; `stored_blocks`: maximum number of blocks written to a lower
        tier. Processes and files made for the arms are removed when `stack` is closed."""
        from spillover.bench.tiers import Arm
        from spillover.cli.loading import plan_only
        from spillover.plan.hardware import probe
        from spillover.plan.tiers import slot_stride

        stride = slot_stride(self.plan(tokens).plan.slot_bytes)
        base = dataclasses.replace(self._config, num_gpu_blocks_override=pool_blocks, max_model_len=tokens,
                                   host_pool=None, disk=(), remote=None)
        arms: list[Arm] = []
        needed = 0
        for name in self._names:
            host = self._host_memory((host_blocks if name == "host" else host_blocks_above) * stride)
            config = dataclasses.replace(base, host_memory=host)
            if name == "off":
                config = bare(base)
            elif name == "host+disk":
                disk = fresh_disk(self._config, stack, stored_blocks * stride + DISK_SPARE)
                config = dataclasses.replace(config, disk=(disk,))
            elif name == "host+remote":
                remote = self._server(stored_blocks * stride, stride, stack)
                if remote is None:
                    arms.append(Arm(name, None, "no server: install valkey-server or redis-server, or give --remote"))
                    continue
                config = dataclasses.replace(config, remote=remote)
            plan = plan_only(config).plan
            needed += plan.total_bytes - plan.base_bytes
            arms.append(Arm(name, self._maker(config), config.host_memory or ""))
        if arms[0].make is None:
            raise SpilloverError(f"--arms begins with {arms[0].name}, the baseline, which cannot run: {arms[0].note}")
        available = plan.available_bytes if plan.device == "cuda" else probe().memory_available
        return arms, needed <= 0.9 * available

    def _maker(self, config: EngineConfig) -> Callable[[], GeneratesWithTiers]:
        from spillover.cli.bench.targets import EngineTarget
        from spillover.cli.loading import open_llm

        return lambda: EngineTarget(open_llm(config), self._limits, detokenize=False, cache_salt=self._salt,
                                    links=self._links)

    def _host_memory(self, size: int) -> str:
        assert self._config.host_memory is not None
        return self._config.host_memory if self._host_given else str(size)

    def _server(self, size: int, block_bytes: int, stack: ExitStack) -> str | None:
        from spillover.cli.bench.redis_server import find_server, measure_remote, run_server

        remote = self._config.remote
        if remote is None:
            binary = find_server()
            if binary is None:
                return None
            remote = stack.enter_context(run_server(binary, size + DISK_SPARE))
        self._links["remote"] = measure_remote(remote, block_bytes)
        return remote


def bare(config: EngineConfig) -> EngineConfig:
    """Return the flags without any tier below the device, and without options that apply only to such tiers."""
    default = EngineConfig()
    return dataclasses.replace(config, host_memory=None, host_pool=None, disk=(), remote=None,
                               spill=default.spill, restore=default.restore, spill_dtype=default.spill_dtype,
                               spill_admission=default.spill_admission)


def fresh_disk(config: EngineConfig, stack: ExitStack, size: int | None = None) -> str:
    """Make a temporary folder for KV, removed when `stack` is closed: in the given --disk folder with its size, or else
    in the folder of temporary files."""
    import tempfile

    from spillover.memory.budgets import parse_disk

    if len(config.disk) > 1:
        raise SpilloverError("spill bench tiers measures one disk at a time: give --disk once")
    given = parse_disk(config.disk[0] if config.disk else f"{tempfile.gettempdir()}:{size}")
    if not given.path.is_dir():
        raise SpilloverError(f"--disk {given.path} is not a folder; make it, or name another")
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spill-bench-", dir=given.path))
    return f"{folder}:{given.capacity_bytes}"


def _no_reuse(console: Console, setup: Setup, workload: SyntheticWorkload, agreement: Agreement,
              repeats: int) -> list[dict[str, Any]]:
    from spillover.bench.tiers import no_reuse
    from spillover.bench.tiers_report import no_reuse_table, traffic_table

    prompts, one = len(workload.shapes), workload.shapes[0]
    tokens = one.prompt_len + one.output_len
    planned = setup.plan(tokens)
    pool = round(ROOM * prompts * _blocks(planned, tokens)) + SPARE_BLOCKS
    written = (repeats + 1) * prompts * _blocks(planned, tokens)
    with ExitStack() as stack:
        arms, together = setup.arms(pool, tokens, 2 * pool, 2 * pool, written, stack)
        status = stack.enter_context(console.status("loading"))
        results = no_reuse(arms, workload, repeats, together, agreement, _turns(status, "no reuse"))
    console.print(no_reuse_table(results, f"No reuse: {prompts} prompts of {one.prompt_len} at once, "
                                          f"{one.output_len} out, {pool:,} device blocks{_how(together)}"))
    console.print(traffic_table({result.arm.name: result.traffic for result in results}))
    return [result.as_dict() for result in results]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Numbers of blocks in a multi-turn run."""

    whole: int  # of all chats at their end
    pool: int  # of the device
    host_alone: int
    host_above: int  # of the host tier if there is a tier below it

    @classmethod
    def of(cls, setup: Setup, workload: Conversations, pool_share: float, host_share: float) -> _Sizes:
        one = _blocks(setup.plan(workload.longest), workload.longest)
        whole = workload.count * one
        pool = round(pool_share * whole)
        if pool < one + SPARE_BLOCKS:
            least = -(-(one + SPARE_BLOCKS) // (pool_share * one))
            raise SpilloverError(f"--pool-share {pool_share:.0%} of {workload.count} conversations is {pool} blocks, "
                                 f"but one conversation needs {one} at its end; raise --conversations to at least "
                                 f"{least:.0f}, or --pool-share")
        return cls(whole, pool, whole + whole // 4, round(host_share * whole))


def _multi_turn(console: Console, setup: Setup, workload: Conversations, sizes: _Sizes, agreement: Agreement,
                off_rounds: int) -> list[dict[str, Any]]:
    from spillover.bench.tiers import multi_turn
    from spillover.bench.tiers_report import multi_turn_table, traffic_table

    with ExitStack() as stack:
        arms, together = setup.arms(sizes.pool, workload.longest, sizes.host_alone, sizes.host_above, 2 * sizes.whole,
                                    stack)
        status = stack.enter_context(console.status("loading"))
        results = multi_turn(arms, workload, off_rounds, together, agreement, _turns(status, "multi-turn"))
    console.print(multi_turn_table(results, f"Multi-turn: {workload.count} chats, {workload.rounds} rounds, "
                                            f"{workload.prefix_len} tokens to begin with, {sizes.pool:,} device blocks "
                                            f"for {sizes.whole:,}{_how(together)}"))
    console.print(traffic_table({result.arm.name: result.traffic for result in results}))
    return [result.as_dict() for result in results]


def _blocks(planned: PlannedModel, tokens: int) -> int:
    """Return the number of blocks of a sequence, over all layer groups."""
    return -(-tokens // planned.plan.block_size) * len(planned.plan.windows)


def _turns(status: Status, what: str) -> Callable[[int, int], None]:
    return lambda done, total: status.update(f"{what}: {done} of {total} turns")


def _how(together: bool) -> str:
    return "" if together else " (one arm open at a time: memory does not hold all)"
