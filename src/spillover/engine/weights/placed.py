"""A model's weights laid out by a plan: resident weights, units that pass through a ring, experts fetched one by one.

The loader yields parts one after another; each is split into the weights that the plan keeps on the device and those
that go to host memory as records, or stay on disk. All decisions about placement are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from spillover.engine.weights.disk_weights import DiskWeights
from spillover.engine.weights.elastic import ElasticMemory, SlotOwner
from spillover.engine.weights.graph_weights import GraphAware
from spillover.engine.weights.ring import Ring, Source
from spillover.engine.weights.traffic import WeightTraffic
from spillover.errors import SpilloverError
from spillover.kernels.formats.base import Weight
from spillover.kernels.moe.moe import LayerExperts
from spillover.kernels.moe.records import Record, tensors_of
from spillover.memory.shared_pool.weights import SharedWeights
from spillover.memory.transfer.transfers import Transfers
from spillover.models.weight_specs import layer_part
from spillover.models.weights import PartWeights, ResidentWeights, Weights, one_expert_of, split_experts
from spillover.plan.placement import WeightPlan

Parts = Iterable[tuple[str, dict[str, Weight]]]  # (part, its weights), as the loader yields them one after another


@dataclass(frozen=True)
class Unit:
    """Weights that pass through the ring together: a part's weights without experts, its experts, or both."""

    own: Record | None
    expert: Record | None
    experts: int
    run: Tensor | None  # the unit's bytes in host memory; None if it is on disk

    @property
    def nbytes(self) -> int:
        return unit_bytes(self.own, self.expert, self.experts)

    def bind(self, buffer: Tensor) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        start = 0
        if self.own is not None:
            weights |= self.own.bind(buffer)
            start = self.own.nbytes
        if self.expert is not None:
            end = start + self.expert.nbytes * self.experts
            weights |= self.expert.stacks(buffer[start:end].view(self.experts, self.expert.nbytes))
        return weights


def unit_bytes(own: Record | None, expert: Record | None, experts: int) -> int:
    return (own.nbytes if own is not None else 0) + (expert.nbytes * experts if expert is not None else 0)


class StreamedPart:
    """The context manager of a part with weights that pass through the ring; inside, its buffer is in use."""

    def __init__(self, unit: str, ring: Ring, whole: Sequence[PartWeights]) -> None:
        """Make a part that passes through the ring. `whole`: for each buffer, the part with its unit in that buffer."""
        self._unit = unit
        self._ring = ring
        self._whole = whole
        self._held: list[int] = []

    def __enter__(self) -> PartWeights:
        index = self._ring.acquire(self._unit)
        self._held.append(index)
        return self._whole[index]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ring.release(self._held.pop())


