"""Plans for several cards, or for a card that this machine does not have, from flags and a table of rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spillover.engine.config import EngineConfig
from spillover.engine.planned import plan_checkpoint
from spillover.errors import SpilloverError
from spillover.memory.budgets import parse_disk
from spillover.models.checkpoint import read_config
from spillover.models.config import ModelConfig
from spillover.models.registry import read_architecture
from spillover.models.sharding.shard import Shard, check_shard, shard_specs
from spillover.models.weight_specs import WeightSpecs, kept_on
from spillover.plan.hardware import Machine
from spillover.plan.ranks.cards import (
    CARDS,
    DEFAULT_CARD,
    HOSTS,
    SHARES_SOURCE,
    Card,
    Host,
    Link,
    find_card,
    find_link,
    find_local_card,
)
from spillover.plan.ranks.steps import RankPlan, layout_name, make_rank_plan, rank_rates
from spillover.plan.rates import Rates
from spillover.plan.shapes import model_shape
from spillover.units import parse_budget


@dataclass(frozen=True)
class Setting:
    """The hardware to plan for."""

    card: Card
    link: Link
    host: Host
    machine: Machine
    rates: Rates
    measured_now: bool  # whether the card is in this machine, and was timed
    notes: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Return the sources of the numbers, as pairs (what, source)."""
        card = "timed on this machine now" if self.measured_now else self.card.source
        if not self.measured_now and self.card.measured is None:
            card += f"; {SHARES_SOURCE}"
        return ((self.card.title, card), (self.link.name, self.link.source), (self.host.name, self.host.source))


@dataclass(frozen=True)
class RanksPlan:
    """Plans of one card and of several. `refused`: layouts that are not possible, with the reason."""

    setting: Setting
    layouts: tuple[RankPlan, ...]
    refused: tuple[tuple[str, str], ...] = ()


def choose_setting(card: str | None, link: str | None, device: str, machine: Machine,
                   measure: Callable[[], Rates]) -> Setting:
    """Return the hardware to plan for: the card named, else this machine's, else the table's default with a note.
    `measure` times this machine's card."""
    if device == "cpu":
        raise SpilloverError("--tensor-parallel-size, --card and --link plan for GPUs: leave --device cpu out")
    if card is None and machine.cuda:
        here = find_local_card(machine.cuda[0])
        if here is None:
            if link is None:
                raise SpilloverError(f"how {machine.cuda[0].name} cards are connected is not known: give --link pcie4 "
                                     f"or pcie5, or plan for one of the table with --card ({', '.join(CARDS)})")
            here = replace(CARDS["rtx-4090"], title=machine.cuda[0].name, links=("pcie5", "pcie4"))
        return Setting(here, find_link(link, here), HOSTS[here.host], machine, measure(), True)
    named = find_card(card or DEFAULT_CARD)
    notes = (f"there is no GPU here, so the plan is for {named.title}; --card names another",) if card is None else ()
    return Setting(named, find_link(link, named), HOSTS[named.host], named.machine(), named.rates, False, notes)


def plan_ranks(config: EngineConfig, path: Path, setting: Setting) -> RanksPlan:
    """Plan a model on one card and on --tensor-parallel-size cards; with experts, also for expert parallelism."""
    _, model_config = read_architecture(read_config(path), path)
    _check(config, setting)
    size = config.tensor_parallel_size
    check_shard(model_config, size, expert_parallel=False)
    layouts: list[RankPlan] = []
    refused: dict[str, SpilloverError] = {}
    for shard in _layouts(size, model_config):
        try:
            layouts.append(_layout(config, path, setting, shard))
        except SpilloverError as error:
            refused[layout_name(shard)] = error
    if all(layout.shard.size != size for layout in layouts):  # one card is shown only for comparison
        raise refused[layout_name(Shard(0, size))]
    return RanksPlan(setting, tuple(layouts), tuple((name, str(why)) for name, why in refused.items()))


def _layouts(size: int, model: ModelConfig) -> list[Shard]:
    return [Shard(), *([Shard(0, size)] if size > 1 else []),
            *([Shard(0, size, expert_parallel=True)] if size > 1 and model.is_moe else [])]


def _layout(config: EngineConfig, path: Path, setting: Setting, shard: Shard) -> RankPlan:
    """Plan the first rank: device budgets are per card, those of lower tiers are shared by all ranks."""
    rates = rank_rates(setting.rates, setting.host, shard.size)
    flags = replace(  # flags to plan this rank by itself
        config, device="cuda", tensor_parallel_size=1, enable_expert_parallel=False,
        host_memory=None if config.host_memory is None else str(_host_bytes(config, setting) // shard.size),
        disk=tuple(f"{disk.path}:{disk.capacity_bytes // shard.size}" for disk in map(parse_disk, config.disk)))
    whole: list[tuple[ModelConfig, WeightSpecs]] = []

    def first_rank(model: ModelConfig, specs: WeightSpecs) -> tuple[ModelConfig, WeightSpecs]:
        check_shard(model, shard.size, shard.expert_parallel)
        whole.append((model, specs))
        return shard.planned(model), shard_specs(specs, model, shard)[0]

    planned = plan_checkpoint(flags, path, read_config(path), rates, machine=setting.machine, share=first_rank)
    plan, (whole_config, whole_specs) = planned.plan, whole[0]
    shape = model_shape(whole_config, kept_on(whole_specs, plan.device, plan.dtype), plan.dtype)
    return make_rank_plan(shard, plan, shape.weight_bytes, planned.model_config, planned.specs, rates, setting.link,
                          whole_config)


def _host_bytes(config: EngineConfig, setting: Setting) -> int:
    return parse_budget(str(config.host_memory), "--host-memory", setting.machine.memory)


def _check(config: EngineConfig, setting: Setting) -> None:
    if config.load_format == "null":
        raise SpilloverError("--load-format null has no weights to share: leave it out of a plan for several cards")
    speculation = config.speculation
    if speculation is not None and (speculation.model is not None or speculation.method == "substitute"):
        raise SpilloverError("a plan for several cards, or for one that is not here, counts no draft model and no "
                             "substitutes yet: leave speculation out of it")
    if not setting.measured_now and "%" in str(config.host_memory):
        raise SpilloverError(f"--host-memory {config.host_memory} is a share of a machine that is not here: give a "
                             "size such as 256GB")
