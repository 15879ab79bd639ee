"""`spill lab compare`: whether a commit is slower than an earlier one, by two results of the same measurement."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from spillover.cli.bench.measuring import make_console


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option("--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), default=0.99,
              show_default=True, help="Confidence with which all verdicts of a family hold together.")
@click.option("--equivalence", type=click.FloatRange(0, 1, max_open=True), default=0.02, show_default=True,
              help="The largest difference that counts as the same, as a share; 0 for none.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def compare(before: Path, after: Path, confidence: float, equivalence: float, as_json: bool) -> None:
    """Compare two results of the same measurement; exit with code 1 if anything became slower.

    BEFORE and AFTER are folders of `spill lab run`, files of its --output-json, or files with raw repeats of `spill
    bench --output-json` and of benchmarks/. Above 1x is faster, for every metric.

    \b
    Example:
      spill lab run w1 --out before                       # at one commit
      spill lab run w1 --out after                        # at another
      spill lab compare before after
    """
    from spillover.lab.compare import compare as compared
    from spillover.lab.compare import read_result
    from spillover.lab.verdict import SLOWER, Rule

    results = read_result(before), read_result(after)
    changes = compared(*results, Rule(confidence, 2, equivalence))
    slower = [change for change in changes if change.verdict == SLOWER]
    if as_json:
        import json

        click.echo(json.dumps([change.to_json() for change in changes], indent=1))
        sys.exit(1 if slower else 0)
    import statistics
    from collections import Counter

    from rich.markup import escape

    from spillover.bench.table import make_table
    from spillover.cli.lab.lab_run import COLOURS

    console = make_console()
    for word, result in zip(("before", "after"), results, strict=True):
        console.print(f"{word}: {result.text}", highlight=False)
    table = make_table("", "what", "before", "after", "speed", "interval", "verdict", text=("what", "verdict"))
    for change in changes:
        colour = COLOURS.get(change.verdict)
        word = escape(change.word)
        table.add_row(escape(change.name), *(f"{statistics.median(side.values):,.4g} ({len(side.values)})"
                                             for side in (change.before, change.after)),
                      "" if change.speed is None else f"{change.speed:.3f}x",
                      "" if change.low is None else f"{change.low:.3f} .. {change.high:.3f}",
                      word if colour is None else f"[{colour}]{word}[/]")
    console.print(table)
    counts = Counter(change.verdict for change in changes)
    console.print(f"{', '.join(f'{count} {word}' for word, count in counts.items())}. Medians, with how many values. "
                  "The two were not measured in turns: what is slower is to be run again.", highlight=False)
    sys.exit(1 if slower else 0)
