"""The offline API: `LLM(model, **flags).generate(prompts, params)`. The engine runs in this process, in a separate
thread, so that an LLM may be used from any number of threads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from types import TracebackType
from typing import Any, cast

import torch

from spillover.engine.assemble import Assembly, assemble
from spillover.engine.batch.step_result import PromptObserver
from spillover.engine.config import EngineConfig
from spillover.engine.engine_thread import EngineThread
from spillover.engine.loop import ModelRunner
from spillover.engine.output.output_processor import Answer
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.requests.prompts import (
    Message,
    Params,
    Prompt,
    conversation,
    conversations,
    params_for,
    priorities_for,
    prompt_list,
    prompt_parts,
)
from spillover.engine.requests.request_factory import RequestFactory
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.stats import EngineStats
from spillover.engine.structured.structured import GrammarLimits
from spillover.errors import SpilloverError
from spillover.models.generation_config import sampling_defaults
from spillover.models.tokenizer import Tokenizer
from spillover.plan.planner import Plan
from spillover.progress import counted, stages


class LLM:
    """A loaded model, ready for requests; every engine flag is a keyword (`max_num_batched_tokens=48`).

    While the model loads, a bar on stderr shows the progress; `progress(done, total, stage)` replaces it.
    Safe to use from any number of threads; their requests run in one batch. `close` aborts the requests of all threads.
    """

    def __init__(self, model: str | PathLike[str] | None = None, *, on_plan: Callable[[Plan], None] | None = None,
                 progress: Callable[[int, int, str], None] | None = None, **flags: Any) -> None:
        config = EngineConfig.from_flags(model=model, **flags)
        with stages() as show:
            self._parts: Assembly = assemble(config, on_plan, progress or (
                lambda done, total, stage: show(stage, done, total)))
        self.engine = self._parts.engine  # only the engine thread may use it while a call runs
        self.plan = self._parts.plan
        self.config = self._parts.config
        self._factory = RequestFactory(self._parts.model_config, self._parts.tokenizer, self.plan.max_model_len,
                                       self.config.seed, grammar_limits=GrammarLimits.of(self.config),
                                       sampling_defaults=sampling_defaults(self._parts.path,
                                                                           self.config.generation_config))
        self._thread = EngineThread(self.engine)
        weakref.finalize(self, self._thread.abandon)
        if self.plan.device == "cuda":
            self._thread.run(torch.cuda.synchronize)  # makes the CUDA context current in that thread
        weakref.finalize(self, self._factory.close)

    # Requests

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True,
                 priority: Sequence[int] | None = None, cache_salt: str | None = None,
                 cancelled: Callable[[], bool] | None = None) -> list[RequestOutput]:
        """Return one result per prompt, in the order of prompts. All prompts are checked before the first one runs.

        `cancelled` is called at least once per second; if it returns True, the requests fail with a SpilloverError.
        """
        items = prompt_list(prompts)
        params = params_for(len(items), sampling_params, self.get_default_sampling_params())
        given = zip(items, params, priorities_for(len(items), priority), strict=True)
        answers = [self._answer(prompt, params, important, cache_salt) for prompt, params, important in given]
        begun, tokens = time.perf_counter(), 0
        ending = closing(self._thread.answers(answers, cancelled))
        with counted(len(answers), "requests", use_tqdm) as show, ending as complete:
            for done, answer in enumerate(complete, 1):
                tokens += answer.num_output
                show(done, f"{tokens / (time.perf_counter() - begun):,.1f} tok/s")
        return [answer.output() for answer in answers]

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params = None,
             use_tqdm: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
             **template_options: Any) -> list[RequestOutput]:
        """Answer a conversation, rendered by the model's chat template; a list of them gives one result for each."""
        prompts = [self._factory.render(each, tools, **template_options) for each in conversations(messages)]
        return self.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
               cancelled: Callable[[], bool] | None = None) -> Generator[RequestOutput]:
        """Yield the answer to one prompt whenever it has grown. Closing the iterator aborts the request, and so does
        `cancelled`, as for `generate`."""
        params = params_for(1, sampling_params, self.get_default_sampling_params())[0]
        return self._thread.outputs(self._answer(prompt, params, 0, None), cancelled)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None,
                    **template_options: Any) -> Iterator[RequestOutput]:
        ids = self._factory.render(conversation(messages), None, **template_options)
        return self.stream({"prompt_token_ids": ids}, sampling_params)

    # Inspection

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling defaults of the model's generation config, as fields of SamplingParams."""
        return self._factory.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the params of calls without sampling_params: SamplingParams() updated by the generation config."""
        return SamplingParams(**self._factory.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def stats(self) -> EngineStats:
        return self._thread.run(lambda: EngineStats.of(self.engine))

    def reset_prefix_cache(self) -> None:
        self._thread.run(self.engine.scheduler.reset_prefix_cache)

    def observe_prompt_logits(self, observe: PromptObserver | None) -> None:
        """Set a callback `observe(prompt, position, logits)` for the logits [P, V] from which the prompt_logprobs of
        each request are computed, from the prompt's token at `position` on; None removes it. It is called in the
        engine's thread while a step runs, and again for a request that was preempted."""
        if self.config.load_format == "null":
            raise SpilloverError("load_format null has no model, and so no logits")
        runner = cast(ModelRunner, self.engine.runner)

        def change() -> None:
            runner.observe = observe

        self._thread.run(change)

    # Closing

    def close(self) -> None:
        """Stop the engine; requests still running fail with a SpilloverError. A second call does nothing."""
        self._thread.close()
        self._factory.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _answer(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None) -> Answer:
        self._thread.check_open()
        text, token_ids = prompt_parts(prompt)
        requests = self._factory.make(text, token_ids, params, priority, cache_salt)
        return Answer(requests, text, self._parts.tokenizer)
