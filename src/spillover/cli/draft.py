"""`spill draft`: training of draft models, which speed up another model."""

from __future__ import annotations

from pathlib import Path

import click

from spillover.cli.options import NearestChoice
from spillover.units import format_bytes


@click.group()
def draft() -> None:
    """Train draft models, which predict the tokens of another model.

    \b
    Example:
      spill draft train default --out ./SmolLM2-draft
    """


@draft.command()
@click.argument("model")
@click.option("--out", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Folder to write; answers and checkpoints go to DIR/training, which may be removed afterwards.")
@click.option("--data", type=click.Path(path_type=Path), metavar="FILE",
              help="Prompts that the model answers: one a line, or .json and .jsonl with texts or conversations, of "
                   "which the first message is used. Without it the model generates prompts.")
@click.option("--method", type=NearestChoice(("draft_model", "eagle3")), default="draft_model", show_default=True,
              help="A small model that drafts by itself, or an EAGLE-3 head, which reads the model's hidden states.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, metavar="N",
              help="Layers of the draft model, which begin as the model's first and last ones.")
@click.option("--draft-vocab", type=click.IntRange(0), default=8192, show_default=True, metavar="N",
              help="Size of its vocabulary, the most frequent tokens of the answers; 0 is the whole vocabulary.")
@click.option("--answers", type=click.IntRange(1), default=4000, show_default=True, metavar="N",
              help="Answers to learn from, every second one greedy, the others at temperature 0.7.")
@click.option("--answer-tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N",
              help="Maximum tokens of an answer.")
@click.option("--steps", type=click.IntRange(1), default=2000, show_default=True, metavar="N", help="Training steps.")
@click.option("--batch-tokens", type=click.IntRange(1), default=8192, show_default=True, metavar="N",
              help="Tokens of a training step.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, metavar="RATE",
              help="Highest learning rate, which rises at first and falls to a twentieth.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of answers and batches.")
@click.option("--device", type=NearestChoice(("auto", "cpu", "cuda")), default="auto", show_default=True,
              help="Device for generating answers and for training.")
@click.option("--resume", is_flag=True, help="Continue the training in DIR with its answers.")
def train(model: str, folder: Path, data: Path | None, method: str, layers: int, draft_vocab: int, answers: int,
          answer_tokens: int, steps: int, batch_tokens: int, learning_rate: float, seed: int, device: str,
          resume: bool) -> None:
    """Train a small draft model for MODEL on its own answers.

    The model answers prompts; a decoder of a few layers learns to give its tokens the same probabilities. The folder
    contains a Llama model of those layers in bfloat16, and the list of tokens in its vocabulary. Serve with it by
    --speculative-model. With --method eagle3 it is an EAGLE-3 head in the published format, for the method eagle3.

    \b
    Examples:
      spill draft train default --out ./SmolLM2-draft --data prompts.txt
      spill serve --speculative-model ./SmolLM2-draft
      spill draft train default --out ./SmolLM2-eagle3 --method eagle3
      spill serve --speculative-method eagle3 --speculative-model ./SmolLM2-eagle3
    """
    from spillover.progress import IMPORTING, stages

    with stages() as show:
        show(IMPORTING, 0, 0)
        from spillover.training.train import TrainOptions
        from spillover.training.train import train as run

        options = TrainOptions(method=method, layers=layers, draft_vocab=draft_vocab, steps=steps,
                               batch_tokens=batch_tokens, learning_rate=learning_rate, answers=answers,
                               answer_tokens=answer_tokens, seed=seed, device=device)
        trained = run(model, folder, options, data, resume, show)
    click.echo(f"{format_bytes(trained.nbytes)}; loss {trained.first_loss:.2f} -> {trained.last_loss:.2f}; most "
               f"likely token agrees at {trained.agreement:.1%} of held-out tokens; the vocabulary covers "
               f"{trained.covered:.1%} of the answers' tokens", err=True)
    click.echo(str(trained.folder))
