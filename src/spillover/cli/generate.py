"""`spill generate`: complete one prompt from the command line or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.options import engine_options
from spillover.cli.sampling_options import sampling_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.requests.sampling_params import SamplingParams

STDIN = "-"


def _place_model(flags: dict[str, Any], given: dict[str, Any]) -> None:
    """Use the first of two positional words as the model."""
    words = given["words"]
    if len(words) > 2:
        raise SpilloverError("generate takes a prompt, or a model and a prompt; put a prompt of several words in "
                             "quotes")
    if len(words) == 2:
        if flags["model"] is not None:
            raise SpilloverError(f"the model was given twice, as '{words[0]}' and as --model {flags['model']}: give it "
                                 "once")
        flags["model"] = words[0]


@click.command()
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@sampling_options()
@click.option("-n", "--n", "n", type=int, default=1, show_default=True, help="Generate this many completions.")
@click.option("--schema", default=None, metavar="FILE|JSON",
              help="Generate JSON that a JSON schema accepts, given as a file or in full.")
@click.option("--json", "as_json", is_flag=True,
              help="Print the whole result as JSON: text, token ids, finish reason, timings, prompt tokens by source.")
@engine_options(positional=False, complete=_place_model)
def generate(config: EngineConfig, sampling: dict[str, Any], words: tuple[str, ...], n: int, schema: str | None,
             as_json: bool) -> None:
    """Complete a prompt.

    PROMPT is a text, or - for standard input; the answer is streamed. With two words, the first is the model.

    \b
    Examples:
      spill generate "The three laws of thermodynamics are" --max-tokens 64
      spill generate ./Llama-3.1-8B "Once upon a time" --temperature 0.8 --top-k 40 -n 3
      cat prompt.txt | spill generate - --json
      spill generate "A person as JSON: " --schema '{"type": "object", "properties": {"age": {"type": "integer"}}}'
    """
    from spillover.cli.loading import open_llm
    from spillover.engine.requests.sampling_params import SamplingParams, StructuredOutputs

    structured = None if schema is None else StructuredOutputs(json=_schema(schema))
    params = SamplingParams(n=n, structured_outputs=structured, **sampling)
    text = _prompt(words[-1] if words else None)
    with open_llm(config) as llm:
        if as_json:
            click.echo(_as_json(llm, text, params))
        elif n > 1:
            (result,) = llm.generate([text], params, use_tqdm=False)
            for place, output in enumerate(result.outputs):
                click.echo(f"[{place + 1}] {output.text}")
        else:
            shown = 0
            for result in llm.stream(text, params):
                grown = result.outputs[0].text
                click.echo(grown[shown:], nl=False)
                shown = len(grown)
            click.echo()


def _prompt(word: str | None) -> str:
    if word is not None and word != STDIN:
        return word
    if word is None and sys.stdin.isatty():
        raise SpilloverError('nothing to complete; give a prompt, as in: spill generate "Once upon a time"')
    text = sys.stdin.read()
    if not text.strip():
        raise SpilloverError('standard input is empty; as in: echo "Once upon a time" | spill generate -')
    return text


def _schema(given: str) -> dict[str, object]:
    """Return a JSON schema, given as text or as a file."""
    text, where = given, "--schema"
    if not given.lstrip().startswith("{"):
        where = f"--schema {given}"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpilloverError(f"cannot read --schema '{given}': {getattr(error, 'strerror', None) or error}; give a "
                                 "file or the schema itself") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpilloverError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpilloverError(f"""{where} is not a JSON object such as {{"type": "object"}}""")
    return value


def _as_json(llm: LLM, text: str, params: SamplingParams) -> str:
    from dataclasses import asdict

    (result,) = llm.generate([text], params, use_tqdm=False)
    return json.dumps(asdict(result) | {"num_cached_tokens": result.num_cached_tokens}, ensure_ascii=False)
