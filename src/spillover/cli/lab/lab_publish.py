"""`spill lab badge` and `spill lab publish`: badges and static sites for quoting results."""

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
    """Draw the verdict of FOLDER, results of an experiment, as a one-line SVG for a README.

    A single verdict is shown with its interval; several are counted ("3 faster, 1 no verdict").

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
              help="Folder of the site; created or updated.")
def publish(folder: Path, out: Path) -> None:
    """Make a static site of all results in DIR, with a searchable index.

    The site needs no server and no network. Publishing again updates it.

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
