"""`spill bench batches`: an engine in this process that is given whole batches, for measurements without a server."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import click

from spillover.cli.options import engine_options
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.output.outputs import RequestOutput


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=8000, show_default=True, help="Port to listen at.")
@engine_options()
def batches(config: EngineConfig, host: str, port: int) -> None:
    """Run an engine that takes whole batches, as `LLM.generate` does; the lab's engine `in-process` starts it.

    POST /batch takes prompts in token ids and answers when all are done, with the times of each by the engine's clock,
    so that neither HTTP nor a front process is in what is measured. One batch at a time; until SIGTERM or Ctrl-C.

    \b
    Example:
      spill bench batches --port 8000 --max-num-seqs 64
    """
    from spillover.cli.loading import look_at, open_llm

    size = look_at(config).model_config.vocab_size
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with open_llm(config) as llm:
        class Handler(_Handler):
            engine, vocab_size, turn = llm, size, threading.Lock()

        with ThreadingHTTPServer((host, port), Handler) as server:
            server.daemon_threads = True
            click.echo(f"batches at http://{host}:{port}")
            server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    engine: LLM
    vocab_size: int
    turn: threading.Lock  # one batch at a time; health and metrics are told beside it

    def do_GET(self) -> None:
        plan = self.engine.plan
        if self.path == "/health":
            self._answer(200, {})
        elif self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "in-process", "owned_by": "spillover",
                                         "max_model_len": plan.max_model_len, "vocab_size": self.vocab_size}]})
        elif self.path == "/metrics":
            pool = f'num_gpu_blocks="{plan.num_blocks}",block_size="{plan.block_size}"'
            self._answer(200, f"spillover:cache_config_info{{{pool}}} 1\n"
                              f"spillover:num_preemptions_total {self.engine.stats().preemptions}\n")
        else:
            self._answer(404, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/reset_prefix_cache":
            self.engine.reset_prefix_cache()
            self._answer(200, {})
        elif self.path == "/batch":
            try:
                with self.turn:
                    told = generate(self.engine, body)
            except SpilloverError as error:
                self._answer(400, {"error": str(error)})
            else:
                self._answer(200, told)
        else:
            self._answer(404, {"error": f"there is no {self.path}"})

    def _answer(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


def generate(llm: LLM, body: dict[str, Any]) -> dict[str, Any]:
    """Run a batch and tell its seconds, and when each request was taken, gave its first token and ended."""
    from spillover.engine.requests.sampling_params import SamplingParams

    params = [SamplingParams(max_tokens=length, ignore_eos=body["ignore_eos"], detokenize=False, **body["sampling"])
              for length in body["output_lens"]]
    start = time.monotonic()
    if body["one_by_one"]:
        outputs = [llm.generate([prompt], [each], use_tqdm=False)[0]
                   for prompt, each in zip(body["prompts"], params, strict=True)]
    else:
        outputs = llm.generate(body["prompts"], params, use_tqdm=False)
    seconds = time.monotonic() - start
    return {"seconds": seconds, "requests": [_told(output, start) for output in outputs]}


def _told(output: RequestOutput, start: float) -> dict[str, Any]:
    timings = output.timings
    assert timings is not None
    return {"sent": timings.arrived - start, "first": timings.first_token - start, "done": timings.finished - start,
            "output_tokens": sum(len(each.token_ids) for each in output.outputs), "sources": asdict(output.sources),
            "timings": {"queue": timings.queue, "restore": timings.restore, "prefill": timings.prefill,
                        "decode": timings.decode}}
