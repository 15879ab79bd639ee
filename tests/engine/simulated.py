"""A runner without a model: its KV remembers from which prefix each cache slot was computed, and every read is checked.

The token it draws is a function of the whole prefix as read back from the cache, so a wrong table, a block reused too
early or a stale prefix shows as a wrong token.
"""

from __future__ import annotations

import struct
import zlib

from spillover.engine.batch import Batch, ScheduledRequest, StepResult
from spillover.engine.request import Request

VOCAB = 50
SLOT = struct.Struct("<bbI")  # a cache slot in host memory: whether it was ever written, group, prefix


def chain(parent: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), parent)


def draw(prefix: int) -> int:
    return prefix % VOCAB


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """What the request must come to, computed alone and without a cache."""
    prefix = 0
    for token in request.prompt_token_ids:
        prefix = chain(prefix, token)
    tokens: list[int] = []
    limit = min(request.params.max_tokens or max_model_len, max_model_len - request.num_prompt)
    while len(tokens) < limit:
        token = draw(prefix)
        tokens.append(token)
        if token in request.stop_ids:
            break
        prefix = chain(prefix, token)
    return tokens


class SimulatedStep:
    def __init__(self, batch: Batch, tokens: list[int | None]) -> None:
        self.batch = batch
        self._tokens = tokens

    def result(self) -> StepResult:
        nothing = [None] * len(self._tokens)
        return StepResult(self._tokens, list(nothing), list(nothing))


class SimulatedRunner:
    """Executes at launch, in order, as a stream would."""

    def __init__(self, block_size: int, windows: tuple[int | None, ...]) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (group, prefix)
        self.drawn: dict[str, int] = {}
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> SimulatedStep:
        self.batches.append(batch)
        tokens: list[int | None] = []
        drawn: dict[str, int] = {}
        for item in batch.items:
            request = item.request
            ids = list(request.token_ids)
            if item.pending:
                assert item.start + item.count == len(ids) + 1
                ids.append(self.drawn[request.request_id])
            prefixes = [0]
            for token in ids[: item.start + item.count]:
                prefixes.append(chain(prefixes[-1], token))
            for group, window in enumerate(self.windows):
                table = item.tables[group]
                for position in range(item.start, item.start + item.count):
                    block = table[position // self.block_size]
                    assert block != 0, "a row is stored into the dummy block"
                    self.slots[block, position % self.block_size] = (group, prefixes[position + 1])
                first = max(0, item.start - window + 1) if window is not None else 0
                for position in range(first, item.start + item.count):
                    found = self._read(item, table, position)
                    assert found == (group, prefixes[position + 1]), "attention would read other KV"
            token = draw(prefixes[-1]) if item.samples else None
            tokens.append(token)
            if token is not None:
                drawn[request.request_id] = token
        self.drawn = drawn
        return SimulatedStep(batch, tokens)

    def _read(self, item: ScheduledRequest, table: list[int], position: int) -> tuple[int, int] | None:
        index, offset = divmod(position, self.block_size)
        if index < len(item.cold):
            assert table[index] == 0, "a block is both in host memory and on the device"
            _, group, prefix = SLOT.unpack_from(item.cold[index], offset * SLOT.size)
            return group, prefix
        return self.slots.get((table[index], offset))

    def close(self) -> None:
        pass