class PlacedParts:
    """The parts received from the loader, each put where the plan says."""

    def __init__(self, placement: WeightPlan, device: torch.device, transfers: Transfers,
                 disk: DiskWeights | None, shared: SharedWeights | None = None) -> None:
        """Start without parts. `shared`: keeps weights in host memory, one copy for all engines of the machine."""
        self.shared = shared
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.placement = placement
        self.device = device
        self.transfers = transfers
        self.disk = disk
        self.resident: dict[str, dict[str, Weight]] = {}
        self.experts: dict[str, LayerExperts] = {}  # by part: experts fetched one by one, or computed by the host
        self.units: dict[str, Unit] = {}
        self.expert_record: Record | None = None
        self.num_experts = 0
        self.expert_runs: dict[int, Tensor | None] = {}  # by layer: [experts, record] in host memory, None if on disk

    def put(self, part: str, weights: Mapping[str, Weight]) -> Tensor | None:
        """Store a part; return its experts as records if they are fetched one by one, so that slots can be filled."""
        own, experts = split_experts(weights)
        layer = int(part.removeprefix("layers.")) if experts else -1
        expert_where = self.placement.experts.get(layer, "resident")
        stays = self.placement.parts.get(part, "resident") == "resident"
        self.resident[part] = dict(own) if stays else {}
        if experts and expert_where == "resident":
            self.resident[part] |= experts
        records = self._records(experts) if experts and expert_where != "resident" else None
        passing = records if expert_where == "streamed" else None
        if not stays or passing is not None:
            on_disk = part in self.placement.disk_parts or (passing is not None
                                                            and layer in self.placement.disk_experts)
            self._put_unit(part, own, None if stays else Record.of(own), passing, on_disk)
        if records is None or passing is not None:
            return None
        self.expert_runs[layer] = None
        if layer not in self.placement.disk_experts:
            run = self._host(records.numel(), lambda run: run.view(records.shape).copy_(records))
            self.expert_runs[layer] = run.view(records.shape)
        return records

    def expert_source(self, layer: int, expert: int) -> Source:
        """Return one expert's record in host memory, or a function that reads it from disk."""
        runs, record = self.expert_runs[layer], self.expert_record
        assert record is not None
        if runs is not None:
            return runs[expert]
        disk = self.disk
        assert disk is not None
        return lambda: disk.expert(layer_part(layer), record, expert)

    def expert_bytes(self, layer: int, expert: int) -> Tensor:
        """Return one expert's record; read it from disk if it is not in host memory."""
        source = self.expert_source(layer, expert)
        return source if isinstance(source, Tensor) else source()

    def ring(self) -> Ring | None:
        """Return the ring that the units pass through; None if there are no units."""
        if not self.units:
            return None
        sizes = {part: unit.nbytes for part, unit in self.units.items()}
        count = max(1, min(self.placement.ring, len(self.units)))
        buffers = [torch.empty(max(sizes.values()), dtype=torch.uint8, device=self.device) for _ in range(count)]
        return Ring(buffers, list(self.units), sizes, self._unit_source, self.transfers, ahead=count > 1)

    def _host(self, nbytes: int, write: Callable[[Tensor], object]) -> Tensor:
        """Put weights in host memory that the device can read. `write`: writes their bytes."""
        if self.shared is not None:
            if len(self._scratch) < nbytes:
                self._scratch = torch.empty(nbytes, dtype=torch.uint8)
            content = self._scratch[:nbytes].zero_()  # zeroed so that padding is equal too when weights are compared
            write(content)
            kept = self.shared.keep(content.numpy().data)
            if kept is not None:
                return torch.frombuffer(kept, dtype=torch.uint8)
        try:
            run = torch.frombuffer(self.transfers.pool.allocate(nbytes, "weights", pinned=True), dtype=torch.uint8)
        except MemoryError as error:
            raise SpilloverError(f"{error}; raise --host-memory") from error
        write(run)
        return run

    def _unit_source(self, part: str) -> Source:
        unit, disk = self.units[part], self.disk
        if unit.run is not None:
            return unit.run
        assert disk is not None
        return lambda: disk.unit(part, unit.own, unit.expert, unit.experts)

    def _records(self, experts: Mapping[str, Weight]) -> Tensor:
        """Return the experts as records [experts, record], on the device where they are."""
        data = tensors_of(next(iter(experts.values())))[0]
        record = self.expert_record = self.expert_record or Record.of(one_expert_of(experts))
        self.num_experts = data.shape[0]
        make = torch.empty if self.shared is None else torch.zeros
        records = make(self.num_experts, record.nbytes, dtype=torch.uint8, device=data.device)
        record.write_stacks(experts, records)
        return records

    def _put_unit(self, part: str, own: Mapping[str, Weight], own_record: Record | None, experts: Tensor | None,
                  on_disk: bool) -> None:
        count = 0 if experts is None else experts.shape[0]
        expert_record = self.expert_record if experts is not None else None
        run = None
        if not on_disk:
            def write(run: Tensor) -> None:
                start = 0
                if own_record is not None:
                    start = own_record.nbytes
                    own_record.write(own, run[:start])
                if experts is not None:
                    run[start:].view(experts.shape).copy_(experts)

            run = self._host(unit_bytes(own_record, expert_record, count), write)
        self.units[part] = Unit(own_record, expert_record, count, run)


class ExpertStore(SlotOwner, Protocol):
    """The experts of all layers whose experts are fetched one by one or computed on the host."""

    @property
    def traffic(self) -> WeightTraffic: ...

    @property
    def nbytes(self) -> int: ...  # bytes on the device

    def sleep(self) -> None:
        """Free the device's memory; its contents are lost."""

    def wake_up(self) -> None: ...

    def close(self) -> None: ...


