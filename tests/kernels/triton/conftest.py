"""Kernels for CUDA: run in Triton's interpreter if there is no GPU, otherwise marked as tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.kernels import quick_interpreter

FOLDER = Path(__file__).parent
quick_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(pytest.mark.gpu)
