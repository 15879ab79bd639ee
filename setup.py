"""Builds the wheel with a library of the native kernels per instruction level, so that installing needs no compiler.

An editable install gets none: there they are compiled at first use. Everything else is in pyproject.toml.
"""

import platform
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = "spillover/kernels/native"
BUILD = runpy.run_path(f"src/{NATIVE}/build.py")
# Elsewhere the system does not say what the cores have.
LEVELS = BUILD["LEVELS"].get(platform.machine(), ()) if sys.platform == "linux" else ()


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        for level in () if self.editable_mode else LEVELS:
            path = Path(self.build_lib, NATIVE, level.file)
            path.unlink(missing_ok=True)  # of an earlier build
            print(f"compiling {path.name}: {level.cores}", flush=True)
            BUILD["build"](BUILD["command"](level.cores), path, lambda done, total: None)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, for the libraries are called through ctypes; any Linux with the C library of this one."""
        _, version = platform.libc_ver()
        major, minor = version.split(".")[:2]
        return "py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}"


class DistributionWithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(LEVELS)


setup(distclass=DistributionWithKernels,
      cmdclass={"build_py": BuildWithKernels, **({"bdist_wheel": PlatformWheel} if LEVELS else {})})
