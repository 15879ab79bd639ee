"""Runs a command as on a first day: in a pseudo-terminal, with an empty home folder, and times all of its output.

    python benchmarks/first_run.py                              # spill generate, then spill demo
    python benchmarks/first_run.py --limit 2 -- chat --help

Prints the output with the seconds at which it appeared, and the longest time without any; exits with 1 if that is
longer than the limit or if a temporary folder is left behind. `--record FILE` writes the same as Markdown.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

WAIT_SECONDS = 1800.0
FRAME_SECONDS = 5.0  # minimum seconds between two recorded frames of a progress bar
GENERATE = ("generate", "The capital of France is", "--max-tokens", "16")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][A-Z0-9]?")
_MOVING = re.compile(r"[━╸╺ ]{2,}|[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]")


@dataclass
class Run:
    command: str
    seconds: float = 0.0
    status: int = 0
    gap: float = 0.0  # longest time without output, in seconds
    gap_at: float = 0.0
    before_gap: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)


def run(arguments: tuple[str, ...], home: Path) -> Run:
    """Run a command in `home`; return its output with times, and the temporary files that it left outside its cache."""
    temporary = home / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HOME": str(home), "SPILLOVER_CACHE": str(home / ".cache" / "spillover"),
                                "TERM": "xterm", "TMPDIR": str(temporary), "COLUMNS": "110", "LINES": "40"}
    for name in ("CI", "NO_COLOR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    spill = Path(sys.executable).with_name("spill")
    master, slave = pty.openpty()
    done = Run("spill " + " ".join(f'"{each}"' if " " in each else each for each in arguments))
    start = last = time.monotonic()
    process = subprocess.Popen([str(spill), *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment,
                               cwd=home, start_new_session=True)
    os.close(slave)
    text = ""
    try:
        while time.monotonic() - start < WAIT_SECONDS:
            if not select.select([master], [], [], 0.05)[0]:
                continue
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                chunk = b""
            now = time.monotonic()
            if now - last > done.gap:
                done.gap, done.gap_at = now - last, last - start
                done.before_gap = done.lines[-1][1] if done.lines else "the start"
            last = now
            if not chunk:
                break
            text += chunk.decode(errors="replace")
            *whole, text = re.split(r"[\r\n]+", _ESCAPE.sub("", text))
            for line in [*whole, *([text] if len(text) > 20 else [])]:
                _add(done, now - start, line)
        done.status = process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
    done.seconds = time.monotonic() - start
    folders = [path for path in home.rglob("tmp*") if path.is_dir() and path != temporary]
    done.left_behind = sorted({str(path.relative_to(home)) for path in (*temporary.iterdir(), *folders)})
    return done


def _add(done: Run, seconds: float, line: str) -> None:
    """Record a line; of a moving progress bar, record only one frame every few seconds."""
    line = line.rstrip()
    if not line.strip():
        return
    kind = _MOVING.split(line)[0].strip()[:30]
    same = bool(done.lines) and _MOVING.split(done.lines[-1][1])[0].strip()[:30] == kind
    if same and _MOVING.search(line) and seconds - done.lines[-1][0] < FRAME_SECONDS:
        return
    if not done.lines or done.lines[-1][1] != line:
        done.lines.append((seconds, line))


def shown(done: Run) -> str:
    lines = [f"$ {done.command}"]
    lines += [f"{seconds:7.1f}  {line}" for seconds, line in done.lines]
    return "\n".join(lines)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
@click.option("--limit", default=2.0, show_default=True, help="Longest time without output, in seconds.")
@click.option("--record", type=click.Path(path_type=Path), default=None, help="Write Markdown to this file.")
@click.option("--keep", is_flag=True, help="Keep the home folder.")
def main(arguments: tuple[str, ...], limit: float, record: Path | None, keep: bool) -> None:
    home = Path(tempfile.mkdtemp(prefix="first-run-"))
    try:
        done = [run(each, home) for each in ([arguments] if arguments else [GENERATE, ("demo",)])]
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    failed = False
    for each in done:
        print(shown(each))
        verdict = (f"{each.command.split()[1]}: {each.seconds:.1f} s, exit {each.status}; longest time without output "
                   f"{each.gap:.2f} s, at {each.gap_at:.1f} s, after: {each.before_gap.strip()[:60]}")
        print(verdict + (f"; left behind: {', '.join(each.left_behind)}" if each.left_behind else ""), file=sys.stderr)
        failed |= each.gap > limit or bool(each.left_behind) or each.status != 0
    if record is not None:
        record.write_text("".join(f"```text\n{shown(each)}\n```\n\n{each.seconds:.0f} s; longest time without output "
                                  f"{each.gap:.1f} s.\n\n" for each in done))
    sys.exit(failed)


if __name__ == "__main__":
    main()
