"""report.pdf: the page as printed by a headless Chromium that is already installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from spillover.errors import SpilloverError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge",
            "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
SECONDS = 120.0  # timeout in seconds to start, render and print


def browser() -> str:
    """Return a browser that can print pages; raise with instructions if there is none."""
    found = next((path for path in map(shutil.which, PROGRAMS) if path), None)
    if found is None:
        raise SpilloverError("a report as PDF is printed by Chromium, Chrome or Edge, and none of them is on the PATH; "
                             "on Debian: apt-get install chromium. Or open report.html in any browser, and print it")
    return found


def write_pdf(html: Path, program: str) -> Path:
    """Print a page to a PDF file of the same name next to it. `program`: the result of `browser`."""
    pdf = html.with_suffix(".pdf")
    with tempfile.TemporaryDirectory(prefix="spillover-print-", ignore_cleanup_errors=True) as profile:
        made = Path(profile) / "page.pdf"
        flags = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
                 "--disable-component-update", "--disable-dev-shm-usage", "--no-pdf-header-footer",
                 *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium has no sandbox for root
                 f"--user-data-dir={profile}", f"--print-to-pdf={made}"]
        try:
            done = subprocess.run([program, *flags, html.resolve().as_uri()], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise SpilloverError(f"{program} did not print {html} within {SECONDS:.0f} s") from None
        except OSError as error:
            raise SpilloverError(f"{program} cannot be started: {error}") from error
        if not made.is_file() or not made.read_bytes().startswith(b"%PDF-"):
            message = done.stderr.strip().splitlines()
            raise SpilloverError(f"{program} printed no PDF of {html}" + (f": {message[-1][:200]}" if message else ""))
        written = pdf.with_suffix(".pdf.new")
        shutil.copyfile(made, written)
        written.replace(pdf)
    return pdf
