"""Backends for a model in this process (`LLM`) or in a separate process (`AsyncLLM`)."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from spillover.engine.output.outputs import RequestOutput
from spillover.engine.requests.request_factory import RequestFactory
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import SpilloverError
from spillover.models.tokenizer import Tokenizer
from spillover.programs.backend import (
    CONSTRAINTS,
    Answer,
    Backend,
    Message,
    OnText,
    Prompt,
    Score,
    TokenCounts,
    constraint,
)
from spillover.programs.lifetime import Lifetime, ProgramError
from spillover.programs.prefix_gate import PrefixGate

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.server.engine.async_llm import AsyncLLM

Result = TypeVar("Result")


def engine_backend(llm: Any) -> Backend:
    """Return the backend for an LLM or a started AsyncLLM, which it does not keep alive."""
    return LLMBackend(llm) if hasattr(llm, "stream") else AsyncLLMBackend(llm)


class EngineBackend:
    """The common base of both backends: the tokenizer is local, and so are the sampling parameters."""

    tokenizes = renders = True

    def __init__(self, tokenizer: Tokenizer | None, factory: RequestFactory, block_size: int, name: str) -> None:
        if tokenizer is None:
            raise ProgramError("programs need the tokenizer: leave skip_tokenizer_init out")
        self.name = name
        self.gate = PrefixGate(block_size)
        self._tokenizer = tokenizer
        self._factory = factory

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message]) -> list[int]:
        return self._factory.render(messages)

    def close(self) -> None:
        """Do nothing: the engine belongs to its creator."""

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        given = {name: value for name, value in options.items() if name not in CONSTRAINTS and value is not None}
        return SamplingParams(**{**self._factory.sampling_defaults, **given, "structured_outputs": constraint(options)})


class LLMBackend(EngineBackend):
    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.tokenizer, llm._factory, llm.plan.block_size, "the LLM")
        self._llm = weakref.ref(llm)

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        shown, output = 0, None
        stream = self._alive().stream({"prompt_token_ids": prompt.ids}, self._params(options),
                                      cancelled=lambda: lifetime.over)
        try:
            for output in stream:
                text = output.outputs[0].text
                on_text(text[shown:])
                shown = len(text)
                lifetime.remaining()
        except SpilloverError:
            lifetime.remaining()  # raises the reason, if the run was cancelled or has timed out
            raise
        finally:
            stream.close()
        assert output is not None
        return _answer(output)

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        try:
            outputs = self._alive().generate([{"prompt_token_ids": ids} for ids in prompts], _scoring(start), False,
                                             cancelled=lambda: lifetime.over)
        except SpilloverError:
            lifetime.remaining()
            raise
        return [_score(output, start) for output in outputs]

    def _alive(self) -> LLM:
        llm = self._llm()
        if llm is None:
            raise ProgramError("the LLM of this program no longer exists; keep a reference to it during the run")
        return llm


class AsyncLLMBackend(EngineBackend):
    def __init__(self, llm: AsyncLLM) -> None:
        if llm.loop is None:
            raise ProgramError("the AsyncLLM has not been started: `await llm.start()`, or `async with AsyncLLM(...)`")
        super().__init__(llm.tokenizer, llm.factory, llm.info.plan.block_size, "the AsyncLLM")
        self._llm = weakref.ref(llm)
        self.loop = llm.loop

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        params = self._params(options)

        async def ask() -> RequestOutput:
            shown, output = 0, None
            async with aclosing(self._alive().generate({"prompt_token_ids": prompt.ids}, params)) as outputs:
                async for output in outputs:
                    text = output.outputs[0].text
                    on_text(text[shown:])
                    shown = len(text)
            assert output is not None
            return output

        return _answer(self._result(ask(), lifetime))

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        async def last(ids: list[int]) -> RequestOutput:
            async with aclosing(self._alive().generate({"prompt_token_ids": ids}, _scoring(start))) as outputs:
                return [output async for output in outputs][-1]

        async def ask() -> list[RequestOutput]:
            tasks = [asyncio.ensure_future(last(ids)) for ids in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return [_score(output, start) for output in self._result(ask(), lifetime)]

    def _result(self, work: Coroutine[Any, Any, Result], lifetime: Lifetime) -> Result:
        """Wait for a coroutine on the event loop, in another thread than the loop's."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            with lifetime.closing(future.cancel):
                return future.result(lifetime.remaining())
        except (TimeoutError, CancelledError):
            lifetime.remaining()
            raise ProgramError("the AsyncLLM's event loop has ended") from None
        finally:
            future.cancel()

    def _alive(self) -> AsyncLLM:
        llm = self._llm()
        if llm is None:
            raise ProgramError("the AsyncLLM of this program no longer exists; keep a reference to it during the run")
        return llm


def _scoring(start: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start, detokenize=False)


def _answer(output: RequestOutput) -> Answer:
    made = output.outputs[0]
    return Answer(made.text, list(made.token_ids), made.finish_reason or "abort", made.stop_reason, _counts(output))


def _score(output: RequestOutput, start: int) -> Score:
    rows = (output.prompt_logprobs or [])[start:]
    return Score([(row or {})[token].logprob for row, token in zip(rows, output.prompt_token_ids[start:], strict=True)],
                 _counts(output))


def _counts(output: RequestOutput) -> TokenCounts:
    return TokenCounts(**dataclasses.asdict(output.sources))
