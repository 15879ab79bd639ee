"""The model behind an OpenAI-compatible server: its name, its longest request and its tokenizer, read over HTTP.

No such server reports which ids of its vocabulary are unused. The ids obtained by tokenizing every word of three
letters are plain, valid, some thousands in number, and the same for every engine that serves the model.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import socket
import ssl
import string
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spillover.bench.workloads.workloads import Vocabulary
from spillover.errors import SpilloverError

TIMEOUT = 60.0  # timeout of one answer in seconds
NO_SUCH_THING = (400, 404, 405, 422, 501)  # statuses that servers return for an unknown path or body
LEAST_VOCABULARY = 32  # minimum number of ids; with fewer, random prompts would share prefixes by chance


class TextTokenizer(Protocol):
    """A converter of text to token ids as the server would tokenise it, and back."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(self, text: str) -> list[int]:
        """Encode a text as one user message, through the chat template."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class ServedModel:
    name: str
    max_model_len: int | None = None  # None if the server does not report it
    tokenizer: TextTokenizer | None = None  # None if the server has no /tokenize
    vocab_size: int | None = None  # None if the server does not report it

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return the ids for random prompts: the tokenizer's plain ones, or all ids if there is no tokenizer."""
        if self.tokenizer is not None:
            return self.tokenizer.vocabulary
        return None if self.vocab_size is None else Vocabulary(self.vocab_size)

    @classmethod
    def connect(cls, base_url: str, model: str | None = None, api_key: str | None = None,
                tokenizer: TextTokenizer | None = None, headers: Mapping[str, str] | None = None,
                insecure: bool = False) -> ServedModel:
        """Query a server for its model. `tokenizer` replaces the server's; `insecure` accepts any certificate."""
        authorized = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        server = JsonServer(base_url, {**authorized, **(headers or {})}, insecure=insecure)
        cards = server.get("/v1/models").get("data") or []
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            names = ", ".join(str(card["id"]) for card in cards) or "none"
            raise SpilloverError(f"the server at {base_url} does not serve '{model}'; it serves {names}")
        name, llamacpp = str(card["id"]), card.get("owned_by") == "llamacpp"
        longest = card.get("max_model_len")
        if longest is None and llamacpp:
            longest = server.get("/props").get("default_generation_settings", {}).get("n_ctx")
        if tokenizer is None and server.has("/tokenize", _tokenize_body(name, "a", llamacpp)):
            tokenizer = ServerTokenizer(server, name, llamacpp)
        return cls(name, longest, tokenizer, card.get("vocab_size"))


class PostsJson(Protocol):
    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...


class ServerTokenizer:
    """The server's tokenizer, through /tokenize and /detokenize of vLLM, SGLang, llama.cpp and spillover."""

    def __init__(self, server: PostsJson, model: str, llamacpp: bool) -> None:
        self._server, self._model, self._llamacpp = server, model, llamacpp

    def for_server(self, server: PostsJson) -> ServerTokenizer:
        """Return the same tokenizer, using another server object's connections."""
        return ServerTokenizer(server, self._model, self._llamacpp)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        words = " ".join(map("".join, itertools.product(string.ascii_lowercase, repeat=3)))
        plain = set(self._tokens(_tokenize_body(self._model, words, self._llamacpp, special=False)))
        if len(plain) < LEAST_VOCABULARY:
            raise SpilloverError(f"the server's /tokenize has only {len(plain)} tokens for letters, too few for "
                                 "random prompts; give --tokenizer, a model folder or GGUF file")
        return Vocabulary(max(plain) + 1, frozenset(range(max(plain) + 1)) - plain)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokens(_tokenize_body(self._model, text, self._llamacpp, special))

    def chat(self, text: str) -> list[int]:
        return self.render([{"role": "user", "content": text}])

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation rendered by the chat template, followed by the beginning of an answer."""
        if self._llamacpp:
            prompt = self._server.post("/apply-template", {"messages": list(messages)})["prompt"]
            return self._tokens({"content": prompt, "add_special": True, "parse_special": True})
        return self._tokens({"model": self._model, "messages": list(messages), "add_generation_prompt": True})

    def decode(self, ids: Sequence[int]) -> str:
        body: dict[str, Any] = {"tokens": list(ids)}
        if not self._llamacpp:
            body["model"] = self._model
        answer = self._server.post("/detokenize", body)
        return str(next(answer[key] for key in ("prompt", "content", "text") if key in answer))

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = self._server.post("/tokenize", body)["tokens"]
        return tokens


def _tokenize_body(model: str, text: str, llamacpp: bool, special: bool = True) -> dict[str, Any]:
    if llamacpp:
        return {"content": text, "add_special": special}
    return {"model": model, "prompt": text, "add_special_tokens": special}


class JsonServer:
    """A JSON client with keep-alive connections, one per thread."""

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: float = TIMEOUT,
                 insecure: bool = False) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        url = urllib.parse.urlsplit(self._base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise SpilloverError(f"--base-url is like http://127.0.0.1:8000; got '{base_url}'")
        self._url, self._timeout, self._insecure = url, timeout, insecure
        self._kept = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._closed = False
        self._path = url.path
        self._headers = {"Content-Type": "application/json", **headers}

    def get(self, path: str) -> dict[str, Any]:
        return self._answer("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("POST", path, body)

    def has(self, path: str, body: Mapping[str, Any]) -> bool:
        """Return whether the server knows the path; raise if it does not answer properly, as while starting."""
        status, content = self._exchange("POST", path, body)
        if status in NO_SUCH_THING:
            return False
        self._check(path, status, content)
        return True

    def close(self) -> None:
        """Abort the pending requests of all threads."""
        self._closed = True
        for connection in self._connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        status, content = self._exchange(method, path, body)
        self._check(path, status, content)
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _check(self, path: str, status: int, content: bytes) -> None:
        if not 200 <= status < 300 or not content.lstrip().startswith(b"{"):
            message = content[:200].decode(errors="replace").strip()
            raise SpilloverError(f"{self._base_url}{path} answered {status}: {message}")

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        payload = None if body is None else json.dumps(body)
        connection = self._connection()
        for attempt in (1, 2):
            try:
                connection.request(method, self._path + path, payload, self._headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                # A server may close an idle connection; a second failure is an error.
                if attempt == 2 or self._closed or isinstance(error, ConnectionRefusedError | TimeoutError):
                    raise SpilloverError(f"no server answers at {self._base_url} ({error or type(error).__name__}); "
                                         "start one with `spill serve`, or give --base-url, --host or --port"
                                         ) from error
        raise AssertionError("unreachable")

    def _connection(self) -> http.client.HTTPConnection:
        """Return the connection of this thread."""
        made: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if made is None:
            host, port, timeout = str(self._url.hostname), self._url.port, self._timeout
            if self._url.scheme == "https":
                context = ssl._create_unverified_context() if self._insecure else ssl.create_default_context()
                made = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
            else:
                made = http.client.HTTPConnection(host, port, timeout=timeout)
            self._kept.connection = made
            self._connections.append(made)
        return made
