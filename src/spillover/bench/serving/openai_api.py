"""The OpenAI API as a load generator needs it: request bodies, and streams read chunk by chunk.

Servers differ in what a chunk contains. It may have a role and no text, nothing at all, several tokens, the counts
alone or with the last text, or an error in the middle of an answer. All such differences are handled in this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.target import PHASES
from spillover.errors import SpilloverError

Kind = Literal["completions", "chat"]
PATHS: Mapping[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Values of `--backend`: vLLM's names and those of engines, each with the dialect it uses.
BACKENDS: Mapping[str, Kind] = {
    "openai": "completions", "vllm": "completions", "spillover": "completions", "sglang": "completions",
    "sglang-oai": "completions", "llama.cpp": "completions", "openai-chat": "chat"}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
TIMINGS_HEADER = ("X-Spillover-Timings", "1")  # servers that do not know this header ignore it
MOST_TOKENS = 10_000_000  # maximum token count accepted for a request; metrics store a number per token

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class Dialect:
    """The API variant and options used for one server."""

    kind: Kind = "completions"
    model: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters and other fields of every request
    return_token_ids: bool = False  # request the ids of each chunk (vLLM, spillover), for exact token counts
    ignore_eos: bool | None = None  # None to follow each request

    def body(self, request: ServeRequest, prompt: Prompt, ids_matter: bool = False) -> bytes:
        """Return a request's body. `prompt` is everything that is sent: in a session, all earlier turns too.
        `ids_matter`: request the answer's token ids regardless of the options."""
        body: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        if self.kind == "chat":
            body |= {"messages": prompt, "max_completion_tokens": request.output_len}
        else:
            body |= {"prompt": prompt, "max_tokens": request.output_len}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        # A field that is off is left out: some servers reject fields that they do not know.
        if request.ignore_eos if self.ignore_eos is None else self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids or ids_matter:
            body["return_token_ids"] = True
        return _encode({**body, **self.extra_body, **request.extra})


Message = dict[str, Any]
Prompt = Sequence[int] | str | Sequence[Message]


