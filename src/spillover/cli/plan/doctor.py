"""`spill doctor`: the hardware and its speed on one screen, and commands that fix the problems found."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillover.cli.loading import timed_rates
from spillover.kernels import native
from spillover.plan.hardware import Machine, probe
from spillover.plan.rates import Rates
from spillover.progress import COMPARING, COMPILING, stages
from spillover.units import format_bytes, format_rate

LOW_MEMLOCK = 1 << 30
LOW_MEMORY = 2 << 30
LOW_DISK = 5 << 30


def run_doctor(console: Console, as_json: bool, disk: Path | None = None) -> None:
    machine = probe()
    devices = ["cpu", "cuda"] if machine.cuda else ["cpu"]
    rates = [timed_rates(device, disk if device == "cpu" else None) for device in devices]
    with stages() as show:
        native.on_build(lambda done, total: show(COMPILING, done, total))
        has_kernels = native.library() is not None
    kernels = native.describe()
    found = warnings(machine, has_kernels, has_nvidia_driver())
    if as_json:
        console.print_json(data={
            "spillover": version("spillover"),
            "machine": asdict(machine),
            "rates": [asdict(rate) for rate in rates],
            "native_kernels": kernels,
            "warnings": found,
        })
        return
    console.print(_machine_table(machine, kernels))
    console.print(_rates_table(rates))
    for sentence in found:
        console.print(f"[yellow]![/yellow] {escape(sentence)}")
    if not found:
        console.print("[green]No problems found.[/green]")


def run_bits(console: Console, as_json: bool) -> None:
    """Check that no kernel's bits depend on the number of rows, on every device; exit with 1 if any do."""
    from spillover.kernels.bits import check_bits

    devices = ["cpu", "cuda"] if probe().cuda else ["cpu"]
    with stages() as show:
        found = {device: check_bits(device, lambda done, total: show(COMPARING, done, total)) for device in devices}
    if as_json:
        console.print_json(data={device: [asdict(check) for check in checks] for device, checks in found.items()})
    for device, checks in () if as_json else found.items():
        table = Table("kernel", "rows", "bits", title="CPU" if device == "cpu" else "GPU", title_justify="left")
        for check in checks:
            table.add_row(check.kernel, f"{check.rows[0]} to {check.rows[-1]}", "[green]the same[/green]"
                          if check.differs is None else f"[red]differ, first with {check.differs} rows[/red]")
        console.print(table)
    if any(check.differs is not None for checks in found.values() for check in checks):
        if not as_json:
            console.print("On this machine a request's tokens may depend on the other requests in its batch. Please "
                          "report this table, with the output of `spill doctor`.")
        raise SystemExit(1)


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def warnings(machine: Machine, has_kernels: bool, has_driver: bool) -> list[str]:
    """Return one sentence per finding: its effect, and the command that fixes it."""
    found = []
    if not has_kernels:
        found.append(
            "The native CPU kernels are off, so float32 on the CPU runs on plain torch, several times slower. If there "
            "is no C++ compiler, install one (`apt install g++` or `dnf install gcc-c++`); if SPILLOVER_NATIVE=0 is "
            "set, `unset SPILLOVER_NATIVE`."
        )
    if has_driver and not machine.cuda:
        found.append(
            f"There is an NVIDIA driver but torch {machine.torch_version} sees no GPU. If that is a CPU build, type "
            "`pip uninstall torch && pip install torch`; else see what `nvidia-smi` says."
        )
    if machine.pinnable is not None and machine.pinnable < LOW_MEMLOCK:
        found.append(
            f"Only {format_bytes(machine.pinnable)} of memory may be pinned, too little for a pinned host tier. Type "
            "`ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`."
        )
    if machine.torch_threads != machine.cores:
        found.append(
            f"torch computes with {machine.torch_threads} threads but {machine.cores} cores are usable. Type "
            f"`export OMP_NUM_THREADS={machine.cores}`."
        )
    if machine.memory_limit is not None:
        found.append(
            f"The container may use {format_bytes(machine.memory_limit)} of {format_bytes(machine.memory_total)} of "
            "RAM, and plans keep to that. Start it with a larger `--memory` for more."
        )
    if machine.memory_available < LOW_MEMORY:
        found.append(
            f"Only {format_bytes(machine.memory_available)} of RAM are available. Close other programs, or give a "
            "small budget with `--gpu-memory`."
        )
    if machine.cache_free < LOW_DISK:
        found.append(
            f"Only {format_bytes(machine.cache_free)} are free under {machine.cache_folder}, where models are kept. "
            "Choose another disk: `export SPILLOVER_CACHE=/path/with/space`."
        )
    return found


def _machine_table(machine: Machine, kernels: str) -> Table:
    table = Table(title="This machine", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    quota = "" if machine.cpu_quota is None else f", cgroup quota {machine.cpu_quota:g}"
    table.add_row("CPU", f"{machine.cpu}, {machine.cores} cores usable{quota}")
    table.add_row("Last-level cache",
                  format_bytes(machine.last_level_cache) if machine.last_level_cache else "not known")
    table.add_row(
        "RAM", f"{format_bytes(machine.memory_total)}, {format_bytes(machine.memory_available)} available"
    )
    table.add_row("Cgroup limit", _limit(machine.memory_limit))
    table.add_row("Lockable memory", _limit(machine.memlock))
    for device in machine.cuda:
        major, minor = device.capability
        table.add_row(
            f"GPU {device.index}",
            f"{device.name}, {format_bytes(device.total)}, {format_bytes(device.free)} free, sm_{major}{minor}",
        )
    if not machine.cuda:
        table.add_row("GPU", "none that torch can use: the device tier is this machine's RAM")
    table.add_row("Cache folder", f"{machine.cache_folder}, {format_bytes(machine.cache_free)} free")
    table.add_row("Kernels", kernels)
    table.add_row(
        "Versions",
        f"spillover {version('spillover')}, Python {machine.python_version}, torch {machine.torch_version} with "
        f"{machine.torch_threads} threads",
    )
    return table


def _rates_table(rates: list[Rates]) -> Table:
    table = Table(title="Measured now", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    names = {
        "memory_read": ("memory read", "B/s"),
        "float32": ("float32 matrix product", "FLOP/s"),
        "bfloat16": ("bfloat16 matrix product", "FLOP/s"),
        "device_copy": ("copy within the device, read + write", "B/s"),
        "host_to_device": ("host to device, pinned", "B/s"),
        "device_to_host": ("device to host, pinned", "B/s"),
        "kernel_read": ("reads of pinned host memory by a kernel", "B/s"),
        "host_read": ("host memory read by the cores", "B/s"),
        "disk_write": ("disk write", "B/s"),
        "disk_read": ("disk read", "B/s"),
    }
    for rate in rates:
        for field, (name, unit) in names.items():
            value = getattr(rate, field)
            if value is not None:
                table.add_row(f"{'CPU' if rate.device == 'cpu' else 'GPU'} {name}", format_rate(value, unit))
    return table


def _limit(count: int | None) -> str:
    return "none" if count is None else format_bytes(count)
