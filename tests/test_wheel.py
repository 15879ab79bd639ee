"""The wheel, installed on a machine without a compiler, generates text; its libraries compute the same bits as one
compiled there (make test-wheel)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from spillover.kernels.cuda.mixture import SOURCE
from spillover.kernels.native.build import LEVELS, levels
from spillover.models.hub.store import models_folder, resolve

ROOT = Path(__file__).parent.parent
WHEELS = list(ROOT.glob("dist/*.whl"))
pytestmark = [pytest.mark.wheel, pytest.mark.skipif(not WHEELS, reason="no wheel: make wheel")]

NATIVE = "spillover/kernels/native"
PROMPT = "The capital of France is"
# Greedy tokens with their probabilities, so that a difference of one bit in any layer is visible.
PROGRAM = """
from spillover import LLM, SamplingParams
prompts = ["The capital of France is", "Count: 1 2 3", " ".join(map(str, range(200)))]
for flags in ({}, {"weight_codes": "widen"}, {"kv_cache_dtype": "fp8"}):
    with LLM(**flags) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=1)
        for answer in llm.generate(prompts, params, use_tqdm=False):
            print(answer.prompt_logprobs, answer.outputs[0].token_ids, answer.outputs[0].logprobs)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = WHEELS
    return found


@pytest.fixture(scope="module")
def libraries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel's native libraries and return their folder."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".so")])
    return folder / NATIVE


def python(*arguments: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_it_holds_a_library_per_level_for_any_python(wheel: Path, libraries: Path) -> None:
    machine = os.uname().machine
    _, _, interpreter, abi, system = wheel.stem.split("-")
    assert (interpreter, abi) == ("py3", "none")
    assert system.startswith("manylinux_")
    assert system.endswith(machine)
    assert {path.name for path in libraries.iterdir()} == {level.file for level in LEVELS[machine]}


def test_it_holds_what_a_card_compiles(wheel: Path) -> None:
    sources = {f"spillover/kernels/cuda/{path.name}" for path in SOURCE.parent.glob("*.cu*")}
    assert sources
    with zipfile.ZipFile(wheel) as archive:
        assert sources <= set(archive.namelist())


def test_it_generates_in_an_empty_environment_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder, cache = tmp_path / "venv/bin", tmp_path / "cache"
    install = ["-I", "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements.lock", wheel]
    subprocess.run([bin_folder / "python", *install], check=True)
    cache.mkdir()
    resolve()  # downloads the default model unless it is in the model cache
    (cache / "models").symlink_to(models_folder())
    environment = {"PATH": str(bin_folder), "HOME": str(tmp_path), "SPILLOVER_CACHE": str(cache)}

    def spill(*arguments: str) -> str:
        return subprocess.run([bin_folder / "spill", *arguments], env=environment, cwd=tmp_path, capture_output=True,
                              text=True, check=True).stdout

    assert "Paris" in spill("generate", PROMPT, "--temperature", "0", "--max-tokens", "16")
    told = " ".join(spill("doctor", "--json").split())
    assert f"shipped as {tmp_path}" in told
    assert f"{NATIVE}/{levels()[0].file}" in told
    assert not (cache / "native").exists()


def test_the_best_library_has_the_bits_of_one_compiled_for_these_cores(libraries: Path) -> None:
    compiled = python("-c", PROGRAM, SPILLOVER_NATIVE="compile")
    assert python("-c", PROGRAM, SPILLOVER_NATIVE=str(libraries / levels()[0].file)) == compiled


@pytest.mark.parametrize("level", [level.file for level in levels()])
def test_the_kernels_of_each_library_that_these_cores_can_run(level: str, libraries: Path) -> None:
    kernels = ROOT / "tests/kernels"
    told = python("-m", "pytest", str(kernels), "-m", "not gpu and not alone", "--ignore",
                  str(kernels / "test_native.py"), "--ignore", str(kernels / "test_emulated_arm.py"), "--ignore",
                  str(kernels / "triton"), "--no-header", SPILLOVER_NATIVE=str(libraries / level))
    assert int(re.findall(r"(\d+) passed", told)[-1]) > 100