class EngineWeights(Weights, Protocol):
    """The interface of a model's weights for an engine, independent of where they are stored."""

    @property
    def memory(self) -> ElasticMemory | None: ...  # memory that slots and KV share; None if there are no slots

    @property
    def experts(self) -> ExpertStore | None: ...

    @property
    def graphs(self) -> GraphAware: ...

    @property
    def resident_parts(self) -> Mapping[str, Mapping[str, Weight]]: ...

    @property
    def nbytes(self) -> int: ...  # bytes on the device

    @property
    def host_bytes(self) -> int: ...

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None: ...

    def traffic(self) -> WeightTraffic: ...

    def close(self) -> None: ...


class FixedWeights(ResidentWeights):
    """Weights that are all on the device as long as the engine runs, except while it sleeps."""

    memory = experts = None
    graphs = GraphAware()
    host_bytes = 0

    @property
    def resident_parts(self) -> Mapping[str, Mapping[str, Weight]]:
        return self.parts

    def traffic(self) -> WeightTraffic:
        return WeightTraffic()

    def close(self) -> None:
        pass


class PlacedWeights:
    """The weights of a model under a placement: every part is accessed where the plan put it."""

    def __init__(self, placed: PlacedParts, experts: ExpertStore | None,
                 memory: ElasticMemory | None = None, graphs: GraphAware | None = None) -> None:
        """Hold the weights. `memory`: memory that slots and KV share, if there are slots; `graphs`: None on a CPU,
        where nothing is captured."""
        self.memory = memory
        self.experts = experts
        self.graphs = graphs or GraphAware()
        self._resident = ResidentWeights(placed.resident, placed.experts)
        self._pool, self._disk, self._shared = placed.transfers.pool, placed.disk, placed.shared
        self._ring = placed.ring()
        # For every part that passes through the ring: its weights as views of each buffer.
        self._bound = {} if self._ring is None else {
            part: [unit.bind(buffer) for buffer in self._ring.buffers] for part, unit in placed.units.items()
        }
        self._streamed = self._enter_by_ring()

    @property
    def resident_parts(self) -> Mapping[str, Mapping[str, Weight]]:
        """Return the weights of each part that stay on the device."""
        return self._resident.parts

    def part(self, name: str) -> AbstractContextManager[PartWeights]:
        return self._streamed[name] if name in self._streamed else self._resident.part(name)

    def move(self, copy: Callable[[Tensor], Tensor], asleep: bool) -> None:
        """Move the resident weights; copies of other weights on the device are dropped and fetched again later."""
        self._resident.move(copy, asleep)
        self._streamed = self._enter_by_ring()
        if self._ring is not None:
            self._ring.resize(asleep)
        if self.experts is not None and asleep:
            self.experts.sleep()
        elif self.experts is not None:
            self.experts.wake_up()

    def _enter_by_ring(self) -> dict[str, StreamedPart]:
        """Return the context manager of each part that passes through the ring, with its resident weights included."""
        if self._ring is None:
            return {}
        return {part: StreamedPart(part, self._ring, [self._resident.bind_part(part, passing) for passing in bound])
                for part, bound in self._bound.items()}

    def traffic(self) -> WeightTraffic:
        ring, disk = self._ring, self._disk
        passed = WeightTraffic() if ring is None else WeightTraffic(ring.bytes_moved, ring.fetches)
        read = WeightTraffic(disk_bytes=disk.bytes_read if disk is not None else 0)
        return passed.plus(read).plus(self.experts.traffic if self.experts is not None else WeightTraffic())

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device: resident weights, ring and expert slots."""
        ring = sum(buffer.numel() for buffer in self._ring.buffers) if self._ring is not None else 0
        return self._resident.nbytes + ring + (self.experts.nbytes if self.experts is not None else 0)

    @property
    def host_bytes(self) -> int:
        """Return the bytes in host memory, including those in a shared pool."""
        shared = self._shared.nbytes if self._shared is not None else 0
        return self._pool.bytes_by_use.get("weights", 0) + shared

    def close(self) -> None:
        if self.experts is not None:
            self.experts.close()
        if self._shared is not None:
            self._shared.close()

