"""The demo's last part: two memory configurations compared by the lab, each on its own server, with a report."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from spillover.engine.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

NEEDS = ("yaml", "pyarrow", "matplotlib")


def show_comparison(console: Console, config: EngineConfig) -> None:
    """Run `spill lab run demo` with the given model; print a note if the lab is not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"left out: the lab needs {', '.join(missing)}; pip install 'spillover\\[lab]'", highlight=False)
        return
    from spillover.cli.lab.lab import results_folder
    from spillover.cli.lab.lab_run import run_in_terminal
    from spillover.lab.experiment import load_experiment
    from spillover.lab.report import write_report

    experiment = load_experiment("demo", model=config.model)
    folder = results_folder(experiment, fresh=True)
    run_in_terminal(console, experiment, folder, monitors=True)
    with console.status("writing the report"):
        written = write_report(folder)
    console.print(f"report: [bold]{written.html}[/]", highlight=False)
