"""What one rank of a tensor-parallel or expert-parallel group holds of a model: its heads, its rows, its columns.

The first linear of attention and MLP is split by rows, the second by columns; embedding and head by the vocabulary.
Norms, routers and biases that are added after the sum are whole on every rank, and so is a key/value head that several
ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spillover.errors import PlanError
from spillover.models.config import ModelConfig
from spillover.models.weight_specs import WeightSpec, WeightSpecs, is_expert

MOST_RANKS = 64  # that are proposed where a number does not work
GROUP = 32  # columns: a rank's share of a quantised linear is padded to a multiple, the shortest group of a format


@dataclass(frozen=True)
class Share:
    """One of n equal parts of a model."""

    ranks: int = 1
    expert_parallel: bool = False  # each rank has whole experts, instead of a part of every expert

    def of(self, config: ModelConfig, specs: WeightSpecs) -> tuple[ModelConfig, WeightSpecs]:
        """Return what a rank computes with. The vocabulary stays whole: one rank samples, and has all the logits."""
        if self.ranks == 1:
            return config, specs
        whole = self.expert_parallel
        mine = replace(
            config,
            num_heads=config.num_heads // self.ranks,
            num_kv_heads=max(1, config.num_kv_heads // self.ranks),
            intermediate_size=config.intermediate_size // self.ranks,
            expert_intermediate_size=config.expert_intermediate_size // (1 if whole else self.ranks),
            num_experts=config.num_experts // self.ranks if whole else config.num_experts,
            # At worst all experts of a token are the same rank's.
            experts_per_token=min(config.experts_per_token, config.num_experts // self.ranks) if whole else
            config.experts_per_token,
        )
        return mine, {part: [self._spec(spec, config, mine) for spec in listed] for part, listed in specs.items()}

    def _spec(self, spec: WeightSpec, config: ModelConfig, mine: ModelConfig) -> WeightSpec:
        name = spec.name.removeprefix("experts.").removesuffix("_bias")
        if is_expert(spec.name) and self.expert_parallel:
            return replace(spec, shape=(mine.num_experts, *spec.shape[1:]))
        if name == "qkv":
            heads = (mine.num_heads, mine.num_kv_heads, mine.num_kv_heads)
            return _with_rows(spec, tuple(count * config.head_dim for count in heads))
        if name in ("gate_up", "embedding", "lm_head", "sinks"):
            rows = spec.sources[0].rows if spec.format is not None else (spec.shape[_row_axis(spec)],)
            return _with_rows(spec, tuple(-(-count // self.ranks) for count in rows))
        if name in ("o", "down") and not spec.name.endswith("_bias"):
            columns = spec.shape[-1] // self.ranks
            if spec.format is not None and spec.format.quant_method != "dense":
                columns = -(-columns // GROUP) * GROUP
            return replace(spec, shape=(*spec.shape[:-1], columns))
        return spec


def _with_rows(spec: WeightSpec, rows: tuple[int, ...]) -> WeightSpec:
    """Return the spec with these rows of each of the matrices that are fused into it."""
    at = _row_axis(spec)
    shape = (*spec.shape[:at], sum(rows), *spec.shape[at + 1:])
    # A stack of experts may be one tensor in one of its sources, and two in another: each keeps its own count.
    sources = tuple(replace(source, rows=rows if len(source.rows) == len(rows) else (sum(rows),))
                    for source in spec.sources)
    return replace(spec, shape=shape, sources=sources)


def _row_axis(spec: WeightSpec) -> int:
    return 1 if is_expert(spec.name) else 0


def check_ranks(ranks: int, model: str, config: ModelConfig) -> None:
    """Refuse, in a sentence, a number of ranks that a model cannot be split over."""
    if ranks < 1:
        raise PlanError(f"--tensor-parallel-size must be at least 1; got {ranks}")
    what = _undivided(ranks, config)
    if what is not None:
        fitting = [str(count) for count in range(1, MOST_RANKS + 1) if _undivided(count, config) is None]
        raise PlanError(f"--tensor-parallel-size {ranks} does not divide the {what} of {model}; use "
                        f"{' or '.join((', '.join(fitting[:-1]), fitting[-1]) if len(fitting) > 1 else fitting)}")


def _undivided(ranks: int, config: ModelConfig) -> str | None:
    if config.num_heads % ranks:
        return f"{config.num_heads} attention heads"
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        return f"{config.num_kv_heads} key/value heads, nor they it,"
    has_dense = not config.is_moe or config.dense_layers
    if has_dense and config.intermediate_size % ranks:
        return f"{config.intermediate_size:,} columns of the MLP"
    if config.is_moe and config.expert_intermediate_size % ranks:
        return f"{config.expert_intermediate_size:,} columns of an expert"
    return None
