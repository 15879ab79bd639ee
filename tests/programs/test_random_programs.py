"""Random programs with forks, gens and selects, compared with an interpreter that runs one step after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spillover import LLM, SamplingParams
from spillover.programs import Program, State, backend_of, gen, program, select
from spillover.programs.expressions import normalise
from spillover.programs.recording import RecordingBackend, findable

WORDS = st.text("abc de.\n", min_size=1, max_size=70)


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Ask:
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Choose:
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    branches: tuple[tuple[Any, ...], ...]


PLAIN = st.one_of(
    st.builds(Say, WORDS), st.builds(Ask, st.integers(1, 20), st.none() | st.integers(0, 9)),
    st.builds(Choose, st.lists(st.text("xyz ", min_size=1, max_size=9), min_size=2, max_size=3, unique=True)
              .map(tuple)))
STEPS = st.recursive(st.lists(PLAIN, max_size=3).map(tuple), lambda inner: st.builds(
    lambda before, branches, after: (*before, Split(tuple(branches)), *after),
    st.lists(PLAIN, max_size=2), st.lists(inner, min_size=1, max_size=3), st.lists(PLAIN, max_size=2)), max_leaves=6)
WHOLE = st.builds(lambda begin, steps: (Say(begin), *steps), WORDS, STEPS)


def options(ask: Ask) -> dict[str, Any]:
    return {"max_tokens": ask.max_tokens, "temperature": 0.0 if ask.seed is None else 1.0, "seed": ask.seed,
            "ignore_eos": True}


def written(s: State, steps: tuple[Any, ...], path: str, found: dict[str, Any]) -> None:
    """Run the steps as a program."""
    for index, step in enumerate(steps):
        name = f"{path}/{index}"
        if isinstance(step, Say):
            s += step.text
        elif isinstance(step, Ask):
            s += gen(name, **options(step))
        elif isinstance(step, Choose):
            s += select(name, step.choices)
        else:
            forks = s.fork(len(step.branches))
            for number, (branch, inner) in enumerate(zip(forks, step.branches, strict=True)):
                written(branch, inner, f"{name}.{number}", found)
            found[name] = forks
    found[path] = s


class Reference:
    """Runs the same steps, one request after another."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.texts: dict[str, str] = {}
        self.values: dict[str, str] = {}

    def walk(self, ids: list[int], text: str, steps: tuple[Any, ...], path: str) -> None:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        for index, step in enumerate(steps):
            name = f"{path}/{index}"
            if isinstance(step, Say):
                ids, text = ids + tokenizer.encode(step.text, not ids), text + step.text
            elif isinstance(step, Ask):
                made = self._llm.generate([ids], SamplingParams(**options(step)), False)[0].outputs[0]
                ids, text = ids + made.token_ids, text + made.text
                self.values[name] = made.text
            elif isinstance(step, Choose):
                best, tokens = max(((choice, tokenizer.encode(choice, False)) for choice in step.choices),
                                   key=lambda pair: self._score(ids, *pair))
                ids, text = ids + tokens, text + best
                self.values[name] = best
            else:
                for number, inner in enumerate(step.branches):
                    self.walk(list(ids), text, inner, f"{name}.{number}")
        self.texts[path] = text

    def _score(self, ids: list[int], choice: str, tokens: list[int]) -> float:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        rows = self._llm.generate([ids + tokens], params, False)[0].prompt_logprobs
        assert rows is not None
        scored = [(row or {})[token].logprob for row, token in zip(rows[len(ids):], tokens, strict=True)]
        return normalise(scored, choice, "tokens")


def branches(found: dict[str, Any]) -> dict[str, State]:
    return {path: state for path, state in found.items() if isinstance(state, State)}


def runnable(steps: tuple[Any, ...], found: dict[str, Any]) -> Program:
    @program
    def random_program(s: State) -> None:
        written(s, steps, "main", found)

    return random_program


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=WHOLE)
@example(steps=(Say("What all of the branches begin with is here. " * 2), Split((
    (Ask(3, None),), (Say("one"), Ask(3, None)), (Choose(("yes", "no", "neither of them")), Ask(2, 1)),
    (Say("two and a text of its own"), Split(((Ask(2, None),), (Ask(2, 3), Say("..")), (Choose(("x", "yy")),))))))))
def test_random_programs_say_what_a_plain_interpreter_says_and_compute_each_block_once(llm: LLM, steps: tuple[Any, ...],
                                                                                       ) -> None:
    llm.reset_prefix_cache()
    inner = backend_of(llm)
    inner.gate.forget()
    recorded = RecordingBackend(inner)
    found: dict[str, Any] = {}
    state = runnable(steps, found).run(backend=recorded, timeout=120)
    counts = state.tokens_by_source()
    assert counts.total == sum(len(each.ids) for each in recorded.requests)
    size = inner.gate.block_size  # text generated by one branch may be requested by another at the same time
    assert findable(recorded.requests, size, settled=True) <= counts.device <= findable(recorded.requests, size)
    reference = Reference(llm)
    reference.walk([], "", steps, "main")
    assert {path: state.text() for path, state in branches(found).items()} == reference.texts
    values = {name: state[name] for path, state in branches(found).items() for name in state._named
              if name.rpartition("/")[0] == path}
    assert values == reference.values
