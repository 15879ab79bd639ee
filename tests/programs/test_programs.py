"""Programs on a model in this process: their output, what they share, and how they end."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, AsyncLLM, SamplingParams
from spillover.programs import (
    Program,
    ProgramError,
    State,
    assistant,
    gen,
    image,
    program,
    select,
    set_default_backend,
    system,
    user,
)
from spillover.programs.backend import Backend, Message
from spillover.programs.lifetime import Lifetime, ProgramCancelled
from spillover.programs.prefix_gate import PrefixGate
from spillover.programs.recording import RecordingBackend, findable
from support.servers.running_server import until

SYSTEM = "You answer in as few words as you can, and never with a lie. "
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@program(temperature=0, ignore_eos=True)
def two_turns(s: State, first: str, second: str) -> str:
    s += system(SYSTEM)
    s += user(first)
    s += assistant("Well: " + gen("one", max_tokens=9) + ".")
    s += user(second)
    s += assistant(gen("two", max_tokens=9))
    return "done"


def idle(llm: LLM) -> bool:
    return not llm.stats().num_running and not llm.stats().num_waiting


def test_a_chat_has_the_tokens_of_the_chat_template(llm: LLM, backend: RecordingBackend) -> None:
    s = two_turns.run("What is a square?", "And a cube?", backend=backend)
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a square?"},
            {"role": "assistant", "content": f"Well: {s['one']}."}, {"role": "user", "content": "And a cube?"}]
    assert s.messages() == [*said, {"role": "assistant", "content": s["two"]}]
    assert s.returned == "done"
    assert s.rebuilds == 0
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    first, second = backend.requests
    assert tokenizer.decode(first.ids, False) == tokenizer.apply_chat_template(said[:2]) + "Well: "
    assert second.ids[:len(first.ids)] == first.ids
    assert second.ids[len(first.ids):len(first.ids) + 9] == first.generated
    by_hand = llm.chat(said, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), False)[0]
    if "�" not in s["one"]:  # half a character is lost in its text
        assert second.ids == by_hand.prompt_token_ids
        assert s["two"] == by_hand.outputs[0].text
    assert s.tokens_by_source().device == findable(backend.requests, 16) > 0


class Forgetful(RecordingBackend):
    """A backend whose template omits earlier assistant messages, as some do with thoughts."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        return super().render([m if m["role"] != "assistant" else {**m, "content": "..."} for m in messages])


def test_a_template_that_does_not_extend_wins_and_is_counted(backend: RecordingBackend) -> None:
    forgetful = Forgetful(backend.inner)
    s = two_turns.run("What is a square?", "And a cube?", backend=forgetful)
    assert s.rebuilds == 1
    assert forgetful.requests[1].ids == forgetful.render(s.messages()[:-1])
    assert s.tokens_by_source().device == findable(forgetful.requests, 16) > 0


def test_a_fork_within_a_message_ends_it_where_it_begins_another(backend: RecordingBackend) -> None:
    @program(temperature=0, max_tokens=4, ignore_eos=True)
    def inside(s: State) -> None:
        s += user("Well?")
        with s.assistant():
            s += "It is "
            forks = s.fork(2)
            forks[0] += gen("x")
            forks[1] += "not " + gen("x")
            forks[1] += user("Sure?")
            forks[1] += assistant(gen("y"))
            s += gen("z")
        s["told"] = [branch.messages() for branch in forks]

    s = inside.run(backend=backend)
    assert s["told"][0] == [{"role": "user", "content": "Well?"}]  # its message is still open
    assert [message["role"] for message in s["told"][1]] == ["user", "assistant"] * 2
    assert s["told"][1][1]["content"].startswith("It is not ")
    assert s.messages()[1]["content"] == "It is " + s["z"]


