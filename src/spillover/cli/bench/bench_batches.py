"""`spill bench batches`: an engine in this process that is given whole batches, for measurements without a server."""

from __future__ import annotations

import signal
import sys

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@engine_options()
def batches(config: EngineConfig, host: str, port: int) -> None:
    """Run an engine that accepts whole batches, as `LLM.generate` does; the lab's engine `in-process` starts it.

    POST /batch takes prompts as token ids and answers when all are finished, with the times of each by the engine's
    clock, so that neither HTTP nor a front process is measured. One batch at a time; until SIGTERM or Ctrl-C.

    \b
    Example:
      spill bench batches --port 8000 --max-num-seqs 64
    """
    from spillover.cli.bench.batch_server import serve_batches
    from spillover.cli.loading import open_llm, plan_only

    size = plan_only(config).model_config.vocab_size
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with open_llm(config) as llm:
        serve_batches(llm, size, host, port)
