"""The requests of a branch to the model: an answer, the likeliest of several texts, or prefilling text ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spillover.errors import SpilloverError
from spillover.programs.backend import Prompt
from spillover.programs.expressions import Select, normalise
from spillover.programs.lifetime import ProgramError

if TYPE_CHECKING:
    from spillover.programs.run import Run
    from spillover.programs.state import State, Task

AHEAD_TOKENS = 64  # minimum number in whole blocks; a request for fewer costs more than it saves


def generate(state: State, run: Run, task: Task, options: Mapping[str, Any]) -> str:
    prompt = state.context.prompt()
    with run.passing(prompt.ids) as computed:

        def grown(text: str) -> None:
            computed()
            run.emit(state.name, task.name, text)

        answer = run.backend.generate(prompt, options, run.lifetime, grown)
    state.count(answer.counts)
    if answer.finish_reason == "error":
        raise ProgramError(f"gen '{task.name}' ended with an error: {answer.stop_reason}")
    if prompt.ids is not None and answer.token_ids:
        run.backend.gate.note([*prompt.ids, *answer.token_ids[:-1]])
    state.context.answer(answer)
    task.details.update(finish_reason=answer.finish_reason, stop_reason=answer.stop_reason,
                        token_ids=answer.token_ids, counts=answer.counts)
    return answer.text


def select_likeliest(state: State, run: Run, task: Task, select: Select) -> str:
    backend = run.backend
    prefix = state.context.prompt().ids
    if prefix is None:
        raise ProgramError(f"select needs the tokens of its prompt, but {backend.name} has no /tokenize for it; use "
                           "gen(regex='yes|no') there, or another server")
    choices = [backend.encode(choice) for choice in select.choices]
    prompts = [prefix + ids for ids in choices]
    # The first leaves the common prefix in the cache; once it is cached, all are sent together.
    first = 1 if backend.gate.cold(prefix) else len(prompts)
    scores = []
    for part in (prompts[:first], prompts[first:]):
        if part:
            with run.passing(part[0], len(prefix) - 1) as computed:
                scores += backend.score(part, len(prefix), run.lifetime)
                computed()
    for score in scores:
        state.count(score.counts)
    values = [normalise(score.logprobs, choice, select.normalised)
              for score, choice in zip(scores, select.choices, strict=True)]
    best = max(range(len(values)), key=values.__getitem__)
    state.context.chosen(select.choices[best], choices[best])
    task.details.update(scores=dict(zip(select.choices, values, strict=True)),
                        logprobs=[score.logprobs for score in scores])
    run.emit(state.name, task.name, select.choices[best])
    return select.choices[best]


def prefill_ahead(state: State, run: Run) -> None:
    """Prefill known fixed text while the program does something else, if there is enough of it."""
    if not run.prefills:
        return
    try:
        ids = state.context.ahead()
        if run.backend.gate.cold(ids) < AHEAD_TOKENS:
            return
        with run.passing(ids) as computed:
            answer = run.backend.generate(Prompt(ids), {"max_tokens": 1, "temperature": 0}, run.lifetime,
                                          lambda _: computed())
    except ProgramError:  # cancelled or timed out
        raise
    except SpilloverError:  # the gen that follows will fail with the same error and report it
        return
    state.count(answer.counts)