def test_constrained_gens_and_stop_strings(backend: RecordingBackend) -> None:
    schema = {"enum": [7, 8]}

    @program(temperature=0)
    def constrained(s: State) -> None:
        s += "Number: " + gen("number", regex="[0-9]{3}") + " and " + gen("object", schema=schema) + "\n"
        s += gen("free", max_tokens=12, ignore_eos=True)

    s = constrained.run(backend=backend)
    assert re.fullmatch("[0-9]{3}", s["number"])
    assert json.loads(s["object"]) in schema["enum"]
    assert s.meta("free")["finish_reason"] == "length"
    assert backend.decode(backend.requests[-1].ids) == f"Number: {s['number']} and {s['object']}\n"

    stop = next(letter for letter in reversed(s["free"]) if letter != "�")

    @program(temperature=0)
    def stopped(s: State, before: str) -> None:
        s += before + gen("cut", max_tokens=12, stop=stop, ignore_eos=True) + "|" + gen("next", max_tokens=1)

    cut = stopped.run(f"Number: {s['number']} and {s['object']}\n", backend=backend)
    assert cut["cut"] == s["free"].partition(stop)[0]
    assert cut.meta("cut")["stop_reason"] == stop
    ids = backend.requests[-2].ids
    kept = backend.requests[-1].ids
    assert kept[:len(ids)] == ids
    assert backend.decode(kept[len(ids):]) == cut["cut"] + "|"


def test_forks_of_the_same_branch_have_names_of_their_own(backend: RecordingBackend) -> None:
    @program
    def twice(s: State) -> list[str]:
        s += "Text"
        forks = [*s.fork(2), *s.fork(2), *s.fork(["a"])[0].fork(2)]
        return [branch.name for branch in forks]

    assert twice.run(backend=backend).returned == ["0", "1", "2", "3", "a.0", "a.1"]


def test_a_stream_brings_what_every_branch_says(backend: RecordingBackend) -> None:
    @program(temperature=0, max_tokens=6)
    def talk(s: State) -> None:
        s += "The beginning, "
        forks = s.fork(["left", "right"])
        for branch in forks:
            branch += f"then {branch.name}: " + gen("said") + "." + select("end", ["!", "?"])
        s += "and the end."
        forks.join()

    stream = talk.stream(backend=backend)
    chunks = list(stream)
    for branch in ("left", "right"):
        said = [(chunk.name, chunk.text) for chunk in chunks if chunk.branch == branch]
        assert "".join(text for _, text in said).startswith(f"then {branch}: ")
        assert "".join(text for name, text in said if name == "said") == stream.state["said"][branch == "right"]
        assert [text for name, text in said if name == "end"] == [stream.state["end"][branch == "right"]]
    assert "".join(chunk.text for chunk in chunks if chunk.branch == "main") == "The beginning, and the end."
    assert stream.state.text() == "The beginning, and the end."


@program(temperature=0, **LONG)
def endless(s: State, then: Callable[[State], Any] = lambda s: None) -> None:
    s += "On and on: "
    for branch in s.fork(3):
        branch += gen("words")
    then(s)


def fails(s: State) -> None:
    raise ValueError("of the program's own")


