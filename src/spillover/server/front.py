"""State shared by all routes: the engine, the settings, the recorder, and threads for slow preparation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HttpRequest

from spillover.errors import EngineDead
from spillover.models.literal_text import LiteralText
from spillover.models.tokenizer import Tokenizer
from spillover.server.api.answers.token_text import TokenTexts
from spillover.server.api.errors import ApiError
from spillover.server.api.requests.sampling import Context
from spillover.server.engine.async_llm import AsyncLLM
from spillover.server.settings import ServerSettings

if TYPE_CHECKING:
    from spillover.server.telemetry.recorder import Recorder

Result = TypeVar("Result")

_USUAL_CHARACTERS = 16  # characters per token; more than any text has on average
_CHUNK_CHARACTERS = 65_536  # a text that may be too long is tokenised in chunks of this size until that is certain
_CUT_TOKENS = 16  # upper bound of the tokens that cutting a text in two can add
LARGE_BYTES = 65_536  # larger bodies are processed one at a time
INLINE_BYTES = 8192  # larger bodies are parsed and prepared in a thread, as they would stall every stream


@dataclass
class Front:
    client: AsyncLLM
    settings: ServerSettings
    recorder: Recorder
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # True once the server must stop: it is not ready, though requests may still be accepted
    # Two threads: one long text must not stall every other request, and more would take cores from the engine.
    prepare_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "spillover-prepare"))
    # One thread for large bodies: parsing holds the interpreter for tens of milliseconds, and two would take turns.
    large_body_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "spillover-large"))
    _texts: TokenTexts | None = None
    _literal: tuple[Tokenizer, LiteralText] | None = None
    _making_literal: threading.Lock = field(default_factory=threading.Lock)

    def model_name(self, requested: str | None) -> str:
        """Return the model name that an answer carries; raise a 404 error if the requested model is not served."""
        if requested is not None and requested not in self.settings.model_names:
            names = ", ".join(f"'{name}'" for name in self.settings.model_names)
            raise ApiError(404, f"The model '{requested[:256]}' is not served here; there are {names}.", "model",
                           "model_not_found")
        return self.settings.served_model_names[0]

    def require_engine(self) -> None:
        """Refuse requests while the engine is not ready; called first by routes that need the model."""
        if not self.client.ready:
            raise EngineDead(f"The engine is not ready ({self.client.engine_state}): {self.client.trouble}.")

    @property
    def started_once(self) -> bool:
        """Return whether the model has been loaded, even if the engine has died since."""
        return getattr(self.client, "info", None) is not None

    @property
    def context(self) -> Context:
        info = self.client.info
        return Context(info.max_model_len, info.model_config.max_position)

    def check_length(self, text: str) -> None:
        """Refuse a text that is too long without tokenising all of it."""
        context, characters = self.client.info.max_model_len, len(text)
        if characters <= _USUAL_CHARACTERS * context:
            return
        least, counted = characters // self.texts.longest, 0
        chunks = iter(range(0, characters, _CHUNK_CHARACTERS))
        while least < context and (start := next(chunks, None)) is not None:
            chunk = text[start:start + _CHUNK_CHARACTERS]
            counted += len(self.tokenizer.encode(chunk, False)) - _CUT_TOKENS
            least = max(least, counted)
        if least >= context:
            raise ApiError(400, f"This model's context holds {context} tokens, but a prompt of {characters} characters "
                                f"has at least {least}. {self.context.advice}", code="context_length_exceeded")

    @property
    def tokenizer(self) -> Tokenizer:
        if self.client.tokenizer is None:
            raise ApiError(400, "this needs a tokenizer, but the server was started with --skip-tokenizer-init; "
                                "send token ids to /v1/completions")
        return self.client.tokenizer

    @property
    def literal_text(self) -> LiteralText | None:
        """Return the encoder for conversations whose messages may not hold special tokens; None if they may."""
        if self.settings.special_tokens_in_user_text:
            return None
        with self._making_literal:
            if self._literal is None or self._literal[0] is not self.tokenizer:
                self._literal = self.tokenizer, LiteralText(self.tokenizer)
            return self._literal[1]

    @property
    def texts(self) -> TokenTexts:
        if self._texts is None or self._texts.tokenizer is not self.client.tokenizer:
            self._texts = TokenTexts(self.client.tokenizer)
        return self._texts

    def close(self) -> None:
        for pool in (self.prepare_pool, self.large_body_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def front_of(request: HttpRequest) -> Front:
    front: Front = request.app.state.front
    return front


async def prepare(request: HttpRequest, work: Callable[[], Result], renders: bool = False) -> Result:
    """Run parsing, checking or tokenising inline if the request's body is small, otherwise in a thread.

    Only this function decides which. Work that takes long for a small body is limited by counts; but work that
    `renders` a chat template always runs in a thread, because the time of a template is bounded, but not short.
    """
    nbytes, front = request.scope.get("spillover.body_bytes", 0), front_of(request)
    if nbytes <= INLINE_BYTES and not renders:
        return work()
    pool = front.prepare_pool if nbytes <= LARGE_BYTES else front.large_body_pool
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def wants_timings(request: HttpRequest, body: Any) -> bool:
    return bool(body.return_timings) or request.headers.get("x-spillover-timings") in ("1", "true")
