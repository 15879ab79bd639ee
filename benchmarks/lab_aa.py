"""Does the lab cry wolf, and does it see one? Experiments whose arms are the same server, or one a little slower.

    python benchmarks/lab_aa.py --experiments 20
    python benchmarks/lab_aa.py --experiments 5 --slower 1.05           # two mock servers, one 5% slower
    python benchmarks/lab_aa.py --experiments 20 --load-format auto     # the default model instead of an empty engine

The whole way over HTTP, with this machine's own unrest. At 99% confidence, 19 of 20 and more must end in the same or no
difference shown. With `--servers 2` the arms are two processes alike that stay up, and what is found may be true: one
process can lie better in memory than its twin for as long as it lives. Experiments that restart servers every turn
average that.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from spillover.lab.analysis import analysis_of
from spillover.lab.engines import EngineSpec, make_engine
from spillover.lab.experiment import MAX_BLOCKS, parse_experiment
from spillover.lab.run import run_experiment
from spillover.lab.verdict import FASTER, NO_VERDICT, SLOWER
from support.servers.mock_server import MockServer

LOAD = {"dataset-name": "random", "num-prompts": 24, "random-input-len": 64, "random-output-len": 16,
        "max-concurrency": 4}


@click.command()
@click.option("--experiments", default=20, show_default=True)
@click.option("--max-blocks", default=MAX_BLOCKS, show_default=True, help="Of each.")
@click.option("--servers", type=click.IntRange(1, 2), default=1, show_default=True)
@click.option("--load-format", default="null", show_default=True, help="Of both servers; null computes nothing.")
@click.option("--slower", default=None, type=float, help="Mock servers instead, whose requests differ by 2.5%, and the "
                                                         "second this many times slower.")
def main(experiments: int, max_blocks: int, servers: int, load_format: str, slower: float | None) -> None:
    quiet = judged = 0
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if slower is not None:
            urls = [stack.enter_context(MockServer(ttft=0.05, itl=0.01, noise=0.025, speed=speed)).url
                    for speed in (1.0, slower)]
        else:
            urls = _servers(stack, servers, load_format)
        for number in range(experiments):
            document: dict[str, Any] = {
                "name": f"aa-{number}", "max-blocks": max_blocks, "restart": "never",
                "arms": {"a": {"engine": "url", "url": urls[0]}, "b": {"engine": "url", "url": urls[-1]}},
                "workloads": {"load": {**LOAD, "seed": number}}, "metrics": ["median_ttft_ms", "median_e2el_ms"]}
            verdicts = analysis_of(run_experiment(parse_experiment(document), Path(folder) / str(number)))["verdicts"]
            judged += all(verdict["verdict"] != NO_VERDICT for verdict in verdicts)
            quiet += all(verdict["verdict"] not in (FASTER, SLOWER, NO_VERDICT) for verdict in verdicts)
            for verdict in verdicts:
                click.echo(f"{number + 1}: {verdict['text']}")
    click.echo(f"{quiet} of {judged} experiments that could be judged, of {experiments} in all: the same, or no "
               "difference shown")


def _servers(stack: ExitStack, count: int, load_format: str) -> list[str]:
    # Arms that share a server share its prefix cache, and prompts: it is turned off.
    spec = EngineSpec("spillover", args={"load-format": load_format, "max-model-len": 512,
                                         "enable-prefix-caching": False})
    return [stack.enter_context(make_engine(spec)).running.url for _ in range(count)]


if __name__ == "__main__":
    main()
