"""The model behind a server is found from the answers of several kinds of servers, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spillover.bench.serving.served_model import ServedModel
from spillover.bench.workloads.make_workload import make_workload
from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.errors import SpilloverError

LETTERS = 100  # the id of "a"; a text has a token per letter, without spaces


def letters(text: str) -> list[int]:
    return [LETTERS + 3 * (ord(letter) - ord("a")) + place % 3 for place, letter in enumerate(text) if letter != " "]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    make = "vllm"

    def do_GET(self) -> None:
        if self.path == "/props" and self.make == "llamacpp":
            self._send({"default_generation_settings": {"n_ctx": 512}})
        elif self.path == "/v1/models" and self.headers.get("Authorization") == "Bearer key":
            card: dict[str, Any] = {"id": "tiny", "owned_by": self.make}
            if self.make != "llamacpp":
                card["max_model_len"] = 256
            self._send({"object": "list", "data": [card]})
        else:
            self._send({"error": "who are you"}, 401)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apply-template" and self.make == "llamacpp":
            self._send({"prompt": "u" + body["messages"][0]["content"]})
        elif self.make == "starting":
            self._send({"error": "loading the model"}, 503)
        elif self.make == "none" or self.path not in ("/tokenize", "/detokenize"):
            self._send({"detail": "Not Found"}, 404)
        elif self.path == "/detokenize":
            text = "".join(chr(ord("a") + (index - LETTERS) // 3) for index in body["tokens"])
            self._send({"content" if self.make == "llamacpp" else "prompt": text})
        elif self.make == "llamacpp":
            self._send({"tokens": ([1] if body["add_special"] else []) + letters(body["content"])})
        else:
            text = body["prompt"] if "prompt" in body else "u" + body["messages"][0]["content"]
            self._send({"tokens": ([1] if body.get("add_special_tokens", True) else []) + letters(text)})

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(make: str) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"make": make}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("make", "longest"), [("vllm", 256), ("llamacpp", 512)])
def test_a_server_tells_its_model_and_tokenizes(make: str, longest: int) -> None:
    with serving(make) as url:
        served = ServedModel.connect(url + "/v1/", api_key="key")
        assert (served.name, served.max_model_len) == ("tiny", longest)
        tokenizer = served.tokenizer
        assert tokenizer is not None
        assert tokenizer.encode("ab") == [1, *letters("ab")]
        assert tokenizer.chat("ab") == [1, *letters("uab")]
        assert tokenizer.decode(letters("hello")) == "hello"
        # Random prompts contain only plain tokens: those made by letters, never the one that begins a text.
        workload = make_workload(WorkloadOptions.from_mapping({"num-prompts": 20, "input-len": 50, "output-len": 5}),
                                 served)
        drawn = {token for request in workload.requests(0) for token in request.prompt}
        assert min(drawn) >= LETTERS  # type: ignore[type-var]
        assert len(drawn) > 60


def test_the_same_vocabulary_from_every_make_gives_the_same_prompts() -> None:
    options = WorkloadOptions.from_mapping({"num-prompts": 5, "input-len": 30, "output-len": 5})
    prompts = []
    for make in ("vllm", "llamacpp"):
        with serving(make) as url:
            prompts.append(make_workload(options, ServedModel.connect(url, api_key="key")).requests(2))
    assert prompts[0] == prompts[1]


def test_a_server_that_does_not_tokenize_needs_a_tokenizer_for_ids() -> None:
    with serving("none") as url:
        served = ServedModel.connect(url, model="tiny", api_key="key")
    assert served.tokenizer is None
    workload = make_workload(WorkloadOptions.from_mapping({"num-prompts": 2, "input-len": 4}), served)
    with pytest.raises(SpilloverError, match="--tokenizer"):
        workload.requests(0)


def test_a_server_that_is_not_up_yet_is_not_one_without_a_tokenizer() -> None:
    with serving("starting") as url, pytest.raises(SpilloverError, match=r"answered 503.*loading"):
        ServedModel.connect(url, api_key="key")


def test_what_is_wrong_with_a_server_is_said() -> None:
    with serving("vllm") as url:
        with pytest.raises(SpilloverError, match="serves tiny"):
            ServedModel.connect(url, model="other", api_key="key")
        with pytest.raises(SpilloverError, match="answered 401"):
            ServedModel.connect(url)
    with pytest.raises(SpilloverError, match="spill serve"):
        ServedModel.connect(url, api_key="key")
    with pytest.raises(SpilloverError, match="--base-url is like"):
        ServedModel.connect("127.0.0.1:8000")
