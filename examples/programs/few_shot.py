"""Few-shot: many questions after the same examples. The examples are computed once for all questions."""

from __future__ import annotations

from calls import Calls, backend_of_arguments

from spillover.programs import State, gen, program

FACTS = [("France", "Paris", "euro"), ("Japan", "Tokyo", "yen"), ("Egypt", "Cairo", "pound"), ("Peru", "Lima", "sol"),
         ("Norway", "Oslo", "krone"), ("Kenya", "Nairobi", "shilling"), ("Canada", "Ottawa", "dollar"),
         ("Poland", "Warsaw", "zloty"), ("Turkey", "Ankara", "lira"), ("Cuba", "Havana", "peso")]
SHOTS = "".join(f"Question: What is the capital of {land}, and what do people pay with there?\n"
                f"Answer: The capital is {city}, and people pay with the {money}.\n" for land, city, money in FACTS)
QUESTIONS = [f"What is the capital of {land}, and what do people pay with there?" for land in (
    "Italy", "China", "Brazil", "India", "Sweden", "Ghana", "Chile", "Thailand", "Hungary", "Morocco", "Spain",
    "Vietnam", "Denmark", "Nigeria", "Mexico", "Greece")]


@program(temperature=0)
def few_shot(s: State, question: str) -> None:
    s += SHOTS
    s += f"Question: {question}\nAnswer:" + gen("answer", max_tokens=24, stop="\n")


def run(backend: object) -> list[str]:
    states = few_shot.run_batch([{"question": question} for question in QUESTIONS], backend=backend, progress=False)
    return [state["answer"] for state in states]


def by_hand(calls: Calls) -> list[str]:
    return calls.map(lambda question: calls.complete(f"{SHOTS}Question: {question}\nAnswer:", temperature=0,
                                                     max_tokens=24, stop=["\n"]), QUESTIONS)


if __name__ == "__main__":
    for question, answer in zip(QUESTIONS, run(backend_of_arguments(__doc__)), strict=True):
        print(f"{question}{answer}")
