"""Turns tokens into a caller's output: incremental text, stop strings, and the sequences of one answer together."""

from __future__ import annotations

from collections.abc import Sequence

from spillover.engine.output.detokenizer import IncrementalDetokenizer
from spillover.engine.output.outputs import NO_DRAFTS, CompletionOutput, RequestOutput, TokenSources
from spillover.engine.requests.request import Request
from spillover.models.tokenizer import Tokenizer


class Answer:
    """The n sequences of one request."""

    def __init__(self, requests: Sequence[Request], prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.requests = list(requests)
        self.prompt = prompt
        self._texts = {request.request_id: _Text(request, tokenizer) for request in requests}

    def advance(self, request: Request) -> str | None:
        """Detokenise a sequence's new tokens; return the stop string that they complete, if any."""
        return self._texts[request.request_id].advance()

    @property
    def finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def num_output(self) -> int:
        return sum(len(request.output_token_ids) for request in self.requests)

    def texts(self) -> list[str]:
        """Return the text of each sequence so far."""
        return [self._texts[request.request_id].text for request in self.requests]

    def output(self) -> RequestOutput:
        parent = self.requests[0]
        wanted = parent.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=parent.request_id if len(self.requests) == 1 else parent.request_id.rsplit(".", 1)[0],
            prompt=self.prompt,
            prompt_token_ids=parent.prompt_token_ids,
            outputs=[self._completion(index, request) for index, request in enumerate(self.requests)],
            finished=self.finished,
            prompt_logprobs=[None, *parent.prompt_logprobs] if wanted else None,
            sources=parent.sources or TokenSources(),
            timings=parent.timings if self.finished else None,
            num_preemptions=sum(request.num_preemptions for request in self.requests),
            drafts=sum((request.drafts for request in self.requests), NO_DRAFTS),
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        tokens = request.output_token_ids
        wanted = request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self._texts[request.request_id].text,
            token_ids=tokens,
            cumulative_logprob=sum(row[token].logprob for row, token in zip(request.logprobs, tokens, strict=True))
            if wanted else None,
            logprobs=list(request.logprobs) if wanted else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason if request.error is None else request.error,
        )


class _Text:
    """The text of one sequence so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._seen = request.num_prompt  # number of tokens, prompt included, that have been processed
        self._detokenizer = (IncrementalDetokenizer(tokenizer, request.token_ids, request.params)
                             if tokenizer is not None and request.params.detokenize else None)

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""

    def advance(self) -> str | None:
        if self._detokenizer is None:
            return None
        request, end = self._request, len(self._request.token_ids)
        ended_by_token = request.finish_reason == "stop" and request.token_ids[-1] in request.stop_ids
        shown = end - 1 if ended_by_token and not request.params.include_stop_str_in_output else end
        for index in range(self._seen, shown):
            self._detokenizer.append(request.token_ids[index])
            if self._detokenizer.stopped is not None and index + 1 < end:
                request.cut(index + 1)
                break
        self._seen = len(request.token_ids)
        if request.finish_reason is not None:
            self._detokenizer.flush()
        return self._detokenizer.stopped
