"""A runner without a model: every step ends at once and draws the next of a few ordinary tokens.

It shows what all the rest costs (scheduling, messages, text, HTTP). Its output means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spillover.engine.batch import Batch, ScheduledRequest, StepResult
from spillover.engine.outputs import Logprob, PositionLogprobs
from spillover.models.tokenizer import Tokenizer

CYCLE = 512  # different tokens that it draws


class NullStep:
    def __init__(self, batch: Batch, result: StepResult) -> None:
        self.batch = batch
        self._result = result

    def result(self) -> StepResult:
        return self._result


class NullRunner:
    def __init__(self, token_ids: Sequence[int], decode: Callable[[int], str] | None = None) -> None:
        self._token_ids = list(token_ids)
        self._decode = decode

    def launch(self, batch: Batch) -> NullStep:
        tokens = [self._draw(item) if item.samples else None for item in batch.items]
        return NullStep(batch, StepResult(
            tokens,
            [self._logprobs(item, token) for item, token in zip(batch.items, tokens, strict=True)],
            [self._prompt_logprobs(item) for item in batch.items],
        ))

    def sleep(self, blocks: Sequence[int]) -> None:
        pass

    def wake_up(self) -> None:
        pass

    @property
    def weight_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def _draw(self, item: ScheduledRequest) -> int:
        """Every request begins elsewhere in the cycle, at a place its prompt decides."""
        prompt = item.request.prompt_token_ids
        return self._token_ids[(prompt[-1] + len(prompt) + item.step) % len(self._token_ids)]

    def _logprobs(self, item: ScheduledRequest, token: int | None) -> PositionLogprobs | None:
        return None if token is None or item.request.params.logprobs is None else self._certain(token)

    def _prompt_logprobs(self, item: ScheduledRequest) -> list[PositionLogprobs] | None:
        request = item.request
        if request.params.prompt_logprobs is None or len(request.prompt_logprobs) >= request.num_prompt - 1:
            return None
        return [self._certain(t) for t in request.prompt_token_ids[item.start + 1:item.start + item.count + 1]]

    def _certain(self, token: int) -> PositionLogprobs:
        return {token: Logprob(0.0, 1, self._decode(token) if self._decode is not None else None)}


def ordinary_tokens(vocab_size: int, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> list[int]:
    """Up to CYCLE ids that are words or pieces of them: nothing special, nothing that ends a sequence."""
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
