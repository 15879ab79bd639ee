"""The same numbers over HTTP as in process, and a clear error if a server lacks what a task needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import SpilloverError
from spillover.eval.divergence import TopReference
from spillover.eval.in_process import EngineTarget
from spillover.eval.results import Results
from spillover.eval.run import run
from spillover.eval.served import ServedTarget
from spillover.eval.target import Prompt
from spillover.eval.tasks.named import open_task
from spillover.models.tokenizer import load_tokenizer
from support.models.text_model import BOS
from support.servers.running_server import Server


def test_every_task_gives_the_same_numbers_as_in_process(target: EngineTarget, served: Server, model: Path,
                                                         data: Path) -> None:
    remote = ServedTarget(served.url, load_tokenizer(model))
    names = ["hellaswag=hellaswag_val_full.txt", "mmlu", "perplexity", "gsm8k", "gsm8k-chat", "ifeval"]
    tasks = [open_task(name, data, 256, 256, None) for name in names]
    found = []
    for each in (target, remote):
        results = Results()
        for task in tasks:
            run(task, each, task.items(each)[:1 if task.name.startswith("gsm8k") else 2], results, 4)
        found.append(results.items)
    assert found[0] == found[1]


def test_the_servers_own_tokenizer_serves(target: EngineTarget, served: Server) -> None:
    remote = ServedTarget(f"{served.url}/v1")
    assert remote.encode("Two words") == target.encode("Two words")
    assert remote.max_len == target.max_len
    assert remote.prefix is None, "this tokenizer puts nothing before a text, and a server does not tell its bos"
    assert target.prefix == BOS


def test_divergence_over_http_is_the_bound_of_in_process(target: EngineTarget, served: Server, tmp_path: Path) -> None:
    remote = ServedTarget(served.url)
    windows = {"0.0": Prompt([BOS, *target.encode("Something to be said about squares.")], 3)}
    stored = TopReference(tmp_path, "tiny")
    stored.prepare(target, windows, 1)
    logprobs, found = stored.compare(remote, "0.0", windows["0.0"])
    assert logprobs == target.score([windows["0.0"]])[0]
    assert found["kl"] == pytest.approx(0, abs=1e-9)
    assert found["same_top"] == len(logprobs)


def test_a_closed_target_waits_no_more(monkeypatch: pytest.MonkeyPatch, poor: str) -> None:
    asked, release = threading.Event(), threading.Event()
    target = ServedTarget(poor)
    monkeypatch.setattr(Poor, "do_POST", lambda self: (asked.set(), release.wait(30)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(target.complete, "text", 4, ())
        assert asked.wait(10)
        target.close()
        with pytest.raises(SpilloverError, match="no server answers"):
            waiting.result(10)
    release.set()


class Poor(BaseHTTPRequestHandler):
    """A server without echo, which returns tokens as text."""

    echoes = False

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "poor", "max_model_len": 100}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/tokenize":
            self.send_error(404)
        else:
            count = 3 if self.echoes else 1
            self._answer({"choices": [{"text": "four", "logprobs": {
                "token_logprobs": [-1.0] * count, "top_logprobs": [{" a": -1.0}] * count}}]})

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def poor() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Poor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_without_prompt_logprobs_is_told_apart(poor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ServedTarget(poor)
    assert target.complete("Two and two are", 4, ()) == "four"
    with pytest.raises(SpilloverError, match=r"no log probabilities of a prompt's tokens .* ifeval do not need them"):
        target.score([Prompt([1, 2, 3], 1)])
    with pytest.raises(SpilloverError, match="has no /tokenize; give --tokenizer"):
        target.encode("text")
    monkeypatch.setattr(Poor, "echoes", True)
    assert target.score([Prompt([1, 2, 3], 1)]) == [[-1.0, -1.0]]
    with pytest.raises(SpilloverError, match="does not name tokens by id"):
        target.top(Prompt([1, 2, 3], 1), 5)
