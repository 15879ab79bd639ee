"""Random requests for the OpenAI-compatible endpoint, drawn from a seed: valid and invalid ones.

    shape = Shapes(seed=0, model="default", max_model_len=8192).next()
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from spillover.bench.serving.http_client import Call

TEXT = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because long each
Straße 東京 naïve 🙂 π≈3.14 C++ <b> {x} "quoted" back\\slash"""
WORDS = TEXT.split()
VOCABULARY = 49_000  # ids below this exist in the default model

Expect = Literal["answered", "refused", "any"]


@dataclass(frozen=True)
class Shape:
    name: str
    call: Call
    expect: Expect  # "any": every answer but a 5xx
    leave_after: int | None = None  # hang up after n events; 0: before reading any of the answer; None: never


class Shapes:
    def __init__(self, seed: int, model: str = "default", max_model_len: int = 8192, max_tokens: int = 24,
                 invalid: float = 0.35, leaving: float = 0.08) -> None:
        self._random = random.Random(seed)
        self._model, self._max_model_len, self._max_tokens = model, max_model_len, max_tokens
        self._invalid, self._leaving = invalid, leaving
        self._serial = 0

    def next(self) -> Shape:
        self._serial += 1
        if self._random.random() < self._invalid:
            return self._pick(self._broken_shapes())()
        shape = self._pick(self._valid_shapes())()
        if shape.call.body is not None and self._random.random() < self._leaving:
            return Shape(f"{shape.name}, hangs up", shape.call, "any", self._random.choice([0, 0, 1, 2, 5]))
        return shape

    # Valid requests

    def _valid_shapes(self) -> list[Callable[[], Shape]]:
        generating = [self._completion, self._chat, self._chat, self._completion, self._completion, self._response,
                      self._structured, self._tools, self._loglikelihood]
        return [*generating, *generating, self._tokenize, self._detokenize, self._reading]

    def _completion(self) -> Shape:
        prompt = self._pick([self._text, self._ids, lambda: [self._text() for _ in range(self._below(3) + 1)],
                             lambda: [self._ids() for _ in range(self._below(3) + 1)]])()
        body = {"model": self._model, "prompt": prompt, **self._sampling()}
        if self._chance(0.2):
            body["logprobs"] = self._below(6)
        if self._chance(0.1):
            body["echo"] = True
        return self._post("completion", "/v1/completions", self._maybe_stream(body))

    def _loglikelihood(self) -> Shape:
        body = {"model": self._model, "prompt": [self._ids()], "echo": True, "logprobs": 1, "max_tokens": 1,
                "temperature": 0, "seed": 1234}
        return self._post("loglikelihood", "/v1/completions", body)

    def _chat(self) -> Shape:
        body = {"model": self._model, "messages": self._messages(), **self._sampling()}
        if self._chance(0.2):
            body |= {"logprobs": True, "top_logprobs": self._below(6)}
        if self._chance(0.3):
            body["max_completion_tokens"] = body.pop("max_tokens")
        return self._post("chat", "/v1/chat/completions", self._maybe_stream(body))

    def _response(self) -> Shape:
        body: dict[str, Any] = {"model": self._model, "input": self._text(),
                                "max_output_tokens": self._below(self._max_tokens) + 16}
        if self._chance(0.3):
            body["instructions"] = self._text()
        if self._chance(0.3):
            body["stream"] = True
        return self._post("response", "/v1/responses", body)

    def _structured(self) -> Shape:
        schema = {"type": "object", "properties": {
            f"field_{self._below(50)}": {"type": self._pick(["string", "integer", "boolean"])}
            for _ in range(self._below(3) + 1)}, "additionalProperties": False}
        body = {"model": self._model, "messages": self._messages(), **self._sampling()}
        body |= self._pick([
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": f"shape_{self._serial}",
                                                                        "schema": schema}}},
            {"structured_outputs": {"regex": f"[a-c]{{1,{self._below(8) + 2}}}"}},
            {"structured_outputs": {"choice": ["yes", "no", f"maybe {self._below(100)}"]}},
            {"structured_outputs": {"json": schema}},
        ])
        return self._post("structured", "/v1/chat/completions", self._maybe_stream(body))

    def _tools(self) -> Shape:
        names = [f"tool_{self._below(20)}", "get_weather"]
        tools = [{"type": "function", "function": {
            "name": name, "description": self._text(), "parameters": {
                "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
            for name in dict.fromkeys(names)]
        body = {"model": self._model, "messages": self._messages(), "tools": tools, **self._sampling()}
        body["n"] = 1
        body["tool_choice"] = self._pick(["auto", "none", "required",
                                          {"type": "function", "function": {"name": "get_weather"}}])
        return self._post("tools", "/v1/chat/completions", self._maybe_stream(body))

    def _tokenize(self) -> Shape:
        body = self._pick([{"prompt": self._text(), "add_special_tokens": self._chance(0.5)},
                           {"messages": self._messages()}])
        return self._post("tokenize", "/tokenize", {"model": self._model, **body})

    def _detokenize(self) -> Shape:
        return self._post("detokenize", "/detokenize", {"model": self._model, "tokens": self._ids()})

    def _reading(self) -> Shape:
        path = self._pick(["/v1/models", "/health", "/version", "/metrics", "/live", "/openapi.json"])
        return Shape("reading", Call("GET", path, headers=()), "answered")

    # Invalid requests

    def _broken_shapes(self) -> list[Callable[[], Shape]]:
        return [self._wrong_value, self._wrong_value, self._wrong_value, self._wrong_chat, self._not_json,
                self._odd_json, self._nowhere, self._too_long, self._bad_grammar, self._unknown, self._not_http]

    def _wrong_value(self) -> Shape:
        field, value = self._pick([
            ("n", 0), ("n", -1), ("n", 10**9), ("n", "two"), ("n", 1.5), ("max_tokens", -5), ("max_tokens", "many"),
            ("max_tokens", 10**12), ("max_tokens", [1]), ("temperature", -1), ("temperature", "hot"),
            ("temperature", 1e308), ("top_p", 0), ("top_p", 2), ("top_p", []), ("top_k", -7), ("top_k", 1.5),
            ("min_p", -0.1), ("min_p", 3), ("logprobs", -1), ("logprobs", 10**6), ("logprobs", "all"),
            ("presence_penalty", 99), ("frequency_penalty", "x"), ("repetition_penalty", 0), ("seed", "lucky"),
            ("seed", 2**80), ("stop", 7), ("stop", [[]]), ("stop", ["", ""]), ("stop_token_ids", ["a"]),
            ("stop_token_ids", [-1]), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 1000}), ("logit_bias", [1]),
            ("logit_bias", {"99999999": 1}), ("prompt", None), ("prompt", {}), ("prompt", [[]]), ("prompt", []),
            ("prompt", ""), ("prompt", [1, "a"]), ("prompt", [-1]), ("prompt", [10**9]), ("prompt", [True, 1.5]),
            ("prompt", [10**30]), ("stream", "perhaps"), ("stream", 3), ("stream_options", []),
            ("stream_options", {"include_usage": "?"}), ("echo", "loud"), ("best_of", 7), ("suffix", "after"),
            ("min_tokens", -1), ("min_tokens", 10**7), ("priority", "high"), ("cache_salt", 5), ("cache_salt", ["x"]),
            ("prompt_logprobs", -3), ("prompt_logprobs", "x"), ("ignore_eos", "never"),
            ("structured_outputs", "json"), ("structured_outputs", {"jsn": {}}),
        ])
        body = {"model": self._model, "prompt": self._text(), "max_tokens": 4, field: value}
        return self._post(f"{field}={str(value)[:20]}", "/v1/completions", body, "refused")

    def _wrong_chat(self) -> Shape:
        change: dict[str, Any] = self._pick([
            {"messages": []}, {"messages": "hello"}, {"messages": [{}]},
            {"messages": [{"role": "wizard", "content": "hi"}]}, {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": None},
            {"tools": {}}, {"tools": [{}]}, {"tools": [{"type": "function", "function": {}}]}, {"tools": "all"},
            {"tool_choice": "sometimes"}, {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
            {"response_format": {"type": "xml"}}, {"response_format": "json"}, {"top_logprobs": 99, "logprobs": True},
            {"top_logprobs": 3, "logprobs": "yes please"}, {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            {"max_completion_tokens": -1}, {"n": 10**6}, {"temperature": None, "stop": {"a": 1}},
        ])
        body = {"model": self._model, "messages": self._messages(), "max_tokens": 4, **change}
        return self._post(f"chat {str(change)[:40]}", "/v1/chat/completions", body, "refused")

    def _not_json(self) -> Shape:
        body = self._pick([b"", b"{", b"nonsense", b"[]", b"null", b"3", b'"text"', b"\xff\xfe{}",
                           b'{"prompt": "\xc3("}', b'{"prompt": "a", "max_tokens": 4,}',
                           b"{" * 5000, b"[" * 100_000, b'{"a":' * 20_000,
                           b'{"prompt": "unfinished', b"\x00" * 64, b'{"prompt": "a\x00b"', b"model=default&prompt=hi"])
        path = self._pick(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
        return Shape(f"not JSON {body[:12]!r}", Call("POST", path, body), "refused")

    def _odd_json(self) -> Shape:
        """Return a body that Python's JSON parser accepts and others do not, or that few clients would send."""
        body = self._pick([
            b'{"model": "default", "prompt": "a", "max_tokens": 2, "temperature": NaN}',
            b'{"model": "default", "prompt": "a", "max_tokens": 2, "top_p": Infinity}',
            b'{"model": "default", "prompt": "a", "max_tokens": 2, "temperature": 1e999}',
            b'{"model": "default", "prompt": "lone \\ud800 surrogate", "max_tokens": 2}',
            b'{"model": "default", "prompt": "nul \\u0000 inside", "max_tokens": 2}',
            b'{"model": "default", "prompt": "a", "prompt": "b", "max_tokens": 2}',
            b'{"model": "default", "prompt": ["\\ud800"], "max_tokens": 2, "stop": ["\\udfff"]}',
            b'\xef\xbb\xbf{"model": "default", "prompt": "a", "max_tokens": 2}',
            b'{"model": "default", "prompt": "a", "max_tokens": 2, "seed": ' + b"9" * 5000 + b"}",
        ])
        return Shape(f"odd JSON {body[38:70]!r}", Call("POST", "/v1/completions", body), "any")

    def _nowhere(self) -> Shape:
        method, path, body = self._pick([
            ("GET", "/v1/completions", None), ("DELETE", "/v1/models", None), ("GET", f"/none/{self._serial}", None),
            ("POST", f"/v1/{self._serial}", b"{}"), ("PUT", "/v1/chat/completions", b"{}"),
            ("POST", "/v1/embeddings", json.dumps({"model": self._model, "input": "x"}).encode()),
            ("PATCH", "/tokenize", b"{}"), ("POST", "/health", b""), ("GET", "/page/../../pyproject.toml", None),
            ("GET", "/page/%2e%2e/%2e%2e/app.py", None), ("GET", "/v1/models/absent", None),
        ])
        return Shape(f"{method} {path.rstrip('0123456789')}", Call(method, path, body), "refused")

    def _too_long(self) -> Shape:
        count = self._max_model_len + self._below(50)
        prompt = self._pick([[1] * count, " ".join(["word"] * count)])
        return self._post("too long", "/v1/completions", {"model": self._model, "prompt": prompt, "max_tokens": 1},
                          "refused")

    def _bad_grammar(self) -> Shape:
        """Return a request with an unusual or invalid grammar; the grammar library decides which it is."""
        depth = self._pick([30, 200, 3000])
        deep = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
        constraint = self._pick([
            '{"regex": "[unclosed"}', f'{{"regex": "{"(" * 400}{")" * 400}"}}', '{"choice": []}',
            '{"grammar": "root ::= nowhere"}', f'{{"json": {deep}}}', '{"regex": "a{1,100000000}"}',
            '{"json": {"$ref": "#"}}', '{"json": {"type": "nothing"}}', '{"json": {"enum": []}}',
        ])
        body = (f'{{"model": "{self._model}", "prompt": "a", "max_tokens": 4, '
                f'"structured_outputs": {constraint}}}')
        return Shape(f"grammar {constraint[:30]}", Call("POST", "/v1/completions", body.encode()), "any")

    def _unknown(self) -> Shape:
        change = self._pick([{"model": f"absent-{self._serial}"}, {"model": 5}, {"temperatur": 0.5}, {"max_token": 5},
                             {f"field_{self._serial}": 1}])
        body = {"model": self._model, "prompt": self._text(), "max_tokens": 4, **change}
        return self._post(f"unknown {next(iter(change)).rstrip('0123456789')}", "/v1/completions", body, "refused")

    def _not_http(self) -> Shape:
        raw = self._pick([
            b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{\"prompt\": \"half",
        ])
        return Shape(f"not HTTP {raw[:10]!r}", Call("", "", raw=raw), "any", leave_after=0)

    # Parts of requests

    def _post(self, name: str, path: str, body: Any, expect: Expect = "answered") -> Shape:
        return Shape(name, Call("POST", path, json.dumps(body).encode()), expect)

    def _maybe_stream(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._chance(0.6):
            body["stream"] = True
            if self._chance(0.5):
                body["stream_options"] = {"include_usage": True}
        return body

    def _sampling(self) -> dict[str, Any]:
        """Return sampling parameters, each of them present with a small probability."""
        limit = self._below(self._max_tokens) + 1
        chosen = {"max_tokens": limit}
        for field, value in (
            ("temperature", round(self._random.uniform(0, 1.5), 2)), ("top_p", 0.9), ("top_k", 20), ("min_p", 0.05),
            ("seed", self._below(1000)), ("stop", [" the", "\n\n"]), ("stop", "."), ("presence_penalty", 0.5),
            ("frequency_penalty", -0.5), ("repetition_penalty", 1.1), ("ignore_eos", True),
            ("min_tokens", self._below(limit + 1)), ("cache_salt", f"salt {self._below(5)}"), ("priority", 1),
            ("return_token_ids", True), ("logit_bias", {"100": 5, "200": -100}), ("user", "soak"),
            ("n", self._below(3) + 1), ("prompt_logprobs", 1), ("return_timings", True),
        ):
            if self._chance(0.12):
                chosen[field] = value
        return chosen

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": "You are brief."}] if self._chance(0.4) else []
        for _ in range(self._below(2)):
            messages += [{"role": "user", "content": self._text()}, {"role": "assistant", "content": self._text()}]
        content = self._text()
        return [*messages, {"role": "user",
                            "content": [{"type": "text", "text": content}] if self._chance(0.2) else content}]

    def _text(self) -> str:
        """Return a text; half of all texts begin alike, so that the prefix cache has blocks to share and to evict."""
        start = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 2
        return (start if self._chance(0.5) else "") + " ".join(self._random.choices(WORDS, k=self._below(40) + 1))

    def _ids(self) -> list[int]:
        return [self._below(VOCABULARY) for _ in range(self._below(60) + 2)]

    def _below(self, limit: int) -> int:
        return self._random.randrange(limit)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _pick(self, options: Any) -> Any:
        return self._random.choice(options)
