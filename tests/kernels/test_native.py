"""The best library of the wheel is loaded; without one it is compiled once and cached; if that is impossible, torch's
kernels are used."""

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spillover.kernels import native
from spillover.kernels.native import build

PROGRAM = """
import torch
from spillover.kernels import native
from spillover.kernels.formats.packed import pack
from spillover.kernels.linear import linear
from spillover.kernels.norm import rms_norm
w = pack(torch.eye(40, 16))
assert linear(torch.ones(3, 16), w).sum() == 48
assert rms_norm(torch.ones(2, 8), torch.ones(8), 0.0).sum() == 16
print(native.describe())
"""

TELLING = """
from spillover.kernels import native
native.on_build(lambda done, total: print(done, total, flush=True))
native.library()
"""
SOURCES = Path(native.__file__).parent


def tell(**environment: str) -> list[str]:
    """Return the messages that on_build's callback received."""
    done = subprocess.run([sys.executable, "-c", TELLING], env=os.environ | environment, capture_output=True, text=True,
                          check=True)
    return done.stdout.splitlines()


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )


HASWELL = "fpu sse4_2 movbe popcnt avx f16c abm bmi1 avx2 bmi2 fma"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
NEOVERSE_N1 = "fp asimd aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


@pytest.mark.parametrize(("machine", "features", "best"), [
    ("x86_64", "fpu sse4_2 popcnt avx", None),
    ("x86_64", HASWELL, "avx2"),
    ("x86_64", SKYLAKE, "avx512"),
    ("x86_64", f"{SKYLAKE} avx512_vnni avx512_bf16", "avx512-vnni"),  # Zen 4
    ("x86_64", f"{SKYLAKE} avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8", "amx"),
    ("aarch64", "fp asimd evtstrm crc32 cpuid", "neon"),  # Cortex-A72
    ("aarch64", NEOVERSE_N1, "dotprod"),
    ("aarch64", f"{NEOVERSE_N1} svei8mm i8mm bf16", "i8mm"),
    ("riscv64", HASWELL, None),
])
def test_the_best_library_that_the_cores_can_run_is_taken(machine: str, features: str, best: str | None, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    key = "flags" if machine == "x86_64" else "Features"
    monkeypatch.setattr(build, "_cpuinfo", lambda: ["processor\t: 0", f"{key}\t\t: {features}"])
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    assert build.shipped_library() is None  # an editable install contains no library
    for level in build.LEVELS.get(machine, ()):
        (tmp_path / level.file).touch()
    found = build.shipped_library()
    assert (found.name if found else None) == (best and f"kernels-{best}.so")


def test_it_can_be_turned_off() -> None:
    done = run(SPILLOVER_NATIVE="0")
    assert "off (SPILLOVER_NATIVE=0)" in done.stdout
    assert "Warning" not in done.stderr


def test_without_a_compiler_one_warning_says_so(tmp_path: Path) -> None:
    done = run(PATH=str(tmp_path), CXX="", SPILLOVER_CACHE=str(tmp_path))
    assert "off (no C++ compiler" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(CXX=str(broken), SPILLOVER_CACHE=str(tmp_path))
    assert "broken failed: no such option" in done.stdout


def test_they_are_on_unless_turned_off() -> None:
    if os.environ.get("SPILLOVER_NATIVE") == "0":
        pytest.skip("SPILLOVER_NATIVE=0")
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "c++", "clang++")):
        assert not os.environ.get("CI"), "CI has no C++ compiler: nothing tests the native kernels"
        pytest.skip("no C++ compiler")
    assert native.library() is not None, native.describe()


needs_a_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


