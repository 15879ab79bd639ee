"""Does the lab cry wolf? Experiments whose two arms are the same server, and how many of them find a difference.

    python benchmarks/lab_aa.py --experiments 20
    python benchmarks/lab_aa.py --experiments 20 --load-format auto     # the default model instead of an empty engine

The whole way over HTTP, with this machine's own unrest. At 99% confidence, 19 of 20 and more must end in "no difference
shown". With `--servers 2` the arms are two processes alike that stay up, and what is found may be true: one process can
lie better in memory than its twin for as long as it lives. Experiments that restart servers every turn average that.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from spillover.lab.engines import EngineSpec, make_engine
from spillover.lab.experiment import BLOCKS, parse_experiment
from spillover.lab.run import run_experiment
from spillover.lab.verdict import NO_DIFFERENCE, NO_VERDICT

LOAD = {"dataset-name": "random", "num-prompts": 24, "random-input-len": 64, "random-output-len": 16,
        "max-concurrency": 4}


@click.command()
@click.option("--experiments", default=20, show_default=True)
@click.option("--repeats", default=BLOCKS, show_default=True, help="Blocks of each.")
@click.option("--servers", type=click.IntRange(1, 2), default=1, show_default=True)
@click.option("--load-format", default="null", show_default=True, help="Of both servers; null computes nothing.")
def main(experiments: int, repeats: int, servers: int, load_format: str) -> None:
    quiet = judged = 0
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        # Arms that share a server share its prefix cache, and prompts: it is turned off.
        spec = EngineSpec("spillover", args={"load-format": load_format, "max-model-len": 512,
                                             "enable-prefix-caching": False})
        urls = [stack.enter_context(make_engine(spec)).running.url for _ in range(servers)]
        for number in range(experiments):
            document: dict[str, Any] = {
                "name": f"aa-{number}", "repeats": repeats, "restart": "never",
                "arms": {"a": {"engine": "url", "url": urls[0]}, "b": {"engine": "url", "url": urls[-1]}},
                "workloads": {"load": {**LOAD, "seed": number}}, "metrics": ["median_ttft_ms", "median_e2el_ms"]}
            verdicts = run_experiment(parse_experiment(document), Path(folder) / str(number)).analysis()["verdicts"]
            judged += all(verdict["verdict"] != NO_VERDICT for verdict in verdicts)
            quiet += all(verdict["verdict"] == NO_DIFFERENCE for verdict in verdicts)
            for verdict in verdicts:
                click.echo(f"{number + 1}: {verdict['text']}")
    click.echo(f"{quiet} of {judged} experiments that could be judged, of {experiments} in all: no difference shown")


if __name__ == "__main__":
    main()
