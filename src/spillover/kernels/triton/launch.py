"""Programmatic dependent launch: a kernel starts before the previous one has completed (compute capability 9 and up).

A kernel launched this way waits, inside, before it accesses what other kernels wrote, and lets the next one start at
once. Before the wait it may read only what no kernel of the step writes: weights. A kernel between two kernels of
cuBLAS, which does not launch its own this way, is better launched as usual: on an H200 in a graph it then starts
0.46 us after the first of them, against 0.97 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import knobs

from spillover.kernels.cuda.driver.compiled import prefer_shared_memory

ALLOWED = True
# Launch arguments of kernels whose results must equal those of other kernels bit for bit: a product and a sum are fused
# into one instruction only where the code calls `tl.fma`. The compiler's own choice would differ from kernel to kernel.
NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Return the arguments for a launch on this device: the kernel's EARLY, and the launcher's `launch_pdl`."""
    if wanted and ALLOWED and device.type == "cuda" and _capable(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def _loaded(module: Any, function: int, *_: Any) -> None:
    """Let a kernel run concurrently with larger ones. A multiprocessor divides its memory between shared memory and L1
    cache, and changes the split only when it is idle: after a kernel configured with little shared memory, as Triton
    does for those of up to 48 KiB, blocks of the next kernel that need more cannot start until it has completed."""
    if not torch.version.hip:
        prefer_shared_memory(function)


knobs.runtime.kernel_load_end_hook.add(_loaded)


@cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
