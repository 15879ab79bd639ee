"""A runner without a model: every step returns the next of a few ordinary tokens, at once or after a simulated time.

It serves to measure everything but the model (scheduling, messages, text, HTTP). Its output is meaningless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from spillover.engine.batch.step_result import PromptObserver, accepted
from spillover.engine.output.outputs import Logprob, PositionLogprobs
from spillover.engine.step import DraftItem, HeadDrafts, NewRequest, Step, StepItem, StepResult, scored_positions
from spillover.engine.step_cost import StepCost
from spillover.engine.weights.placed import FixedWeights
from spillover.engine.weights.traffic import WeightTraffic
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.models.layers import KVViews
from spillover.models.tokenizer import Tokenizer

Changed = TypeVar("Changed")

CYCLE = 512  # maximum number of different tokens in its output


class NullStep:
    def __init__(self, step: Step, result: StepResult, ends: float = 0.0) -> None:
        """Make a launched step. `ends`: the time at which it completes, in seconds of the monotonic clock."""
        self.step = step
        self.ends = ends
        self._result = result

    def wait(self) -> None:
        left = self.ends - time.monotonic()
        if left > 0:
            time.sleep(left)

    def done(self) -> bool:
        return time.monotonic() >= self.ends

    def result(self) -> StepResult:
        self.wait()
        return self._result


class NullRunner:
    def __init__(self, token_ids: Sequence[int], decode: Callable[[int], str] | None = None,
                 simulated: tuple[float, ...] = (), cost: StepCost | None = None) -> None:
        """Make the runner. `simulated`: the share of drafts that count as accepted up to each position; `cost`: the
        simulated step time."""
        self._cost = cost or StepCost()
        self._ends = 0.0  # time at which the last launched step completes; steps run one after the other
        self._token_ids = list(token_ids)
        self._simulated = simulated
        self._decode = decode
        self._requests: dict[int, NewRequest] = {}
        self.transfers = CpuTransfers()  # idle: without weights and KV nothing is copied
        self.observe: PromptObserver | None = None  # never called: there are no logits
        self.drafting = None
        self.weights = FixedWeights({})
        self.kv = KVViews(torch.empty(1, 0), ())  # the dummy block, without bytes

    def launch(self, step: Step) -> NullStep:
        for id in step.ended:
            del self._requests[id]
        self._requests.update((request.id, request) for request in step.new)
        tokens = [self._draw(item) for item in step.items]
        if any(self._cost):
            taken = self._cost.seconds + self._cost.token_seconds * step.num_tokens
            self._ends = max(self._ends, time.monotonic()) + taken
        return NullStep(step, StepResult(
            tokens,
            [self._logprobs(item, drawn) for item, drawn in zip(step.items, tokens, strict=True)],
            [self._prompt_logprobs(item) for item in step.items],
        ), self._ends)

    def draft(self, items: Sequence[DraftItem], wait: bool = True) -> HeadDrafts:
        return HeadDrafts([()] * len(items))

    def in_order(self, change: Callable[[], Changed]) -> Changed:
        return change()

    def sleep(self, blocks: Sequence[int]) -> None:
        pass

    def wake_up(self) -> None:
        pass

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def weight_traffic(self) -> WeightTraffic:
        return self.weights.traffic()

    def close(self) -> None:
        self.transfers.close()

    def _draw(self, item: StepItem) -> tuple[int, ...]:
        """Return the token of the cycle that follows the prompt's last one."""
        if not item.num_samples:
            return ()
        request = self._requests[item.id]
        first = request.token_ids[request.num_prompt - 1] + item.end - item.num_samples + 1
        drawn = [self._token_ids[(first + sample) % len(self._token_ids)] for sample in range(item.num_samples)]
        return accepted(item, drawn, request, self._simulated)

    def _logprobs(self, item: StepItem, tokens: tuple[int, ...]) -> tuple[PositionLogprobs, ...]:
        wanted = self._requests[item.id].params.logprobs is not None
        return tuple(self._certain(token) for token in tokens) if wanted else ()

    def _prompt_logprobs(self, item: StepItem) -> list[PositionLogprobs] | None:
        request = self._requests[item.id]
        if not item.score_prompt:
            return None
        return [self._certain(token) for token in request.token_ids[scored_positions(item, request)]]

    def _certain(self, token: int) -> PositionLogprobs:
        return {token: Logprob(0.0, 1, self._decode(token) if self._decode is not None else None)}


def ordinary_tokens(vocab_size: int, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> list[int]:
    """Return up to CYCLE ids of tokens that are words or parts of words: no special or end-of-sequence tokens."""
    if tokenizer is None:
        found = [token for token in range(vocab_size) if token not in eos_token_ids]
        return found[:CYCLE] or [0]
    known = min(vocab_size, tokenizer.vocab_size)
    hidden = tokenizer.special_ids | set(eos_token_ids) | set(tokenizer.eos_token_ids)
    found = []
    for token in range(known):
        text = tokenizer.token_bytes(token)
        if token not in hidden and len(text) > 1 and text.decode("ascii", "replace").strip().isalpha():
            found.append(token)
            if len(found) == CYCLE:
                break
    return found or [token for token in range(known) if token not in hidden][:CYCLE] or [0]
