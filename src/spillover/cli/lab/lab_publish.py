"""`spill lab badge` and `spill lab publish`: what a report is quoted by."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--arm", default=None, metavar="NAME", help="The arm whose verdict is shown. [default: all]")
@click.option("--workload", default=None, metavar="NAME", help="The workload whose verdict is shown. [default: all]")
@click.option("--label", default=None, metavar="TEXT", help="Text on the left. [default: the experiment's name]")
@click.option("--out", default=None, type=click.Path(path_type=Path), metavar="FILE",
              help="File to write. [default: badge.svg in FOLDER]")
def badge(folder: Path, arm: str | None, workload: str | None, label: str | None, out: Path | None) -> None:
    """Draw the verdict of FOLDER, results of an experiment, as an SVG of one line for a README.

    One verdict is told with its interval; several in numbers ("3 faster, 1 no verdict").

    \b
    Example:
      spill lab badge lab-results/demo --arm host --workload chats
    """
    from spillover.lab.report.badge import badge as drawn
    from spillover.lab.report.data import read_report

    written = out or folder / "badge.svg"
    written.write_text(drawn(read_report(folder), arm, workload, label), encoding="utf-8")
    click.echo(f"badge: {written}")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", default=Path("lab-site"), type=click.Path(path_type=Path), show_default=True, metavar="SITE",
              help="Folder of the site; made, or written again.")
def publish(folder: Path, out: Path) -> None:
    """Make a static site of all results in DIR, with an index that can be searched.

    The site needs no server and no network. Publishing again brings it up to date.

    \b
    Example:
      spill lab publish lab-results --out site
    """
    from rich.console import Console

    with Console(stderr=True).status("writing the site"):
        from spillover.lab.report.site import publish as write_site

        site = write_site(folder, out)
    for each in site.left_out:
        click.echo(f"left out: {each}", err=True)
    click.echo(f"site of {len(site.reports)} reports: {site.index}")
