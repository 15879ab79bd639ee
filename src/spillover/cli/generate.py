"""`spill generate`: complete one prompt from the command line or stdin."""

from __future__ import annotations

import sys

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError


@click.command()
@click.argument("prompt", required=False)
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to draw.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest tokens that make up this share.")
@click.option("--stop", multiple=True, help="End at this text; may be given more than once.")
@engine_options(positional=False)
def generate(config: EngineConfig, prompt: str | None, max_tokens: int, temperature: float, top_p: float,
             stop: tuple[str, ...]) -> None:
    """Complete a prompt.

    PROMPT, or what is piped in; the text is printed as it grows.

    \b
    Example:
      spill generate "The three laws of thermodynamics are" --max-tokens 64
    """
    from spillover.cli.loading import open_llm
    from spillover.engine.sampling_params import SamplingParams

    if prompt is None and sys.stdin.isatty():
        raise SpilloverError('nothing to complete; give a prompt, as in: spill generate "Once upon a time"')
    text = sys.stdin.read() if prompt is None else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop)
    with open_llm(config) as llm:
        shown = 0
        for result in llm.stream(text, params):
            grown = result.outputs[0].text
            click.echo(grown[shown:], nl=False)
            shown = len(grown)
        click.echo()
