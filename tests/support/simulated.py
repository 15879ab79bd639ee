"""A runner without a model: its KV records the prefix from which each cache slot was computed, and checks every read.

The token it draws is a function of the whole prefix as read from the cache, so a wrong block table, a block reused too
early or a stale prefix appears as a wrong token.
"""

from __future__ import annotations

import struct
import zlib

from spillover.engine.batch.step_result import accepted
from spillover.engine.requests.request import Request
from spillover.engine.step import NewRequest, Step, StepItem, StepResult, decode_step, encode_step
from spillover.memory.spill.host import Slots

VOCAB = 50
SLOT = struct.Struct("<bbI")  # a cache slot in host memory: whether it was ever written, layer group, prefix


def chain(parent: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), parent)


def draw(prefix: int) -> int:
    return prefix % VOCAB


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """Return the request's tokens, computed alone and without a cache."""
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
    def __init__(self, step: Step, tokens: list[tuple[int, ...]]) -> None:
        self.step = step
        self._tokens = tokens

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(self._tokens, [()] * len(self._tokens), [None] * len(self._tokens))


class SimulatedRunner:
    """Executes steps at launch, in order, as a stream would. Like any runner, it knows requests only from the messages:
    each step is encoded to bytes and decoded before it runs."""

    def __init__(self, block_size: int, windows: tuple[int | None, ...]) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (group, prefix)
        self.token_ids: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.host_slots: Slots | None = None  # slots of the host tier, if there is one
        self.steps: list[Step] = []
        self.requests: dict[int, NewRequest] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}  # prompts of all requests so far

    def launch(self, step: Step) -> SimulatedStep:
        step = decode_step(encode_step(step))
        self.steps.append(step)
        for id in step.ended:
            del self.token_ids[id], self.tables[id]
        for new in step.new:
            assert new.id not in self.token_ids
            self.token_ids[new.id] = list(new.token_ids)
            self.requests[new.id] = new
            self.prompts[new.id] = new.token_ids[:new.num_prompt]
            self.tables[new.id] = [[] for _ in self.windows]
        tokens: list[tuple[int, ...]] = []
        for item in step.items:
            ids, tables = self.token_ids[item.id], self.tables[item.id]
            assert item.end - len(item.draft) <= len(ids)
            prefixes = [0]
            for token in [*ids, *item.draft][: item.end]:
                prefixes.append(chain(prefixes[-1], token))
            for group, window in enumerate(self.windows):
                table = tables[group]
                assert item.first_block <= len(table)
                table[item.first_block:] = item.new_blocks[group]
                for position in range(item.start, item.end):
                    block = table[position // self.block_size]
                    assert block != 0, "a row is stored into the dummy block"
                    self.slots[block, position % self.block_size] = (group, prefixes[position + 1])
                first = max(0, item.start - window + 1) if window is not None else 0
                for position in range(first, item.end):
                    found = self._read(item, table, position)
                    assert found == (group, prefixes[position + 1]), "attention would read other KV"
            drawn = tuple(draw(prefix) for prefix in prefixes[len(prefixes) - item.num_samples:])
            assert len(drawn) == (item.end >= len(ids)) + len(item.draft), "what is not the prompt's is sampled from"
            drawn = accepted(item, drawn, self.requests[item.id])
            ids.extend(drawn)
            tokens.append(drawn)
        return SimulatedStep(step, tokens)

    def _read(self, item: StepItem, table: list[int], position: int) -> tuple[int, int] | None:
        index, offset = divmod(position, self.block_size)
        if index < len(item.host_blocks):
            assert table[index] == 0, "a block is both in host memory and on the device"
            assert self.host_slots is not None
            _, group, prefix = SLOT.unpack_from(self.host_slots.view(item.host_blocks[index]), offset * SLOT.size)
            return group, prefix
        return self.slots.get((table[index], offset))

    def close(self) -> None:
        pass
