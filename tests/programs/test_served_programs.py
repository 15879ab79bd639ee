"""The same programs on a model behind HTTP: the same texts and scores, and no request left running."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spillover import LLM, SpilloverError
from spillover.programs import ProgramError, State, assistant, backend_of, gen, program, select, system, user
from spillover.programs.http_backend import HttpBackend
from spillover.programs.program import Program
from spillover.programs.recording import RecordingBackend, findable
from support.servers.running_server import Server, until

SCHEMA = {"enum": ["small", "large"]}


@program(temperature=0, max_tokens=8)
def everything(s: State) -> None:
    s += system("Say what you see, and say it in a few words only, so that we are done before long.")
    s += user("Here is a list of things: a house, a mouse, and a blouse.")
    forks = s.fork(["count", "name", "judge"])
    forks[0] += user("How many are there?")
    forks[0] += assistant("There are " + select("count", ["two", "three", "thirty-three"]) + " of them.")
    forks[1] += user("What is the second one?")
    forks[1] += assistant(gen("second", stop="e") + "!")
    with forks[2].assistant():
        forks[2] += '{"one": ' + gen("digit", regex="[0-9]") + ', "two": '
        forks[2] += gen("object", schema=SCHEMA) + "}"
    forks[2] += user("Really?")
    forks[2] += assistant(gen("really", temperature=1.0, seed=3))
    forks.join()


def test_a_server_says_what_the_engine_in_process_says(llm: LLM, served: Server, backend: RecordingBackend) -> None:
    # Which text is prefilled ahead depends on how fast other requests are, so requests are compared without that.
    body = everything.__wrapped__  # type: ignore[attr-defined]
    plain = Program(body, {"temperature": 0, "max_tokens": 8}, prefill=False)
    recorded = RecordingBackend(backend_of(f"{served.url}/v1"))
    states = [plain.run(backend=each, timeout=60) for each in (backend, recorded)]
    assert sorted(each.ids for each in backend.requests) == sorted(each.ids for each in recorded.requests)
    counts = states[1].tokens_by_source()
    assert counts == states[0].tokens_by_source()
    assert counts.device == findable(recorded.requests, 16) > 0
    states += [everything.run(backend=each, timeout=60) for each in (backend, recorded)]
    here, *others = [[[s[name][index] for index, name in enumerate(("count", "second", "digit"))], s["object"][2],
                      s["really"][2]] for s in states]
    assert others == [here] * 3
    assert json.loads(states[1]["object"][2]) in ("small", "large")


@pytest.mark.parametrize("text", ["Forty letters", "caf\u00e9 \u4f60\u597d \U0001f642", "</s>[user]  \n"])
def test_text_becomes_tokens_here_where_the_tokenizer_of_the_server_is(served: Server, text: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    post = HttpBackend.post

    def noted(self: HttpBackend, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(path)
        return post(self, path, body)

    monkeypatch.setattr(HttpBackend, "post", noted)
    here = HttpBackend(served.url)
    made = [here.encode(text, special) for special in (False, True)]
    said = [here.decode(ids) for ids in made]
    assert not asked
    monkeypatch.setattr(HttpBackend, "_local_tokenizer", lambda self: None)
    there = HttpBackend(served.url)
    assert made == [there.encode(text, special) for special in (False, True)]
    assert said == [there.decode(ids) for ids in made]
    assert {"/tokenize", "/detokenize"} <= set(asked)


def test_scores_are_those_of_the_engine_in_process(served: Server, backend: RecordingBackend) -> None:
    @program
    def picked(s: State, how: Any) -> None:
        s += "Which of the three is it? " + select("pick", ["The first", "The second", "No"], normalised=how)

    for how in ("tokens", "bytes", "sum"):
        here, there = [picked.run(how, backend=each).meta("pick") for each in (backend, served.url)]
        assert here == there


@pytest.mark.parametrize("start", [0, 1, 20, 39, 40, 1000])
def test_a_request_says_from_where_on_it_wants_log_probabilities(served: Server, start: int) -> None:
    body = {"prompt": "Forty letters are in this short prompt.!", "echo": True, "logprobs": 1, "max_tokens": 1,
            "temperature": 0}
    with served.http() as http:
        whole, part = [http.post("/v1/completions", json=each).json()["choices"][0]["logprobs"]["token_logprobs"]
                       for each in (body, body | {"prompt_logprobs_start": start})]
    told = max(1, min(start, 40))
    assert part == [None] * told + whole[told:]


def test_a_stream_that_is_left_ends_its_requests(served: Server) -> None:
    @program(temperature=0, max_tokens=1500, ignore_eos=True)
    def endless(s: State) -> None:
        s += "On and on: "
        for branch in s.fork(3):
            branch += gen("words")

    with endless.stream(backend=served.url) as stream:
        assert next(chunk for chunk in stream if chunk.name == "words")
        until(lambda: served.metrics_total("num_requests_running") > 0)
    until(lambda: served.metrics_total("num_requests_running") == 0)
    with pytest.raises(ProgramError, match=r"did not end within 0\.2 s"):
        endless.run(backend=served.url, timeout=0.2)
    until(lambda: served.metrics_total("num_requests_running") == 0)


def test_a_refusal_of_the_server_names_the_branch(served: Server) -> None:
    @program(max_tokens=8)
    def too_long(s: State) -> None:
        s += "Text. "
        forks = s.fork(["long"])
        forks[0] += "more " * 600 + gen("x")

    with pytest.raises(ProgramError, match=r"branch 'long': .* answered 400: .*2048"):
        too_long.run(backend=served.url)


class Plain(BaseHTTPRequestHandler):
    """A server of chats and completions without a tokenize route or extension fields."""

    asked: list[dict[str, Any]]
    tokenizes = False
    model = "plain"

    def do_GET(self) -> None:
        self._send({"data": [{"id": self.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            if self.tokenizes and "prompt" in body:
                self._send({"tokens": list(body["prompt"].encode())})
            else:
                self.send_error(404)
            return
        self.asked.append(body)
        chat = "messages" in body
        said = [{"delta": {"role": "assistant", "content": text}} if chat else {"text": text} for text in ("o", "k")]
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "finish_reason": None, **one}]} for one in said]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}})
        content = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(content.encode())

    def _send(self, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def plain() -> Iterator[str]:
    Plain.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def two_turns(s: State) -> None:
    s += user("Well?")
    s += assistant("It is " + gen("answer", max_tokens=5, stop=("x",)))
    s += user("And?")
    s += assistant(gen("more"))


def plain_text(s: State) -> None:
    s += "Once " + gen("a") + " then "
    for branch in s.fork(2):
        branch += "there " + gen("b")


def test_a_server_without_a_tokenizer_gets_text_and_messages(plain: str) -> None:
    backend = HttpBackend(plain)
    s = program(two_turns).run(backend=backend)
    assert s["answer"] == s["more"] == "ok"
    first, second = Plain.asked
    assert first["messages"] == [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "It is "}]
    assert first["continue_final_message"]
    assert first["stop"] == ["x"]
    assert second["messages"][1:] == [{"role": "assistant", "content": "It is ok"}, {"role": "user", "content": "And?"}]
    counts = s.tokens_by_source()
    assert (counts.computed, counts.cached) == (10, 8)

    program(plain_text).run(backend=backend)
    assert [body["prompt"] for body in Plain.asked[2:]] == ["Once ", *["Once ok then there "] * 2]

    @program
    def chosen(s: State) -> None:
        s += "Yes or no? " + select("which", ["yes", "no"])

    with pytest.raises(ProgramError, match="has no /tokenize"):
        chosen.run(backend=backend)
    backend.close()


def test_a_server_that_tokenizes_text_alone_gets_messages(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "tokenizes", True)
    s = program(two_turns).run(backend=plain)
    assert s["more"] == "ok"
    assert [message["content"] for message in Plain.asked[1]["messages"]] == ["Well?", "It is ok", "And?"]
    program(plain_text).run(backend=plain)
    assert Plain.asked[2]["prompt"] == list(b"Once ")
    assert Plain.asked[3]["prompt"] == list(b"Once ok then there ")
    assert backend_of(plain) is backend_of(plain)
    monkeypatch.setattr(Plain, "model", "another")
    assert backend_of(plain).name == f"another at {plain}"


def test_a_url_where_nobody_answers_says_so() -> None:
    with pytest.raises(SpilloverError, match=r"no server answers at http://127\.0\.0\.1:9"):
        everything.run(backend="http://127.0.0.1:9")
