"""The demo's chats: eight of them over a KV cache that holds one, with and without spilling to host memory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spillover.cli.bench.bench_tiers import bare
from spillover.engine.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spillover.engine.llm import LLM
    from spillover.engine.output.outputs import RequestOutput, TokenSources

# Each chat is about the documentation of a module of the standard library.
MODULES = ("json", "statistics", "argparse", "csv", "re", "copy", "shelve", "heapq")
TEXT_TOKENS = 420
FIRST = ("This is the documentation of the Python module {name}:\n\n{text}\n\n"
         "What is {name} for? Answer in one sentence.")
SECOND = "When would I use it?"
ANSWER_TOKENS = (16, 8)  # output tokens of the first and the second question
MODEL_LEN = 640  # longer than any chat; the device's blocks hold exactly this many tokens

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    text: str
    first_token: float
    sources: TokenSources


def show_chats(console: Console, config: EngineConfig) -> None:
    """Ask each chat twice, with spilling and without: the second time its KV is restored or recomputed."""
    from spillover.cli.loading import open_llm

    starved = _starved(config)
    with open_llm(starved) as llm, console.status("eight chats, with spilling"):
        chats = [[{"role": "user", "content": FIRST.format(name=name, text=_documentation(llm, name))}]
                 for name in MODULES]
        for chat in chats:
            answer = _ask(llm, chat, ANSWER_TOKENS[0])
            chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": SECOND}]
        spilled = [_ask(llm, chat, ANSWER_TOKENS[1]) for chat in chats]
    with open_llm(bare(starved)) as llm, console.status("the same without"):
        computed = [_ask(llm, chat, ANSWER_TOKENS[1]) for chat in chats]
    console.print(_table(computed, spilled))
    same = sum(ours.text == theirs.text for ours, theirs in zip(spilled, computed, strict=True))
    console.print(f"same text with and without: {same} of {len(chats)}, such as: {spilled[0].text.strip()!r} ...",
                  style=None if same == len(chats) else "bold red", highlight=False, markup=False)


def _starved(config: EngineConfig) -> EngineConfig:
    """Return the flags with a device pool for one chat and host memory for all."""
    from spillover.cli.loading import plan_only
    from spillover.plan.tiers import slot_stride

    config = replace(bare(config), gpu_memory=None, max_model_len=MODEL_LEN)
    groups = len(plan_only(config).plan.windows)
    config = replace(config, num_gpu_blocks_override=groups * -(-MODEL_LEN // config.block_size))
    plan = plan_only(config).plan
    return replace(config, host_memory=str(len(MODULES) * plan.num_blocks * slot_stride(plan.slot_bytes)))


def _documentation(llm: LLM, name: str) -> str:
    assert llm.tokenizer is not None
    text = importlib.import_module(name).__doc__ or name
    return llm.tokenizer.decode(llm.tokenizer.encode(text.strip())[:TEXT_TOKENS])


def _ask(llm: LLM, chat: list[Message], tokens: int) -> Answer:
    from spillover.engine.requests.sampling_params import SamplingParams

    output: RequestOutput = llm.chat(chat, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)[0]
    assert output.timings is not None
    return Answer(output.outputs[0].text, output.timings.first_token - output.timings.arrived, output.sources)


def _table(computed: list[Answer], spilled: list[Answer]) -> Table:
    from spillover.bench.table import make_table

    table = make_table("TTFT of the second question; where its prompt came from with spilling", "chat about", "without",
                       "with spilling", "faster", "computed", "device", "host")
    rows = [(name, [without], [ours]) for name, without, ours in zip(MODULES, computed, spilled, strict=True)]
    for name, without, ours in [*rows, ("all", computed, spilled)]:
        before, after = (sum(answer.first_token for answer in answers) / len(answers) for answers in (without, ours))
        table.add_row(
            name, f"{1e3 * before:,.0f} ms", f"{1e3 * after:,.0f} ms", f"{before / after:.1f}x",
            *(f"{sum(getattr(answer.sources, source) for answer in ours):,}" for source in
              ("computed", "device", "host")),
            end_section=name == MODULES[-1])
    return table
