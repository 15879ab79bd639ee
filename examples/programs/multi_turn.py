"""Multi-turn: several conversations with one assistant; no turn computes the earlier turns again."""

from __future__ import annotations

from calls import Calls, backend_of_arguments

from spillover.programs import State, assistant, gen, program, system, user

RULES = ("You are the assistant of a public library. You answer in one or two short sentences. You know that "
         "the library opens at nine, closes at six, and is closed on Sundays. Books are lent for four weeks, "
         "films for one week. A book that is late costs ten cents a day, a film fifty. New readers need a "
         "passport and pay nothing. Children under twelve come with a parent. There are thirty places to read, "
         "ten computers, and a room for groups of up to eight, which can be reserved a week ahead. Nobody eats "
         "in the reading room, and telephones are silent.")
TURNS = ["How long may I keep it, and what happens when I am late?", "When can I bring it back on a Saturday?",
         "My daughter is ten: may she come alone, and what does she need?", "Where could the two of us work together?"]
TOPICS = ["a book about bridges", "a film about penguins", "a book of poems", "a film from the fifties"]


@program(temperature=0, max_tokens=40)
def multi_turn(s: State, topic: str) -> list[str]:
    s += system(RULES)
    for turn, question in enumerate(TURNS):
        s += user(f"I would like to borrow {topic}. {question}" if turn == 0 else question)
        s += assistant(gen(f"answer{turn}"))
    return [s[f"answer{turn}"] for turn in range(len(TURNS))]


def run(backend: object) -> list[list[str]]:
    states = multi_turn.run_batch([{"topic": topic} for topic in TOPICS], backend=backend, progress=False)
    return [state.returned for state in states]


def by_hand(calls: Calls) -> list[list[str]]:
    def talk(topic: str) -> list[str]:
        messages, answers = [{"role": "system", "content": RULES}], []
        for turn, question in enumerate(TURNS):
            said = f"I would like to borrow {topic}. {question}" if turn == 0 else question
            messages.append({"role": "user", "content": said})
            answers.append(calls.chat(messages, temperature=0, max_tokens=40))
            messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    return calls.map(talk, TOPICS)


if __name__ == "__main__":
    for topic, answers in zip(TOPICS, run(backend_of_arguments(__doc__)), strict=True):
        print(topic, *answers, sep="\n  ")
