"""The offline front door: `LLM(model, **flags).generate(prompts, params)`. The loop runs in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from spillover.engine.assemble import Assembly, assemble
from spillover.engine.config import EngineConfig
from spillover.engine.output_processor import Answer
from spillover.engine.outputs import RequestOutput
from spillover.engine.request_factory import RequestFactory
from spillover.engine.sampling_params import SamplingParams
from spillover.engine.stats import EngineStats
from spillover.models.tokenizer import Tokenizer
from spillover.plan.planner import Plan

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}
Message = Mapping[str, Any]
WAIT_SECONDS = 0.005  # between looks, where all requests wait for copies
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded and ready; every engine flag is a keyword (`max_num_batched_tokens=48`)."""

    def __init__(self, model: str | None = None, *, on_plan: Callable[[Plan], None] | None = None,
                 progress: Callable[[int, int, str], None] | None = None, **flags: Any) -> None:
        self._parts: Assembly = assemble(EngineConfig.from_flags(model=model, **flags), on_plan, progress)
        self.engine = self._parts.engine
        self.plan = self._parts.plan
        self.config = self._parts.config
        self._factory = RequestFactory(self._parts.model_config, self._parts.tokenizer, self.plan.max_model_len,
                                       self.config.seed)
        self._answers: dict[str, Answer] = {}  # by the name of each of its sequences

    # Asking

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True,
                 priority: Sequence[int] | None = None, cache_salt: str | None = None) -> list[RequestOutput]:
        """One result a prompt, in their order. Every prompt is checked before the first one runs."""
        items = _as_list(prompts)
        params = _params_for(items, sampling_params)
        answers = [
            self._answer(prompt, each, priority[index] if priority else 0, cache_salt)
            for index, (prompt, each) in enumerate(zip(items, params, strict=True))
        ]
        bar = tqdm(total=len(answers), desc="Requests", unit="req", dynamic_ncols=True, disable=not use_tqdm)
        try:
            self._add(answers)
            tokens = 0
            while any(not answer.finished for answer in answers):
                for answer in self._step():
                    if answer.finished:
                        tokens += answer.num_output
                        bar.update()
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / elapsed:.1f} tok/s" if elapsed else "", refresh=False)
        finally:
            bar.close()
            self._drop(answers)
        return [answer.output() for answer in answers]

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params = None,
             use_tqdm: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
             **template_options: Any) -> list[RequestOutput]:
        """Messages through the model's chat template; a list of conversations gives a result each."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._factory.render(each, tools, **template_options) for each in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The growing answer to one prompt, a result whenever it has grown; closing the iterator ends the request."""
        answer = self._answer(prompt, sampling_params or SamplingParams(), 0, None)
        try:
            self._add([answer])
            shown, finished = 0, False
            while not finished:
                if not answer.finished:  # perhaps in a step that another iterator made
                    self._step()
                finished = answer.finished
                if answer.num_output > shown or finished:
                    shown = answer.num_output
                    yield answer.output()
        finally:
            self._drop([answer])

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None,
                    **template_options: Any) -> Iterator[RequestOutput]:
        ids = self._factory.render(messages, None, **template_options)
        return self.stream({"prompt_token_ids": ids}, sampling_params)

    # Looking

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def stats(self) -> EngineStats:
        return EngineStats.of(self.engine)

    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.kv.reset_prefix_cache()

    # Leaving

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # One turn

    def _answer(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None) -> Answer:
        text, token_ids = _parts_of(prompt)
        requests = self._factory.make(text, token_ids, params, priority, cache_salt)
        return Answer(requests, text, self._parts.tokenizer)

    def _add(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            for request in answer.requests:
                self._answers[request.request_id] = answer
                self.engine.scheduler.add(request)

    def _step(self) -> list[Answer]:
        grown: dict[int, Answer] = {}
        steps = self.engine.num_steps
        changed = self.engine.step()
        if not changed and self.engine.num_steps == steps:
            self.engine.wait(WAIT_SECONDS)
        for request in changed:
            answer = self._answers.get(request.request_id)
            if answer is None:
                continue
            stop_string = answer.advance(request)
            if stop_string is not None:
                self.engine.scheduler.stop(request, "stop", stop_string)
            grown[id(answer)] = answer
        return list(grown.values())

    def _drop(self, answers: Sequence[Answer]) -> None:
        """Forget answers; what still runs of them (the caller was interrupted) is ended and its blocks come free."""
        for answer in answers:
            for request in answer.requests:
                self.engine.scheduler.stop(request, "abort")
                self._answers.pop(request.request_id, None)
        while self.engine.settling and not self._answers:
            self._step()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters; give one, or one a prompt")
    return params


def _parts_of(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        return prompt.get("prompt"), prompt.get("prompt_token_ids")
    return None, list(prompt)
