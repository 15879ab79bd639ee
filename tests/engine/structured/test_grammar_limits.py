"""A grammar too expensive to compile is rejected within its limits, without delay or cost for other requests."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillover.engine.requests.sampling_params import StructuredOutputs
from spillover.engine.structured import grammar_process, structured
from spillover.engine.structured.structured import Grammar, GrammarCompiler, GrammarLimits
from spillover.errors import GrammarRefused
from support.models.grammars import allowed, byte_level, walk

SECONDS = 0.5


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_level(), GrammarLimits(SECONDS, 128 * 2**20))
    made.compile(StructuredOutputs(choice=("warm",)))
    yield made
    made.close()


def bombs() -> list[StructuredOutputs]:
    return [
        *(StructuredOutputs(json={"type": "integer", "multipleOf": 4_999_999 - 2 * i}) for i in range(5)),
        StructuredOutputs(json={"allOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967, 9949)]}),
        StructuredOutputs(grammar='start: %json {"type": "integer", "multipleOf": 4999999}'),
        StructuredOutputs(regex="a?" * 8000),
    ]


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_bombs_are_refused_and_small_grammars_go_past_them(compiler: GrammarCompiler) -> None:
    order: list[str] = []

    def note(name: str, future: Future[Grammar]) -> None:
        future.add_done_callback(lambda _: order.append(name))

    before = resident()
    loud = [compiler.begin(bomb) for bomb in bombs()]
    for future in loud:
        note("bomb", future)
    small = [compiler.begin(StructuredOutputs(choice=(f"yes{i}", "no"))) for i in range(3)]
    for future in small:
        note("small", future)
    assert all(allowed(future.result(timeout=120), byte_level()) for future in small)
    for future in loud:
        with pytest.raises(GrammarRefused) as refusal:
            future.result(timeout=120)
        assert "\n" not in str(refusal.value) or "does not compile" in str(refusal.value)
    # Each bomb runs for at most a short time slice before the small grammars; the long ones come later.
    assert "bomb" in order[order.index("small"):]
    assert resident() - before < 64 * 2**20
    refused = dict(compiler.stats().refused)
    assert refused["time"] >= 6


def test_a_refused_grammar_is_refused_at_once_the_second_time(compiler: GrammarCompiler) -> None:
    bomb = StructuredOutputs(json={"type": "integer", "multipleOf": 3_999_971})
    with pytest.raises(GrammarRefused, match=r"more than 0.5 s to compile \(--grammar-timeout\)"):
        compiler.compile(bomb)
    started = time.process_time()
    with pytest.raises(GrammarRefused, match="--grammar-timeout"):
        compiler.compile(bomb)
    assert time.process_time() - started < SECONDS / 2


def test_a_grammar_that_eats_memory_is_refused() -> None:
    compiler = GrammarCompiler(byte_level(), GrammarLimits(20.0, 16 * 2**20))
    try:
        with pytest.raises(GrammarRefused, match="--grammar-memory") as refusal:
            compiler.compile(StructuredOutputs(json={"type": "integer", "multipleOf": 999_983}))
        assert refusal.value.reason == "memory"
        assert compiler.compile(StructuredOutputs(choice=("still", "there")))
    finally:
        compiler.close()


def test_what_is_kept_is_given_up_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "LEAST_BYTES", 6 * 2**20)
    compiler = GrammarCompiler(byte_level(), GrammarLimits(5.0, 16 * 2**20))
    try:
        for name in ("a", "b", "c", "b", "a"):  # two fit: c evicts a, a evicts c
            compiler.compile(StructuredOutputs(choice=(name,)))
            assert compiler.stats().kept_bytes <= 16 * 2**20
        assert (compiler.stats().compiled, compiler.stats().reused) == (4, 1)
    finally:
        compiler.close()


def test_the_trial_process_may_die_and_leaves_with_its_owner(compiler: GrammarCompiler) -> None:
    first = compiler._trials.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    for attempt in range(100):  # until its death is noticed
        try:
            compiler.compile(StructuredOutputs(choice=(f"again {attempt}",)))
            break
        except GrammarRefused:
            time.sleep(0.05)
    second = compiler._trials.pid
    assert second not in (None, first)
    other = GrammarCompiler(byte_level(), GrammarLimits(600.0, 2**30))
    waiting = other.begin(StructuredOutputs(json={"type": "integer", "multipleOf": 4_999_999}))
    while not (pid := other._trials.pid):
        time.sleep(0.01)
    other.close()
    with pytest.raises(GrammarRefused, match="structured output could not be prepared"):
        waiting.result(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_grammar_that_is_slow_per_token_ends_its_request(compiler: GrammarCompiler,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="[a-z]+"))
    grammar.mask()
    assert grammar.error is None
    monkeypatch.setattr(structured, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(structured, "TOKEN_SECONDS", 0.0)
    grammar.mask()
    assert "per token" in str(grammar.error)
    assert grammar.finished


def test_a_grammar_that_outgrows_the_limits_of_a_step_says_so(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="((((a|b){1,100}){1,100}){1,100}){1,100}"))
    tokenizer = byte_level()
    for _ in range(200):
        tokens = allowed(grammar, tokenizer)
        if grammar.error is not None:
            break
        grammar.accept(next(token for token in tokens if token not in tokenizer.eos_token_ids))
    assert "too complex" in str(grammar.error)


def test_many_threads_compile_at_once(compiler: GrammarCompiler) -> None:
    made: list[str] = []

    def work(i: int) -> None:
        made.append(walk(compiler.compile(StructuredOutputs(choice=(f"t{i % 3}",))), byte_level(), i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(f"t{i % 3}" for i in range(12))


def test_frames_come_out_whole_however_they_are_cut() -> None:
    frames, read, write = grammar_process.Frames(), *os.pipe()
    sent = [b"", b"a", b"x" * 1000]
    for data in sent:
        grammar_process.write_frame(write, data)
    os.close(write)
    got: list[bytes] = []
    while data := os.read(read, 7):
        got += frames.feed(data)
    os.close(read)
    assert got == sent


leaf = st.sampled_from([
    {"type": "string"}, {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": -5, "maximum": 500},
    {"type": "integer", "multipleOf": 7}, {"type": "boolean"}, {"type": "null"}, {"enum": ["a", "b c", 3, None]},
    {"const": "x"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "number"},
])
schemas = st.recursive(leaf, lambda inner: st.one_of(
    st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(1, 4)),
    st.builds(lambda inside: {"type": "object", "properties": inside, "required": list(inside),
                              "additionalProperties": False},
              st.dictionaries(st.sampled_from("abcde"), inner, min_size=1, max_size=4)),
    st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=3)),
), max_leaves=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas, seed=st.integers(0, 1000))
def test_ordinary_schemas_are_let_through_and_kept_to(compiler: GrammarCompiler, schema: dict[str, object],
                                                      seed: int) -> None:
    json.loads(walk(compiler.compile(StructuredOutputs(json=schema)), byte_level(), seed, patience=20))


@pytest.mark.parametrize("outputs", [
    StructuredOutputs(json={"enum": list(range(100_000))}),
    StructuredOutputs(json=json.dumps({"enum": list(range(40_000))})),
    StructuredOutputs(choice=("x" * 100_000,)),
])
def test_sizes_are_refused_before_anything_is_tried(compiler: GrammarCompiler, outputs: StructuredOutputs) -> None:
    before = dict(compiler.stats().refused)
    with pytest.raises(GrammarRefused, match=r"at most|more than") as refusal:
        compiler.compile(outputs)
    assert refusal.value.reason == "size"
    assert dict(compiler.stats().refused).get("size", 0) == before.get("size", 0) + 1
