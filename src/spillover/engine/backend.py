"""The base of backends: a backend does all that differs between devices while a model is put on one.

It also makes the runner, which does what differs while the model runs. All other code names no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spillover.engine.batch.draft_head import DraftHead
from spillover.engine.batch.offloaded_prefix import OffloadStage, SegmentCopier
from spillover.engine.batch.request_table import StepLimits
from spillover.engine.config import EngineConfig
from spillover.engine.loop import ModelRunner
from spillover.engine.planned import Progress
from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.placed import EngineWeights, Parts
from spillover.kernels.kv_quant import KVCodec
from spillover.memory.managed.pages import ManagedMemory
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.spill.host import Slots
from spillover.memory.transfer.link import DeviceLink
from spillover.memory.transfer.transfers import Transfers
from spillover.models.config import ModelConfig
from spillover.models.layers import Decoder, KVViews
from spillover.models.weight_specs import WeightSpecs
from spillover.plan.planner import Plan


@dataclass(frozen=True)
class RunnerParts:
    model: Decoder
    weights: EngineWeights
    kv: KVViews
    limits: StepLimits
    decode: Callable[[int], str] | None = None
    stage: OffloadStage | None = None  # what offloaded blocks pass through; None if the plan has none
    shared_with: ModelRunner | None = None  # a runner whose steps must not run concurrently with this one's


class DeviceRunner(ModelRunner, Protocol):
    """A runner made by a backend."""

    drafting: Any  # None, or a runner of the same backend that drafts for this one with substitutes

    def add_head(self, head: DraftHead) -> None: ...


class Backend(ABC):
    """What differs between devices, for one model. No backend inherits from another."""

    transfers: Transfers  # the copies between the device and host memory, once the backend is open
    slots: Slots | None = None  # slots of the host tier, once it is made

    def __init__(self, config: EngineConfig, plan: Plan) -> None:
        self.device = torch.device(plan.device)
        self.config = config
        self.plan = plan

    @abstractmethod
    def open(self) -> None:
        """Make the transfers. If there are several ranks, each has selected its device by now."""

    @abstractmethod
    def place(self, parts: Parts, model: ModelConfig, disk: DiskWeights | None,
              shared: SharedWeights | None) -> EngineWeights:
        """Put parts where the plan's placement says. `disk`: reads weights that stay on disk; `shared`: keeps those
        in host memory, one copy for all engines."""

    @abstractmethod
    def managed_memory(self) -> ManagedMemory: ...

    @abstractmethod
    def free_unused(self) -> None:
        """Free device memory that the allocator keeps after loading."""

    @abstractmethod
    def allocate_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeroed KV blocks; RuntimeError or OSError if there is no memory for them."""

    @abstractmethod
    def copier(self, buffers: Tensor, codec: KVCodec | None) -> SegmentCopier:
        """Return the copier of offloaded blocks into the buffers of an OffloadStage."""

    def addresses(self, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return where slots of the host tier are in this process; steps contain only their numbers."""
        assert self.slots is not None, "blocks are offloaded without a host tier"
        return self.slots.addresses(slots)

    @abstractmethod
    def make_runner(self, parts: RunnerParts) -> DeviceRunner: ...

    @abstractmethod
    def capture(self, runner: DeviceRunner, show: Progress, specs: WeightSpecs | None = None) -> None:
        """Capture the graphs of a runner of this backend, if that is to be done at start. `specs`: weights whose
        products are prepared first; None: nothing is left to prepare."""

    @abstractmethod
    def link(self, pool: Tensor, codec: KVCodec | None) -> DeviceLink:
        """Return the link between a pool and host memory. `codec`: quantises blocks for host memory."""

    @abstractmethod
    def ranks_link(self, pool: Tensor, held: Sequence[tuple[Tensor, range]], num_heads: int,
                   codec: KVCodec | None) -> DeviceLink:
        """Return the link between several ranks' pools and host memory, which has whole blocks. `pool`: rank 0's;
        `held`: each rank's pool as bytes, and its range of the model's `num_heads` KV heads."""
