"""`spill cache warm`: computes the KV of prompts ahead of time and stores it on disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.memory.spill.report import TierReport

WRITE_SECONDS = 600.0  # maximum time for pending writes after everything is computed


def _onto_disk(flags: dict[str, Any], given: dict[str, Any]) -> None:
    if flags["disk"]:
        raise SpilloverError("spill cache warm writes to the PATH:SIZE it is given; leave out --disk")
    flags["disk"] = (given["place"],)
    flags["spill"] = "eager"


@click.command()
@click.argument("place", metavar="PATH:SIZE")
@click.option("--prompts", required=True, metavar="FILE",
              help='JSON lines, - for standard input: a text, {"prompt": text}, {"messages": [...]} for the chat '
                   'template, or {"prompt_token_ids": [...]}.')
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a sentence.")
@engine_options(complete=_onto_disk)
def warm(config: EngineConfig, place: str, prompts: str, as_json: bool) -> None:
    """Compute the KV of prompts and store it on disk.

    A server of the same model, started with the same --disk PATH:SIZE, finds it there. Only whole blocks are stored.

    \b
    Example:
      echo '"You are a helpful assistant."' | spill cache warm /nvme/kv:20GB --prompts -
    """
    from spillover.cli.loading import open_llm
    from spillover.units import format_bytes

    prompt_list = read_prompts(_lines(prompts))
    with open_llm(config) as llm:
        result = _warm(llm, prompt_list)
    if as_json:
        click.echo(json.dumps(asdict(result)))
    else:
        click.echo(f"{result.prompts:,} prompts, {result.tokens:,} tokens: {result.computed:,} computed, "
                   f"{result.found:,} found; {result.blocks_written:,} blocks ({format_bytes(result.bytes_written)}) "
                   f"written, {result.blocks:,} blocks ({result.block_tokens:,} tokens) in {place.rpartition(':')[0]}")
    if result.failures:
        raise SpilloverError(f"{result.failures:,} blocks could not be written to {place.rpartition(':')[0]}; "
                             "check the disk and run this again: blocks already stored are not computed again")


@dataclass(frozen=True)
class Warmed:
    prompts: int
    tokens: int  # prompt tokens
    computed: int
    found: int  # already in the cache
    blocks_written: int
    bytes_written: int
    blocks: int  # blocks of this model now on disk
    block_tokens: int  # tokens in those blocks
    failures: int


def read_prompts(lines: Iterable[str]) -> list[Any]:
    """Read texts, {"messages": ...}, or other prompts that LLM.generate accepts; refuse other lines by number."""
    prompts: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            raise SpilloverError(f'line {number} of the prompts is not JSON; a text is written in quotes: "Once upon '
                                 'a time"') from None
        if not _is_prompt(prompt):
            raise SpilloverError(f'line {number} of the prompts is not a prompt; write a text in quotes, {{"prompt": '
                                 '"..."}, {"messages": [...]} or {"prompt_token_ids": [...]}')
        prompts.append(prompt)
    if not prompts:
        raise SpilloverError('--prompts has no prompts; write one JSON value a line, such as "Once upon a time"')
    return prompts


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, dict):
        return False
    ids = value.get("prompt_token_ids")
    return (isinstance(value.get("prompt"), str) or isinstance(value.get("messages"), list)
            or (isinstance(ids, list) and all(isinstance(token, int) for token in ids)))


def _lines(file: str) -> list[str]:
    if file == "-":
        return sys.stdin.read().splitlines()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpilloverError(f"--prompts {file} cannot be read ({error})") from error


def _warm(llm: LLM, prompts: list[Any]) -> Warmed:
    from spillover.engine.requests.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    bar = sys.stderr.isatty()
    chats = [prompt["messages"] for prompt in prompts if isinstance(prompt, dict) and "messages" in prompt]
    others = [prompt for prompt in prompts if isinstance(prompt, str) or "messages" not in prompt]
    outputs = llm.chat(chats, params, use_tqdm=bar) if chats else []
    outputs += llm.generate(others, params, use_tqdm=bar) if others else []
    _finish_writing(llm)
    disk = _disk(llm)
    written = disk.bytes_in // llm.plan.slot_bytes
    return Warmed(
        prompts=len(outputs),
        tokens=sum(output.sources.total for output in outputs),
        computed=sum(output.sources.computed for output in outputs),
        found=sum(output.sources.cached for output in outputs),
        blocks_written=written,
        bytes_written=disk.bytes_in,
        blocks=disk.blocks,
        block_tokens=llm.plan.tokens(disk.blocks),
        failures=disk.failures + disk.dropped,
    )


def _finish_writing(llm: LLM) -> None:
    connector, deadline = llm.engine.scheduler.connector, time.monotonic() + WRITE_SECONDS
    connector.poll()
    while connector.busy and time.monotonic() < deadline:
        connector.wait(0.05)
        connector.poll()


def _disk(llm: LLM) -> TierReport:
    return next(report for report in llm.stats().tiers if report.name == "disk")
