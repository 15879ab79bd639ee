"""The strategies for weights larger than the device, as arithmetic: from room in bytes to the placement of weights.

`place` returns None if the room is too small; a placement that fits in a room fits in any larger one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from spillover.kernels.extents import num_passes
from spillover.kernels.huge_pages import HUGE_PAGE
from spillover.memory.managed.pages import FAULT_AROUND, padded
from spillover.plan.placement import MANAGED, UnitBytes, WeightPlan
from spillover.plan.units import Units, part_layer

PAGED_TOKENS = 64  # maximum tokens of a step that fetches its own misses: more use nearly all experts of a layer
MOST_PASSES = 6  # maximum passes over a layer in such a step; they are cheap, as most have nothing to do
HOSTED_TOKENS = 8  # maximum tokens of a step whose experts the host computes, or, with `pinned`, that uses slots only
LEAST_STREAM_BUFFERS = 2  # slots: one is filled while the other is used
GROUP_BYTES = 100 << 20  # bytes of experts that stream together: enough to saturate the link, and a GPU computing them
STREAM_BUFFERS_SHARE = 10  # stream buffers are at most 1/n of the slots
# Which of embedding and head are resident, in order of preference: both, the embedding, the head, none.
_ENDS = (("embed", "head"), ("embed",), ("head",), ())


@dataclass(frozen=True)
class Choice:
    """A strategy and its parameter."""

    name: str
    count: int = 0  # host-experts: number of layers, 0: as few as possible; cpu-offload: bytes

    def __str__(self) -> str:
        """Return the choice as flags of the command line."""
        if self.name == "cpu-offload":
            return f"--cpu-offload-gb {self.count / 2**30:g}"
        return f"--weights {self.name}" + (f":{self.count}" if self.count else "")


class Strategies:
    def __init__(self, units: Units, device: str, host_budget: int, paged_tokens: int | None = None) -> None:
        """Set budgets. `host_budget`: bytes of host memory for weights; any others are read from the checkpoint."""
        self.units = units
        self.device = device
        self.host_budget = host_budget
        self.paged_tokens = paged_tokens

    def place(self, choice: Choice, room: int) -> WeightPlan | None:
        plan = self._place_on_device(choice, room)
        return None if plan is None else self._with_host_and_disk(self._with_tokens(plan))

    def least(self, choice: Choice) -> int | None:
        """Return the smallest room that is enough; None if none is, because host memory is too small."""
        if choice.name == "host-experts":
            most = self.host_budget // max(1, self.units.layer_record_bytes)
            if choice.count > most:
                return None
            hosted = choice.count or min(most, len(self.units.stacks))
            return self._hosted_plan(hosted, self._least_stream_buffers).device_bytes
        if choice.name == "cpu-offload":
            return self._offloaded_plan(choice.count).device_bytes
        if choice.name in MANAGED:
            least = min(self._total_bytes, self._least_page_bytes(choice.name))
            return least if self.managed_bytes <= self.host_budget else None
        return min(self._total_bytes, *(build(0).device_bytes for build in self._builders(choice.name)))

    def _place_on_device(self, choice: Choice, room: int) -> WeightPlan | None:
        units = self.units
        if self._total_bytes <= room and not choice.count:  # everything fits
            return self._with_sizes(WeightPlan(choice.name, dict.fromkeys(units.parts, "resident"),
                                               dict.fromkeys(units.stacks, "resident")))
        if choice.name == "host-experts":
            return self._fewest_hosted(room, choice.count)
        if choice.name == "cpu-offload":
            plan = self._offloaded_plan(choice.count)
            return plan if plan.device_bytes <= room else None
        if choice.name in MANAGED:
            return self._managed_plan(choice.name, room)
        build = next((one for one in self._builders(choice.name) if one(0).device_bytes <= room), None)
        if build is None:
            return None
        plan = build(self._max_resident_layers(build, room))
        return self._with_slots(plan, room) if plan.quota else plan

    @property
    def managed_bytes(self) -> int:
        """Return the bytes of all weights in whole pages; no two units share a page."""
        return sum(map(self._page_bytes, self.units.parts))

    def _managed_plan(self, strategy: str, room: int) -> WeightPlan | None:
        """Put all weights into managed memory, whose home is the host; its pages may use all of the room."""
        units, total = self.units, self.managed_bytes
        if room < self._least_page_bytes(strategy) or total > self.host_budget:
            return None
        page = managed_page(self.device)
        return WeightPlan(strategy, dict.fromkeys(units.parts, "managed"), dict.fromkeys(units.stacks, "managed"),
                          record_bytes=units.record_bytes, device_bytes=min(total, room // page * page),
                          host_bytes=total, managed_bytes=total)

    def _least_page_bytes(self, strategy: str) -> int:
        """Return the least room for pages: the largest part with its experts; twice that if parts are prefetched."""
        largest_part = max(map(self._page_bytes, self.units.parts))
        return min(self.managed_bytes, largest_part * (2 if strategy == "uvm-prefetch" else 1))

    def _page_bytes(self, part: str) -> int:
        """Return the bytes of the pages of a part and its experts."""
        units, page = self.units, managed_page(self.device)
        count = units.num_experts if part_layer(part) in units.stacks else 0
        return padded(units.records[part], page) + count * padded(units.record_bytes, page)

    def _builders(self, strategy: str) -> list[Callable[[int], WeightPlan]]:
        """Return functions from the number of resident layers to the smallest plan with them: one for each choice of
        resident ends, of which the first that fits is used."""
        units = self.units
        slots = bool(units.stacks) and strategy != "sequential"
        ahead = strategy in ("sequential", "experts")

        def builder(ends: Sequence[str]) -> Callable[[int], WeightPlan]:
            def build(resident: int) -> WeightPlan:
                # With prefetching, resident layers are spread evenly, to give time for copies between any two.
                chosen = _spread(units.layers, resident) if ahead else units.layers[:resident]
                parts = self._parts((*ends, *chosen), "streamed" if ahead else "demand")
                ring = 2 if ahead else 1
                if slots:
                    experts = dict.fromkeys(units.stacks, "paged" if strategy == "experts" else strategy)
                    return self._with_sizes(WeightPlan(strategy, parts, experts, ring=ring,
                                                       stream_buffers=LEAST_STREAM_BUFFERS,
                                                       quota=self._least_quota(self._tokens_in_slots(strategy))))
                experts = {layer: "resident" if parts[f"layers.{layer}"] == "resident" else "streamed"
                           for layer in units.stacks}
                return self._with_sizes(WeightPlan(strategy, parts, experts, ring=ring))

            return build

        # Substitutes draft with the model's own embedding and head, which must be resident.
        return [builder(ends) for ends in (_ENDS[:1] if units.substitutes else _ENDS)]

    def _max_resident_layers(self, build: Callable[[int], WeightPlan], room: int) -> int:
        """Return the number of layers that can be resident. All may fit where one less does not: they need no ring."""
        count = len(self.units.layers)
        if build(count).device_bytes <= room:
            return count
        return largest(lambda resident: build(resident).device_bytes <= room, count - 1)

    def _with_slots(self, plan: WeightPlan, room: int) -> WeightPlan:
        """Add as many slots as fit, the same number for each layer, and stream buffers as a share of them."""
        layers = len(plan.slot_layers)
        slots = (room - plan.device_bytes) // plan.record_bytes + plan.slots
        buffers = min(self._most_stream_buffers, max(LEAST_STREAM_BUFFERS, slots // STREAM_BUFFERS_SHARE),
                      slots - plan.quota * layers)
        quota = min(self.units.num_experts, (slots - buffers) // layers)
        return self._with_sizes(replace(plan, quota=quota, stream_buffers=buffers))

    def _fewest_hosted(self, room: int, count: int) -> WeightPlan | None:
        """Return the plan with the fewest layers on the host that fits, or with the given number of layers."""
        counts = [count] if count else range(len(self.units.stacks) + 1)
        for hosted in counts:
            least = self._least_stream_buffers
            for buffers in dict.fromkeys((self._most_stream_buffers if least else 0, least)):
                plan = self._hosted_plan(hosted, buffers)
                if plan.device_bytes <= room:
                    # The host computes from memory, so that these weights cannot be on disk.
                    return plan if hosted * self.units.layer_record_bytes <= self.host_budget else None
        return None

    def _hosted_plan(self, hosted: int, buffers: int) -> WeightPlan:
        """Keep all but the experts of the first layers, which the host computes, or a GPU streams in long steps."""
        experts = {layer: "host" if index < hosted else "resident" for index, layer in enumerate(self.units.stacks)}
        parts = dict.fromkeys(self.units.parts, "resident")
        return self._with_sizes(WeightPlan("host-experts", parts, experts, stream_buffers=buffers if hosted else 0))

    def _offloaded_plan(self, count: int) -> WeightPlan:
        """Keep at least `count` bytes on the host: whole layers from the first on, each copied when it is used."""
        units, offloaded, offloaded_bytes = self.units, set[str](), 0
        for part in units.layers:
            if offloaded_bytes < count:
                offloaded.add(part)
                offloaded_bytes += units.moved_bytes(part)
        parts = self._parts([part for part in units.parts if part not in offloaded], "demand")
        experts = {layer: "streamed" if f"layers.{layer}" in offloaded else "resident" for layer in units.stacks}
        return self._with_sizes(WeightPlan("cpu-offload", parts, experts, ring=1))

    def _parts(self, resident: Iterable[str], otherwise: str) -> dict[str, str]:
        resident_parts = set(resident)
        return {part: "resident" if part in resident_parts else otherwise for part in self.units.parts}

    def _with_sizes(self, plan: WeightPlan) -> WeightPlan:
        """Return the plan with its sizes on the device."""
        units = self.units
        moved = [part for part, where in plan.parts.items() if where != "resident"]
        with_experts = "streamed" in plan.experts.values()
        largest_part = max((units.moved_bytes(part) if with_experts else units.records[part] for part in moved),
                           default=0)
        ring = plan.ring if moved else 0
        staying = sum(count for part, count in units.parts.items() if plan.parts[part] == "resident")
        staying += sum(count for layer, count in units.stacks.items() if plan.experts[layer] == "resident")
        tables = self._table_bytes if plan.slots or "host" in plan.experts.values() else 0
        # If every layer is resident, all of them have copies that draft.
        copies = sum(count for part, count in units.substitutes.items() if part in moved or not moved)
        return replace(
            plan,
            ring=ring,
            ring_bytes=largest_part,
            record_bytes=units.record_bytes,
            resident_bytes=staying,
            substitute_bytes=copies,
            device_bytes=staying + plan.slots * units.record_bytes + ring * largest_part + copies + tables,
        )

    def _with_tokens(self, plan: WeightPlan) -> WeightPlan:
        """Return the plan with `paged_tokens`: the maximum tokens of a step that fetches its own misses."""
        units, quota = self.units, plan.quota
        if not quota:
            hosted = "host" in plan.experts.values()
            return replace(plan, paged_tokens=(self.paged_tokens or HOSTED_TOKENS) if hosted else 0)
        if plan.strategy != "pinned":
            tokens = self.paged_tokens or max(1, largest(lambda count: num_passes(
                count * units.experts_per_token, units.num_experts, quota, plan.stream_buffers) <= MOST_PASSES,
                PAGED_TOKENS))
            spare = (quota - self._least_quota(1)) * len(plan.slot_layers)
            return replace(plan, paged_tokens=tokens, spare_slots=spare)
        # Pinned experts are worth more than slots for the others, of which a step of one token needs few.
        free = max(self._least_quota(1), quota // 8) if quota < units.num_experts else quota
        tokens = self.paged_tokens or next(
            (count for count in range(HOSTED_TOKENS, 1, -1) if self._slots_used(count) <= free), 1)
        least = self._least_quota(tokens)
        return replace(plan, paged_tokens=tokens, pinned=quota if quota == units.num_experts else quota - least)

    def _with_host_and_disk(self, plan: WeightPlan) -> WeightPlan:
        """Return the plan with non-resident weights in host memory; the last layers are on disk if it is full."""
        if plan.managed_bytes:
            return plan
        units = self.units
        held: list[tuple[str, int, int]] = []  # (part, layer of its experts or -1, bytes); last to disk first
        offloaded = [part for part, where in plan.parts.items() if where != "resident"]
        held += [(part, -1, units.records[part]) for part in offloaded if part_layer(part) < 0]
        for part in units.layers:
            if part in offloaded:
                held.append((part, -1, units.records[part]))
            layer = part_layer(part)
            if plan.experts.get(layer, "resident") != "resident":
                held.append((part, layer, units.layer_record_bytes))
        total = host_bytes = sum(count for _, _, count in held)
        parts, experts = [], []
        while host_bytes > self.host_budget:
            part, layer, count = held.pop()
            host_bytes -= count
            if layer < 0:
                parts.append(part)
            else:
                experts.append(layer)
        return replace(plan, host_bytes=host_bytes, disk_bytes=total - host_bytes, disk_parts=tuple(parts),
                       disk_experts=tuple(experts))

    def with_rows(self, plan: WeightPlan) -> WeightPlan:
        """Return the plan with `rows`: the bytes in each place by kind of unit."""
        units = self.units
        kinds = {"embedding": ["embed"], "layers": list(units.layers), "head": ["head"]}
        rows = []
        for kind, named in kinds.items():
            parts = [part for part in named if part in units.parts]
            offloaded = [part for part in parts if plan.parts[part] != "resident"]
            disk = sum(units.records[part] for part in offloaded if part in plan.disk_parts)
            rows.append(UnitBytes(kind, _counted([plan.parts[part] for part in parts]),
                                  sum(units.parts[part] for part in parts if part not in offloaded),
                                  sum(units.records[part] for part in offloaded) - disk, disk))
            if kind == "layers" and units.stacks:
                rows.append(self._expert_row(plan))
        if plan.substitute_bytes:
            streamed = sum(plan.parts[part] != "resident" for part in units.layers)
            scope = f"of {streamed or len(units.layers)} layers"
            if not streamed and len(units.substitutes) > len(units.layers):
                scope += " and the head"
            rows.append(UnitBytes("substitutes", scope, plan.substitute_bytes))
        if plan.stream_buffers:
            rows.append(UnitBytes("stream buffers", f"{plan.stream_buffers} slots",
                                  plan.stream_buffers * plan.record_bytes))
        if plan.ring:
            rows.append(UnitBytes("ring", f"{plan.ring} buffer{'s' * (plan.ring > 1)}", plan.ring * plan.ring_bytes))
        if plan.managed_bytes:
            padding = plan.host_bytes - sum(row.host for row in rows)
            place = "on the device" if self.device == "cuda" else "mapped (emulated)"
            rows.append(UnitBytes("pages", f"{place}; padding", plan.device_bytes, padding))
        rest = plan.device_bytes - sum(row.device for row in rows)
        return replace(plan, rows=(*rows, UnitBytes("tables", "of slots", rest)) if rest else tuple(rows))

    def _expert_row(self, plan: WeightPlan) -> UnitBytes:
        units = self.units
        staying = sum(count for layer, count in units.stacks.items() if plan.experts[layer] == "resident")
        slots = plan.quota * len(plan.slot_layers)
        offloaded = sum(where != "resident" for where in plan.experts.values())
        disk = len(plan.disk_experts) * units.layer_record_bytes
        place = _counted(list(plan.experts.values()))
        if slots:
            place += f": {plan.quota} slots each for {units.num_experts} experts"
        return UnitBytes("experts", place, staying + slots * units.record_bytes,
                         offloaded * units.layer_record_bytes - disk, disk)

    def _least_quota(self, tokens: int) -> int:
        """Return the minimum slots of a layer for steps of n tokens."""
        if self.device == "cpu":  # experts are fetched and computed one after another
            return min(1, self.units.num_experts)
        return self._slots_used(tokens)

    def _tokens_in_slots(self, strategy: str) -> int:
        """Return the tokens of a step that a layer must have slots for; experts of larger steps use stream buffers."""
        return self.paged_tokens or 1 if strategy == "pinned" else 1

    def _slots_used(self, tokens: int) -> int:
        """Return the maximum slots of a layer that a step uses: one for every expert, and one to evict for the next."""
        return min(self.units.num_experts, tokens * self.units.experts_per_token + 1)

    @property
    def _total_bytes(self) -> int:
        """Return the bytes of all weights on the device, including substitutes of all layers if there are any."""
        return self.units.total + sum(self.units.substitutes.values())

    @property
    def _least_stream_buffers(self) -> int:
        """Return the minimum stream buffers of host experts; none on a CPU, which computes with experts in place."""
        return LEAST_STREAM_BUFFERS if self.device == "cuda" else 0

    @property
    def _most_stream_buffers(self) -> int:
        """Return the largest useful number of stream buffers: those of three groups of experts."""
        group = -(-GROUP_BYTES // max(1, self.units.record_bytes))
        return max(LEAST_STREAM_BUFFERS, min(3 * group, self.units.num_experts))

    @property
    def _table_bytes(self) -> int:
        """Return the bytes of the device's tables about slots: each expert's slot, worth and last use."""
        return 4096 + 32 * len(self.units.stacks) * (self.units.num_experts + 2) if self.units.stacks else 0


def managed_page(device: str) -> int:
    """Return the granularity in bytes of units in managed memory: the maximum that one fault may migrate, a block of
    the driver or, if emulated, of the operating system."""
    return HUGE_PAGE if device == "cuda" else FAULT_AROUND


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest n up to `limit` that fits, by bisection: all smaller ones must fit too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _counted(places: Sequence[str]) -> str:
    """Format counts of placements: "3 resident, 33 streamed"; for a single unit, only the placement."""
    counts = Counter(places)
    return ", ".join(name if len(places) == 1 else f"{count} {name}" for name, count in counts.items())


def _spread(parts: Sequence[str], count: int) -> list[str]:
    """Choose `count` of the parts, spread as evenly as possible."""
    return [part for index, part in enumerate(parts)
            if (index + 1) * count // len(parts) > index * count // len(parts)]
