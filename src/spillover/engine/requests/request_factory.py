"""Makes requests from callers' input: tokenises prompts, checks limits, chooses seeds. Nothing runs here."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import TokenIds, token_array
from spillover.engine.structured.grammar_source import check_size, renamed
from spillover.engine.structured.structured import Grammar, GrammarCompiler, GrammarLimits
from spillover.errors import GrammarRefused, RequestError
from spillover.models.config import ModelConfig
from spillover.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestFactory:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int, seed: int,
                 compile_grammars: bool = True, grammar_limits: GrammarLimits | None = None,
                 sampling_defaults: Mapping[str, float] | None = None) -> None:
        """Make a factory. Without `compile_grammars`, the process that runs the requests compiles their grammars.

        `sampling_defaults`: fields of SamplingParams for requests that do not set them."""
        self.sampling_defaults: dict[str, Any] = dict(sampling_defaults or {})
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seed = seed
        self._names = itertools.count()
        self._compile_grammars = compile_grammars
        self._grammar_limits = grammar_limits
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()  # requests are made in several threads, which share one compiler
        if tokenizer is not None and (trouble := tokenizer.template_trouble()) is not None:
            logger.warning("chat requests will be rejected: %s", trouble)
        self._eos = frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())

    def make(self, text: str | None, token_ids: Sequence[SupportsIndex] | None, params: SamplingParams,
             priority: int = 0, cache_salt: str | None = None, name: str | None = None) -> list[Request]:
        """Return the n sequences of one request; the first is the parent whose prompt blocks the others share."""
        if token_ids is None:
            if text is None:
                raise RequestError("a prompt is a string, a list of token ids, or a dict with 'prompt' or "
                                   "'prompt_token_ids'")
            token_ids = self._need_tokenizer("a text prompt").encode(text)
        prompt = self._checked(token_ids, params)
        serial = next(self._names)
        name = name or str(serial)
        seed = params.seed if params.seed is not None else _mix(self._seed, serial)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        requests: list[Request] = []
        for index in range(params.n):
            requests.append(Request(
                request_id=name if params.n == 1 else f"{name}.{index}",
                prompt=prompt,
                params=dataclasses.replace(params, n=1),
                stop_ids=stop_ids,
                seed=seed if index == 0 else _mix(seed, index),
                priority=priority,
                cache_salt=cache_salt,
                parent=requests[0] if requests else None,
                grammar=self._grammar(params),
            ))
        return requests

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               **options: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template."""
        tokenizer = self._need_tokenizer("chat")
        text = tokenizer.apply_chat_template(messages, tools=tools, **options)
        return tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Stop the grammar compiler."""
        with self._lock:
            if self._grammars is not None:
                self._grammars.close()

    def _checked(self, token_ids: Sequence[SupportsIndex], params: SamplingParams) -> TokenIds:
        """Check the prompt and the parameters; return the prompt as an array, whatever type its integers had."""
        if not len(token_ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(token_ids) >= self._max_model_len:
            more = " or raise --max-model-len" if self._max_model_len < self._config.max_position else ""
            raise RequestError(f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have at "
                               f"most {self._max_model_len}; shorten the prompt{more}")
        try:
            prompt = token_array(token_ids)
        except struct.error:
            raise self._bad_token(token_ids) from None
        numbers = np.frombuffer(prompt, np.int32)
        if numbers.min() < 0 or numbers.max() >= self._config.vocab_size:
            raise self._bad_token(token_ids)
        check_token_ids(params, self._config.vocab_size)
        if params.structured_outputs is not None or params.stop:
            self._need_tokenizer("structured output or a stop string")
        if params.structured_outputs is not None:
            try:
                check_size(params.structured_outputs)
            except GrammarRefused as refusal:
                raise renamed(refusal, params.structured_outputs) from None
        return prompt

    def _bad_token(self, token_ids: Sequence[SupportsIndex]) -> RequestError:
        """Return the error for a prompt with a token that this model does not have."""
        try:
            plain = [operator.index(token) for token in token_ids]
        except TypeError:
            return RequestError("a prompt's token ids must be whole numbers, such as [1, 15043]")
        bad = next(token for token in plain if not 0 <= token < self._config.vocab_size)
        return RequestError(f"prompt token id {bad!r} is out of range: this model's token ids are 0 to "
                            f"{self._config.vocab_size - 1}")

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None or not self._compile_grammars:
            return None
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._need_tokenizer("structured output"), self._grammar_limits)
        return self._grammars.compile(params.structured_outputs)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, but the engine was started with "
                               "skip_tokenizer_init; start it without")
        return self._tokenizer


def _mix(seed: int, salt: int) -> int:
    """Return a different seed for each request and sibling, the same in every run."""
    return (seed * 6364136223846793005 + salt * 1442695040888963407 + 1) & (2**63 - 1)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check before a request is admitted that the model has all token ids in its parameters."""
    for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} names token {token}, but this model's tokens are 0 to {vocab_size - 1}")