@pytest.mark.parametrize("how", ["stream", "exception", "timeout", "task"])
def test_leaving_early_leaves_no_request_behind(llm: LLM, backend: RecordingBackend, how: str) -> None:
    if how == "stream":
        with endless.stream(backend=backend) as stream:
            assert next(chunk for chunk in stream if chunk.name == "words")
    elif how == "exception":
        with pytest.raises(ValueError, match="of the program's own"):
            endless.run(fails, backend=backend)
    elif how == "timeout":
        with pytest.raises(ProgramError, match=r"did not end within 0\.2 s"):
            endless.run(backend=backend, timeout=0.2)
    else:
        async def cancelled() -> None:
            task = asyncio.create_task(endless.run_async(backend=backend))
            await asyncio.to_thread(until, lambda: len(backend.requests) == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
    assert backend.open == 0
    assert idle(llm)


def test_a_branch_that_fails_is_named_and_the_others_go_on(llm: LLM, backend: RecordingBackend) -> None:
    @program(temperature=0, max_tokens=4)
    def mixed(s: State, handled: bool) -> str:
        s += "Some text. "
        good, bad = s.fork(["good", "bad"])
        good += gen("x")
        bad += gen("x", regex="(") + " and more"
        deeper = bad.fork(["deep"])
        deeper += gen("y")
        if not handled:
            return str(good["x"])
        with pytest.raises(ProgramError, match="branch 'bad'"):
            bad["x"]
        with pytest.raises(ProgramError, match="branch 'bad'"):
            deeper.join()
        return str(good["x"])

    s = mixed.run(True, backend=backend)
    assert s.returned
    assert s.tokens_by_source() == backend.counts
    with pytest.raises(ProgramError, match=r"branch 'bad': .*regex") as error:
        mixed.run(False, backend=backend)
    assert error.value.branch == "bad"
    assert idle(llm)


def test_what_cannot_be_written_is_refused_in_a_sentence(backend: RecordingBackend) -> None:
    def refused(match: str, body: Callable[[State], Any]) -> None:
        with pytest.raises(ProgramError, match=match):
            Program(body, {}).run(backend=backend, timeout=20)

    def add(*values: Any) -> Callable[[State], Any]:
        def body(s: State) -> None:
            for value in values:
                s += value() if callable(value) else value

        return body

    refused("images are not supported", add(lambda: image("cat.png")))
    refused("did you mean 'temperature'", add(lambda: gen("x", temprature=1)))
    refused("one of regex, schema and grammar", add(lambda: gen("x", regex="a", schema={})))
    refused("belongs in assistant", add(lambda: user(gen("x"))))
    refused("holds a message of its own", add(lambda: user(user("x"))))
    refused("put all text in roles", add("text", user("x"), assistant(gen("y"))))
    refused("outside of a role, behind messages", add(user("x"), "text", assistant(gen("y"))))
    refused("put it in assistant", add(user("x"), gen("y")))
    refused("needs some text before", add(gen("y")))
    refused("the same choice twice", add(lambda: select("x", ["a", "a"])))
    refused("a list of texts", add(lambda: select("x", "ab")))
    refused("one of tokens, bytes, sum", add(lambda: select("x", ["a"], normalised="none")))  # type: ignore[arg-type]
    refused("made of strings", add(3))
    refused("there is no gen or select named 'y'", lambda s: s["y"])
    refused("how many branches", lambda s: s.fork(0))
    refused("most 2048", add("long " * 1000, gen("x")))
    with pytest.raises(ProgramError, match="which run\\(\\) takes itself"):
        program(lambda s, timeout: None)
    with pytest.raises(ProgramError, match="takes no state"):
        program(lambda: None)
    with pytest.raises(ProgramError, match="nothing to run on"):
        two_turns.run("a", "b")
    with pytest.raises(ProgramError, match="runs on an LLM"):
        two_turns.run("a", "b", backend=3)
    with pytest.raises(ProgramError, match="URL is like"):
        set_default_backend("127.0.0.1")
    ended = two_turns.run("a", "b", backend=backend)
    with pytest.raises(ProgramError, match="has ended"):
        ended += "more"


@program(temperature=0, max_tokens=3, ignore_eos=True)
def shot(s: State, question: str, options: Any = None) -> None:
    s += "Q: How much is one and one? A: Two. Q: What is the first letter? A: The letter A. Q: " + question + " A:"
    s += gen("answer", **(options or {}))


def test_a_batch_computes_its_common_beginning_once(backend: RecordingBackend) -> None:
    asked: list[dict[str, Any]] = [{"question": f"What is {n} and {n}?"} for n in range(12)]
    states = shot.run_batch(asked, backend=backend, progress=False)
    assert [each["question"] in state.text() for each, state in zip(asked, states, strict=True)] == [True] * 12
    assert sum(state.tokens_by_source().device for state in states) == findable(backend.requests, 16) >= 11 * 80
    alone = [shot.run(**each, backend=backend)["answer"] for each in asked]
    assert [state["answer"] for state in states] == alone


def test_a_batch_with_an_error_says_where(llm: LLM, backend: RecordingBackend) -> None:
    batch: list[dict[str, Any]] = [{"question": str(n), "options": LONG} for n in range(3)]
    batch[1] = {"question": "bad", "options": {"regex": "("}}
    with pytest.raises(ProgramError, match="item 1 of the batch: branch 'main'"):
        shot.run_batch(batch, backend=backend, progress=False)
    assert backend.open == 0
    assert idle(llm)
    batch[0] = batch[2] = {"question": "fine"}
    first, bad, last = shot.run_batch(batch, backend=backend, progress=False, return_exceptions=True)
    assert isinstance(bad, ProgramError)
    assert first["answer"] == last["answer"]


def test_fixed_text_is_prefilled_while_the_program_does_something_else(backend: RecordingBackend) -> None:
    seconds = 10.0
    text = "A long text that is known before anybody asks for what follows it. " * 4

    @program(temperature=0, max_tokens=2)
    def slow(s: State) -> None:
        s += "First: " + gen("first") + text
        until(lambda: len(backend.requests) == 2 and not backend.open, seconds)
        s += gen("second")

    s = slow.run(backend=backend)
    ahead, last = backend.requests[1:]
    assert ahead.ids == last.ids[:len(ahead.ids)]
    assert s.meta("second")["counts"].device >= len(text) - 32

    quick = Program(slow.__wrapped__, {"temperature": 0, "max_tokens": 2}, prefill=False)  # type: ignore[attr-defined]
    seconds = 0.1
    with pytest.raises(AssertionError, match="did not come to hold"):
        quick.run(backend=backend)


def test_an_async_engine_runs_programs_too(llm: LLM, model: Path, backend: RecordingBackend) -> None:
    async def main() -> State:
        async with AsyncLLM(model, max_model_len=2048, num_gpu_blocks_override=1200,
                            chat_template=_template(llm)) as engine:
            with pytest.raises(ProgramError, match=r"await f\.run_async"):
                two_turns.run("What is a square?", "And a cube?", backend=engine)
            with pytest.raises(ProgramError, match=r"did not end within 0\.2 s"):
                await endless.run_async(backend=engine, timeout=0.2)
            chosen = await picked.run_async(backend=engine)
            assert chosen.meta("pick")["scores"] == picked.run(backend=backend).meta("pick")["scores"]
            assert not (await engine.stats()).num_running
            return await two_turns.run_async("What is a square?", "And a cube?", backend=engine)

    s = asyncio.run(main())
    assert s.messages() == two_turns.run("What is a square?", "And a cube?", backend=backend).messages()


@program
def picked(s: State) -> None:
    s += "Which of the three is it, in the end? " + select("pick", ["The first", "The second", "None"])


def _template(llm: LLM) -> str:
    assert llm.tokenizer is not None
    assert llm.tokenizer.chat_template is not None
    return llm.tokenizer.chat_template


def test_programs_need_no_web_framework() -> None:
    code = ("import sys; sys.modules.update(dict.fromkeys(['fastapi', 'uvicorn', 'starlette', 'torch']))\n"
            "import spillover.programs, spillover.programs.http_backend")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Only the gate


def test_the_gate_lets_one_compute_what_several_begin_with() -> None:
    gate, lifetime, order = PrefixGate(4), Lifetime(20), []
    entered, go = threading.Event(), threading.Event()

    def leader() -> None:
        with gate.passing([1] * 9, lifetime) as computed:
            entered.set()
            assert go.wait(10)
            order.append("computed")
            computed()

    def follower() -> None:
        with gate.passing([1] * 8 + [2, 3], lifetime):
            order.append("followed")

    threads = [threading.Thread(target=leader), threading.Thread(target=follower)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    with gate.passing([2] * 9, lifetime), gate.passing([1, 1, 1, 2, 2], lifetime):
        order.append("others")  # these share no prefix with it
    go.set()
    for thread in threads:
        thread.join(10)
    assert order == ["others", "computed", "followed"]
    assert gate.cold([1] * 8) == 0
    assert gate.cold([1] * 4 + [2] * 5) == 4


def test_the_gate_passes_on_when_who_computes_fails_and_ends_with_its_run() -> None:
    gate, lifetime = PrefixGate(4), Lifetime(20)
    with pytest.raises(ValueError), gate.passing([1] * 9, lifetime):
        raise ValueError
    with gate.passing([1] * 9, lifetime):
        cancelled = Lifetime(20)
        timer = threading.Timer(0.01, cancelled.cancel)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(ProgramCancelled), gate.passing([1] * 9, cancelled):
            pass
        with pytest.raises(ProgramError, match="did not end within"), gate.passing([1] * 9, Lifetime(0.01)):
            pass
        assert time.monotonic() - begun < 5


def test_backends_have_the_shape_that_programs_ask_for(backend: RecordingBackend) -> None:
    typed: Backend = backend  # checked by mypy
    assert typed.decode(typed.encode("Ünïcode")) == "Ünïcode"
