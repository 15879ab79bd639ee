"""A model behind an OpenAI-compatible server: spillover, vLLM, SGLang, llama.cpp, or any other.

If the server tokenizes (/tokenize), prompts are token ids, and forks share them exactly. Otherwise they are text and
messages: sharing is up to the server, and `select` is not possible. If the tokenizer of a spillover server is also on
this machine, text is tokenised locally, without a request per text; chats are rendered by the server.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillover.bench.serving.served_model import ServedModel, ServerTokenizer
from spillover.bench.serving.sse import EventParser
from spillover.errors import SpilloverError
from spillover.programs.backend import CONSTRAINTS, Answer, Message, OnText, Prompt, Score, TokenCounts
from spillover.programs.lifetime import Lifetime, ProgramError
from spillover.programs.prefix_gate import PrefixGate

if TYPE_CHECKING:
    from spillover.models.tokenizer import Tokenizer

KEPT_TEXTS = 4096  # maximum number of texts whose tokens are cached
SHORT_SECONDS = 60.0  # timeout of requests that do not run the model
SOURCES = ("computed", "device", "host", "pool", "disk", "remote")


class HttpBackend:
    def __init__(self, url: str, model: str | None = None, *, api_key: str | None = None, block_size: int = 16) -> None:
        """Connect to a server and query its model. `block_size` is the server's tokens per KV block if it is not 16."""
        self._url = url.rstrip("/").removesuffix("/v1")
        parts = urllib.parse.urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProgramError(f"a server's URL is like http://127.0.0.1:8000; got '{url}'")
        self._parts = parts
        self._headers = {"Content-Type": "application/json", "X-Spillover-Timings": "1",
                         **({} if api_key is None else {"Authorization": f"Bearer {api_key}"})}
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False
        served = ServedModel.connect(self._url, model, api_key)
        self.name = f"{served.name} at {self._url}"
        self.gate = PrefixGate(block_size)
        self._model = served.name
        own = served.tokenizer if isinstance(served.tokenizer, ServerTokenizer) else None
        self._tokenizer = None if own is None else own.for_server(self)
        self.tokenizes = self._tokenizer is not None
        self._here = self._local_tokenizer() if self.tokenizes else None
        self._encoded = functools.lru_cache(KEPT_TEXTS)(self._encode)
        self._decoded = functools.lru_cache(KEPT_TEXTS)(lambda ids: self._own_tokenizer().decode(ids))
        self._served = self._cards()

    # Tokens

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(self._encoded(text, special)) if self._here is None else self._here.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        if self._here is not None:
            return self._here.decode(ids, skip_special_tokens=False)
        return self._decoded(tuple(ids)) if len(ids) == 1 else self._own_tokenizer().decode(ids) if ids else ""

    def render(self, messages: Sequence[Message]) -> list[int]:
        return self._own_tokenizer().render(messages)

    @functools.cached_property
    def renders(self) -> bool:
        """Return whether the server tokenizes chats: some only tokenize text, and a base model has no template."""
        try:
            return self.tokenizes and bool(self.render([{"role": "user", "content": "a"}]))
        except SpilloverError:
            return False

    def same_server(self) -> bool:
        """Return whether the server still has the same model, so that cached results are valid."""
        return self._cards() == self._served

    def _cards(self) -> list[Any]:
        """Return what distinguishes servers. `created` is used for spillover only; others return the current time."""
        answer = json.loads(b"".join(self._chunks("/v1/models", None, Lifetime(SHORT_SECONDS))))
        cards = answer.get("data") or []
        return [(card.get("id"), card.get("root"), card.get("max_model_len"),
                 card.get("created") if card.get("owned_by") == "spillover" else None) for card in cards]

    def _local_tokenizer(self) -> Tokenizer | None:
        """Return the server's tokenizer loaded from local disk; None if it does not exist or gives other tokens."""
        try:
            info = json.loads(b"".join(self._chunks("/kv/info", None, Lifetime(SHORT_SECONDS))))
            path, digest, template = info["tokenizer"], info["tokenizer_digest"], info["chat_template"]
            if path is None or not Path(path).exists():
                return None
            from spillover.models.tokenizer import load_tokenizer

            found = load_tokenizer(path, template)
            return found if found.fingerprint == digest else None
        except (SpilloverError, OSError, ValueError, KeyError, TypeError):  # another server, or unsuitable files
            return None

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._own_tokenizer().encode(text, special))

    def _own_tokenizer(self) -> ServerTokenizer:
        if self._tokenizer is None:
            raise ProgramError(f"{self.name} has no /tokenize")
        return self._tokenizer

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response to a short request, such as tokenising a text."""
        answer: dict[str, Any] = json.loads(b"".join(self._chunks(path, body, Lifetime(SHORT_SECONDS))))
        return answer

    # Requests

    def generate(self, prompt: Prompt, options: Mapping[str, Any], lifetime: Lifetime, on_text: OnText) -> Answer:
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **_sampling(options)}
        chat = prompt.ids is None and prompt.messages is not None
        if chat:
            body["messages"] = list(prompt.messages or ())
            if body["messages"][-1]["role"] == "assistant":
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        elif prompt.ids is None:
            body["prompt"] = prompt.text
        else:
            body |= {"prompt": prompt.ids, "return_token_ids": True, "add_special_tokens": False}
        grown = _Growing(on_text, chat)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with contextlib.closing(self._events(path, body, lifetime)) as events:
            for event in events:
                grown.take(event)
        return grown.answer(self.name)

    def score(self, prompts: Sequence[list[int]], start: int, lifetime: Lifetime) -> list[Score]:
        body = {"model": self._model, "prompt": list(prompts), "max_tokens": 1, "temperature": 0, "echo": True,
                "logprobs": 1, "prompt_logprobs_start": start, "add_special_tokens": False}
        answer = json.loads(b"".join(self._chunks("/v1/completions", body, lifetime)))
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        rows = [(choice.get("logprobs") or {}).get("token_logprobs") or [] for choice in choices]
        if len(rows) != len(prompts) or any(len(row) < len(ids) for row, ids in zip(rows, prompts, strict=True)):
            raise ProgramError(f"{self.name} gives no log probabilities of a prompt's tokens (echo with logprobs in "
                               "/v1/completions), which select needs; spillover, vLLM and SGLang do")
        counts = _counts(answer, sum(map(len, prompts)))
        each = [TokenCounts()] * (len(prompts) - 1)  # the server's counts are for all prompts together
        return [Score([float(value) for value in row[start:len(ids)]], count)
                for row, ids, count in zip(rows, prompts, [counts, *each], strict=True)]

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # One HTTP exchange

    def _events(self, path: str, body: Mapping[str, Any], lifetime: Lifetime) -> Generator[dict[str, Any]]:
        parser = EventParser()
        with contextlib.closing(self._chunks(path, body, lifetime)) as chunks:
            for chunk in chunks:
                for data in parser.feed(chunk):
                    if data != b"[DONE]":
                        yield json.loads(data)

    def _chunks(self, path: str, body: Mapping[str, Any] | None, lifetime: Lifetime) -> Generator[bytes]:
        """Yield a response's body as it arrives; leaving the iterator ends the request. `body` None sends a GET."""
        payload, method = (None, "GET") if body is None else (json.dumps(body).encode(), "POST")
        for attempt in (1, 2):
            connection, used = self._connection(lifetime)
            kept = False
            try:
                with lifetime.closing(functools.partial(_close, connection)):
                    if connection.sock is None:
                        connection.connect()
                    lifetime.remaining()  # a cancellation before the socket existed could not shut it down
                    connection.request(method, self._parts.path + path, payload, self._headers)
                    response = connection.getresponse()
                    if not 200 <= response.status < 300:
                        raise ProgramError(_refusal(self.name, response))
                    while chunk := response.read1(65536):
                        yield chunk
                        if connection.sock is not None:
                            connection.sock.settimeout(lifetime.remaining())
                kept = response.isclosed() and not response.will_close
                return
            except (http.client.HTTPException, OSError) as error:
                lifetime.remaining()  # raises the reason, if the run was cancelled or has timed out
                if attempt == 1 and used and isinstance(error, ConnectionError | http.client.HTTPException):
                    continue  # the server had closed an idle connection
                raise ProgramError(f"no answer from {self._url}{path} ({error or type(error).__name__})") from error
            finally:
                if kept:
                    self._keep(connection)
                else:
                    connection.close()

    def _connection(self, lifetime: Lifetime) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it has been used before."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None and kept.sock is not None:
            kept.sock.settimeout(lifetime.remaining())
            return kept, True
        host, port, seconds = str(self._parts.hostname), self._parts.port, lifetime.remaining()
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context()), False
        return http.client.HTTPConnection(host, port, timeout=seconds), False

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class _Growing:
    """An answer assembled from the events of a stream."""

    def __init__(self, on_text: OnText, chat: bool) -> None:
        self._on_text, self._chat = on_text, chat
        self._text: list[str] = []
        self._ids: list[int] | None = None
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._counts = TokenCounts()

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            raise ProgramError(str(error.get("message", error) if isinstance(error, dict) else error))
        for choice in event.get("choices") or ():
            text = (choice["delta"].get("content") if self._chat else choice.get("text")) or ""
            self._text.append(text)
            if choice.get("token_ids") is not None:
                self._ids = [*(self._ids or []), *choice["token_ids"]]
            self._finish = choice.get("finish_reason") or self._finish
            self._stop = choice.get("stop_reason") if choice.get("stop_reason") is not None else self._stop
            if text or not self._chat:  # a chat's first event has only the role, before anything is computed
                self._on_text(text)
        if event.get("usage"):
            self._counts = _counts(event, int(event["usage"]["prompt_tokens"]))

    def answer(self, name: str) -> Answer:
        if self._finish is None:
            raise ProgramError(f"{name} ended the stream before the answer was complete")
        return Answer("".join(self._text), self._ids, self._finish, self._stop, self._counts)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a gen's options as fields of a request; the server's defaults apply to those not given."""
    body = {name: value for name, value in options.items() if name not in CONSTRAINTS and value is not None}
    for name in ("stop", "stop_token_ids"):
        if isinstance(body.get(name), tuple | set):
            body[name] = list(body[name])
    schema = options.get("schema")
    if schema is not None:
        described = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
        described = json.loads(described) if isinstance(described, str) else described
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": described}}
    for name in ("regex", "grammar"):
        if options.get(name) is not None:
            body["structured_outputs"] = {name: options[name]}
    return body


def _counts(answer: Mapping[str, Any], prompt_tokens: int) -> TokenCounts:
    """Return where the KV of the prompts' tokens came from, as far as the server reports it."""
    timings = answer.get("timings")
    if isinstance(timings, list) and timings and "tokens" in timings[0]:
        return TokenCounts(**{name: sum(int(row["tokens"].get(name, 0)) for row in timings) for name in SOURCES})
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return TokenCounts(computed=prompt_tokens - cached, cached=cached)


def _refusal(name: str, response: http.client.HTTPResponse) -> str:
    content = response.read(65536)
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace").strip()
    return f"{name} answered {response.status}: {message}"


def _close(connection: http.client.HTTPConnection) -> None:
    """Shut the socket down, which wakes the thread that reads from it."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