@needs_a_compiler
def test_it_is_built_once_with_progress_and_kept(tmp_path: Path) -> None:
    count = len(list(SOURCES.rglob("*.cpp")))
    new = {"SPILLOVER_CACHE": str(tmp_path), "CXX": str(copying_compiler(tmp_path))}
    assert tell(**new) == [f"{done} {count}" for done in range(count + 1)]
    (built,) = (tmp_path / "native").iterdir()
    written = built.stat().st_mtime_ns
    on = f"on, panels of {native.panel_width()} channels"
    assert f"{on}, compiled here as {built}" in run(**new).stdout
    assert f"{on}, SPILLOVER_NATIVE={built}" in run(SPILLOVER_NATIVE=str(built)).stdout
    assert tell(**new) == []
    assert built.stat().st_mtime_ns == written


@needs_a_compiler
def test_no_symbol_is_left_to_be_found_in_what_happens_to_be_loaded_beside_it() -> None:
    library = native.library()
    assert library is not None
    load = f"import ctypes, os; ctypes.CDLL({library._name!r}, os.RTLD_NOW)"
    subprocess.run([sys.executable, "-S", "-c", load], check=True)


def copying_compiler(folder: Path) -> Path:
    """Write a compiler that compiles nothing, and links by copying the library that this process uses."""
    library = native.library()
    assert library is not None
    program = folder / "copying"
    program.write_text(f"""#!/bin/sh
case "$*" in --version) exec echo copying ;; *" -c "*) made= ;; *) made={library._name} ;; esac
while [ $# -gt 1 ]; do shift; done
exec cp "${{made:-/dev/null}}" "$1"
""")
    program.chmod(0o755)
    return program


def test_a_killed_build_is_swept_by_the_next_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    count, cores = len(list(SOURCES.rglob("*.cpp"))), len(os.sched_getaffinity(0))
    environment = os.environ | {"SPILLOVER_CACHE": str(tmp_path), "CXX": str(slow_compiler(tmp_path))}
    for sent, left in ((signal.SIGKILL, 1), (signal.SIGINT, 0)):
        process = subprocess.Popen([sys.executable, "-c", TELLING], env=environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [f"0 {count}\n", f"1 {count}\n"]
        process.send_signal(sent)
        process.communicate()
        assert process.returncode != 0
        assert len(list((tmp_path / "native").iterdir())) == left
        assert len(list(tmp_path.glob("*.started"))) <= 1 + cores  # the completed one, and those that were running


def test_sources_that_take_longest_are_begun_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow sources are compiled first; last, one would run alone while the progress bar shows almost 100%."""
    monkeypatch.setattr(build, "_cores", lambda: 1)
    begun = tmp_path / "begun"
    command = ["/bin/sh", "-c", f'echo "$2" >> {begun}', "compiler"]
    objects = build._compile(command, build.SOURCES, tmp_path, lambda done, total: None)
    order = [Path(line).stem for line in begun.read_text().split()]
    assert set(order[:5]) == {
        "mixture_float", "mixture_small_float", "mixture_int4", "mixture_int8", "mixture_gguf"}
    assert sorted(order) == sorted(source.stem for source in build.SOURCES)
    assert [Path(made).stem for made in objects] == [source.stem for source in build.SOURCES]


def slow_compiler(folder: Path) -> Path:
    """Write a compiler that compiles the first source at once, and takes a minute for each other one."""
    program = folder / "slow"
    program.write_text(f"""#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in
        *.cpp) source=$(basename "$1") ;;
        -o) shift; out="$1" ;;
    esac
    shift
done
[ -n "$source" ] || exit 0
touch {folder}/"$source".started
[ "$source" = mixture_float.cpp ] || exec sleep 60
touch "$out"
""")
    program.chmod(0o755)
    return program


@needs_a_compiler
def test_the_kernels_have_as_many_threads_as_torch_is_told_to_use() -> None:
    count = """
import os, torch
from spillover.kernels.formats.packed import pack
from spillover.kernels.linear import linear
w, x = pack(torch.ones(4000, 64)), torch.ones(1, 64)
for threads in (3, 1, 5):
    torch.set_num_threads(threads)
    linear(x, w)
    print(len(os.listdir("/proc/self/task")))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    three, one, five = map(int, done.stdout.split())
    assert one == three  # teams are reused, and the caller is a member of each
    assert five == three + 4