class Conversation:
    """The history of a session, in the form in which it is sent again."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._messages: list[Message] = []
        self._text = ""
        self._ids: list[int] = []

    def next_prompt(self, request: ServeRequest) -> Prompt:
        """Return the whole prompt of the next turn."""
        if self._kind == "chat":
            if not isinstance(request.prompt, str):
                raise SpilloverError("this workload's prompts are token ids, which no chat message holds; use "
                                     "--backend openai (/v1/completions)")
            self._messages.append({"role": "user", "content": request.prompt})
            return self._messages
        if isinstance(request.prompt, str):
            self._text += request.prompt
            return self._text
        self._ids.extend(request.prompt)
        return self._ids

    def add_answer(self, text: str, token_ids: Sequence[int]) -> None:
        """Add the answer, which is part of the next prompt."""
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
        self._ids.extend(token_ids)


class Answer:
    """An answer read from a stream. `add_event` gets the data of each event and the time at which its bytes arrived."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None  # output tokens according to usage
        self.token_ids: list[int] = []
        self.sources: dict[str, int] | None = None
        self.timings: dict[str, float] | None = None
        self.finished = False  # whether a finish reason or [DONE] has arrived
        self._texts: list[str] = []
        self._times: list[float] = []
        self._counts: list[int | None] = []  # number of new tokens per chunk; None if the chunk does not say
        self._silent: list[float] = []  # times of chunks that have tokens but neither text nor ids
        self._counted = 0  # tokens that usage has counted so far, if every chunk has it

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def begun(self) -> bool:
        return bool(self._times)

    def add_event(self, at: float, data: bytes) -> int:
        """Process the data of an event; return the number of new tokens, as far as it can be determined now."""
        if data == b"[DONE]":
            self.finished = True
            return 0
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error = self.error or f"a chunk is not JSON: {data[:80]!r}"
            return 0
        if not isinstance(event, dict):
            self.error = self.error or f"a chunk is not an object: {data[:80]!r}"
            return 0
        if event.get("error"):
            self.error = self.error or error_text(event)
            return 0
        try:
            usage = event.get("usage")
            if usage:
                self._usage(usage)
            if "timings" in event:
                self._timings(event["timings"])
            choices = event.get("choices")
            return self._choice(at, choices[0], usage) if choices else 0
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            # Malformed data from a server may fail this request, never the run.
            self.error = self.error or f"a chunk is malformed ({error}): {data[:80]!r}"
            return 0

    def chunks(self, count: int | None = None) -> tuple[tuple[float, int], ...]:
        """Return (time, new tokens) of every chunk with text or ids. `count`: the total number of tokens, if known.

        Chunks that say how many tokens they have are trusted. Otherwise each has one; if the total is larger, the
        remainder is assigned to the chunks with the longest texts; if it is smaller (text that a server held back and
        sent at the end), the last chunks have none.
        """
        times, counts = self._times, self._counts
        if not times and self._silent and count:
            return ((self._silent[0], count),)  # tokens without text, such as special ones
        if None not in counts:
            return tuple(zip(times, (known for known in counts if known is not None), strict=True))
        shares = [1] * len(times)
        if count is not None and count > len(times):
            shares = _spread(count, [len(text) for text in self._texts])
        elif count is not None and count < len(times):
            shares = [1] * count + [0] * (len(times) - count)
        return tuple(zip(times, shares, strict=True))

    def _choice(self, at: float, choice: Mapping[str, Any], usage: Any) -> int:
        if choice.get("finish_reason") is not None:
            self.finished = True
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
        else:
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                text += (call.get("function") or {}).get("arguments") or ""
        ids = choice.get("token_ids") or ()
        if not isinstance(text, str) or not isinstance(ids, list | tuple):
            raise TypeError("its text is not a string or its token ids are not a list")
        if not text and not ids:
            # A chunk with only a role is not a token, and neither is one with only a finish reason.
            if (delta is None or "role" not in delta) and choice.get("finish_reason") is None:
                self._silent.append(at)
            return 0
        count = len(ids) or _logprob_count(choice) or None
        if usage and None not in self._counts:  # every chunk so far had counts: the difference is new
            total = _tokens(usage, "completion_tokens") or 0
            count = count or max(0, total - self._counted)
            self._counted = total
        self._times.append(at)
        self._texts.append(text)
        self._counts.append(count)
        self.token_ids.extend(ids)
        return count or 1

    def _usage(self, usage: Mapping[str, Any]) -> None:
        prompt, output = _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens")
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.output_tokens = self.output_tokens if output is None else output
        cached = _tokens(usage.get("prompt_tokens_details") or {}, "cached_tokens")
        if cached is not None and self.prompt_tokens is not None and self.sources is None:
            self.sources = {"computed": self.prompt_tokens - cached, "cached": cached}

    def _timings(self, timings: Any) -> None:
        """Store the server's timings: ours are a list, one entry per prompt; llama.cpp's an object in milliseconds."""
        if isinstance(timings, list) and timings:
            entry = timings[0]
            self.timings = {name: float(entry[name]) for name in PHASES
                            if name in entry}
            by_tier = entry.get("tokens")
            if by_tier is not None:
                self.sources = {tier: _tokens(by_tier, tier) or 0 for tier in by_tier}
        elif isinstance(timings, dict) and "predicted_ms" in timings:
            self.timings = {"prefill": timings["prompt_ms"] / 1e3, "decode": timings["predicted_ms"] / 1e3}
            self.sources = {"computed": _tokens(timings, "prompt_n") or 0, "device": _tokens(timings, "cache_n") or 0}


def error_text(body: Any) -> str:
    """Return a server's error message from any of the usual JSON shapes."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:500]


def refusal(status: int, body: bytes) -> str:
    try:
        message = error_text(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body[:200].decode(errors="replace").strip()
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def tokenize_bodies(text: str, model: str | None) -> list[bytes]:
    """Return the bodies to try with POST /tokenize: the one of vLLM and spillover, then llama.cpp's."""
    named = {} if model is None else {"model": model}
    return [_encode({**named, "prompt": text, "add_special_tokens": False}), _encode({"content": text})]


def tokens_of(body: bytes) -> list[int]:
    """Return the ids in an answer of /tokenize; an empty list if the answer is something else."""
    try:
        tokens = _decode(body).get("tokens")
    except (msgspec.DecodeError, AttributeError):
        return []
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else []


def _tokens(counts: Mapping[str, Any], name: str) -> int | None:
    """Return a token count, None if it is absent; raise ValueError if it is not a valid count."""
    count = counts.get(name)
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"{name} is {str(count)[:40]}, which is not a number of tokens")
    return count


def _logprob_count(choice: Mapping[str, Any]) -> int:
    logprobs = choice.get("logprobs")
    return len(logprobs.get("tokens") or logprobs.get("content") or ()) if isinstance(logprobs, dict) else 0


def _spread(total: int, weights: Sequence[int]) -> list[int]:
    """Distribute tokens over chunks: at least one each, the rest in proportion to the weights, rounded to add up."""
    spare, weight = total - len(weights), max(1, sum(weights))
    exact = [spare * one / weight for one in weights]
    shares = [1 + int(part) for part in exact]
    largest = sorted(range(len(exact)), key=lambda place: int(exact[place]) - exact[place])
    for place in largest[: total - sum(shares)]:
        shares[place] += 1
    return shares
