"""Tree of thought: several plans for a task, each worked out in several versions and judged, printed best first."""

from __future__ import annotations

from calls import Calls, backend_of_arguments

from spillover.programs import State, assistant, gen, program, user

TASK = ("A small town has one bridge over its river. On market days, which are Wednesday and Saturday, eight "
        "hundred cars, two hundred bicycles and many people on foot cross it between eight and ten in the "
        "morning, and everybody is late. The town has fifty thousand to spend, no room for a second bridge "
        "beside the first, and a school at one of its ends. How could the town make the crossing faster and "
        "safer within a year?")
PLAN = "Think of one plan, and say in two sentences what it is. This is plan number {}."
WORK = "Carry the plan out: say what is done first, what it costs, and what could go wrong. This is version {}."
JUDGE = "Judge this plan with a number from 0 to 9, where 9 is best."
PLANS, VERSIONS = 3, 2


@program(temperature=0, max_tokens=40)
def tree_of_thought(s: State) -> list[tuple[str, str]]:
    s += user(TASK)
    s += assistant("I will think of several plans, carry each out, and judge them.")
    leaves = []
    plans = s.fork([f"plan{index + 1}" for index in range(PLANS)])
    for index, plan in enumerate(plans):
        plan += user(PLAN.format(index + 1))
        plan += assistant(gen("plan"))
        for number, version in enumerate(plan.fork(VERSIONS)):
            version += user(WORK.format(number + 1))
            version += assistant(gen("work"))
            version += user(JUDGE)
            version += assistant("I give it " + gen("mark", regex="[0-9]"))
            leaves.append(version)
    return [(leaf["mark"], leaf["work"]) for leaf in leaves]


def run(backend: object) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = tree_of_thought.run(backend=backend).returned
    return found


def by_hand(calls: Calls) -> list[tuple[str, str]]:
    begin = [{"role": "user", "content": TASK},
             {"role": "assistant", "content": "I will think of several plans, carry each out, and judge them."}]

    def said(messages: list[dict[str, str]], role: str, text: str) -> list[dict[str, str]]:
        return [*messages, {"role": role, "content": text}]

    def plan(index: int) -> list[tuple[str, str]]:
        asked = said(begin, "user", PLAN.format(index + 1))
        planned = said(asked, "assistant", calls.chat(asked, temperature=0, max_tokens=40))

        def version(number: int) -> tuple[str, str]:
            messages = said(planned, "user", WORK.format(number + 1))
            work = calls.chat(messages, temperature=0, max_tokens=40)
            messages = said(said(messages, "assistant", work), "user", JUDGE)
            mark = calls.chat(messages, temperature=0, max_tokens=40, structured_outputs={"regex": "I give it [0-9]"})
            return mark[-1:], work

        return calls.map(version, range(VERSIONS))

    return [leaf for leaves in calls.map(plan, range(PLANS)) for leaf in leaves]


if __name__ == "__main__":
    for mark, work in sorted(run(backend_of_arguments(__doc__)), reverse=True):
        print(f"{mark}: {work}")
