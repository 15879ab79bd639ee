"""A model with a paged KV pool, driven step by step without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from spillover.errors import CheckpointError
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.formats.gguf_codes import Codes
from spillover.models.checkpoint import Checkpoint
from spillover.models.layers import KVViews, ModelStep
from spillover.models.registry import architecture
from spillover.models.sharding.ranks import ONE_RANK, Ranks
from spillover.models.sharding.shard import Shard, shard_specs
from spillover.models.sharding.shard_view import open_shard
from support.models.loading import load_weights

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class StateDict:
    """A checkpoint backed by a dictionary."""

    path = Path("memory")

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def file(self, name: str) -> Path:
        return self.path

    def read(self, name: str, row: int | None = None) -> Tensor:
        return self.read_part(name, () if row is None else (row,))

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        return self.tensors[name].detach()[index].clone()

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        raise CheckpointError(f"tensor {name} is not stored in codes")

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class PagedModel:
    """A model with its pool. Sequences grow by chunks, blocks are in random order, those before a window are freed."""

    def __init__(self, checkpoint: Checkpoint, block_size: int = 8, num_blocks: int = 256, shard: Shard | None = None,
                 ranks: Ranks = ONE_RANK) -> None:
        arch = architecture(checkpoint.config)
        config, shard = arch.config(checkpoint.config), shard or Shard()
        self.model = arch.build(config, CPU, torch.float32, None, shard, ranks)
        specs, cuts = shard_specs(arch.weight_specs(config), config, shard)
        self.weights = load_weights(open_shard(checkpoint, cuts), config, specs, torch.float32, CPU)
        config = self.model.config
        self.block_size = block_size
        groups = self.model.groups
        shape = (num_blocks, len(groups[0].layers), 2, config.num_kv_heads, block_size * config.head_dim)
        # Data left by earlier requests must not affect results.
        self.kv = KVViews(torch.full(shape, 50.0), groups)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)
        self.lengths: dict[str, int] = {}
        self.tables: dict[tuple[str, int], list[int]] = {}

    def step(self, chunks: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Return the logits [len(chunk), vocab] of each sequence's new tokens."""
        starts = {name: self.lengths.get(name, 0) for name in chunks}
        ends = {name: starts[name] + len(chunk) for name, chunk in chunks.items()}
        self.lengths.update(ends)
        rows = torch.tensor([row for row, chunk in enumerate(chunks.values()) for _ in chunk], dtype=torch.int32)
        positions = torch.cat([torch.arange(starts[name], ends[name]) for name in chunks])
        query_start = torch.tensor([0, *(len(chunk) for chunk in chunks.values())]).cumsum(0).int()
        batches = tuple(
            AttentionBatch(
                query_start,
                torch.tensor(list(ends.values()), dtype=torch.int32),
                self._block_table(chunks, starts, group, members.window),
                positions,
                rows,
                self.block_size,
            )
            for group, members in enumerate(self.model.groups)
        )
        token_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        step, stack = ModelStep(token_ids, positions, batches), self.model.stack(self.weights, self.kv)
        hidden = self.model.forward_stacked(step, self.weights, self.kv, stack, lambda: None)
        logits = self.model.logits(hidden, self.weights)
        assert logits.dtype == hidden.dtype
        logits = logits.float()
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))

    def _block_table(
        self, chunks: Mapping[str, list[int]], starts: Mapping[str, int], group: int, window: int | None
    ) -> Tensor:
        tables = []
        for name in chunks:
            table = self.tables.setdefault((name, group), [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
            if window is not None:
                for behind in range(max(0, starts[name] - window + 1) // self.block_size):
                    table[behind] = 0
            tables.append(table)
        width = max(len(table) for table in tables)
        return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread: models this small only become slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5  # almost constant logits would match anything
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < TOLERANCE
