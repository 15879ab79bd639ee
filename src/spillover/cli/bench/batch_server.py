"""An HTTP server for an engine in this process that is given whole batches: `spill bench batches`."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from spillover.engine.output.outputs import NO_DRAFTS
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import SpilloverError

if TYPE_CHECKING:
    from spillover.engine.llm import LLM
    from spillover.engine.output.outputs import RequestOutput
    from spillover.engine.speculation.speculator import SpeculationStats


def serve_batches(llm: LLM, size: int, host: str, port: int) -> None:
    """Serve until the process is terminated. `size`: size of the vocabulary."""
    class Handler(_Handler):
        engine, vocab_size, lock = llm, size, threading.Lock()

    with ThreadingHTTPServer((host, port), Handler) as server:
        server.daemon_threads = True
        print(f"batches at http://{host}:{port}", flush=True)
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    engine: LLM
    vocab_size: int
    lock: threading.Lock  # held while a batch runs; health and metrics are answered concurrently

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
                with self.lock:
                    reply = generate(self.engine, body)
            except SpilloverError as error:
                self._answer(400, {"error": str(error)})
            else:
                self._answer(200, reply)
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
    """Run a batch; return its seconds, and when each request arrived, gave its first token and finished."""
    params = [SamplingParams(max_tokens=length, ignore_eos=body["ignore_eos"], detokenize=False, **body["sampling"])
              for length in body["output_lens"]]
    before, start = llm.stats().speculation, time.monotonic()
    if body["one_by_one"]:
        outputs = [llm.generate([prompt], [each], use_tqdm=False)[0]
                   for prompt, each in zip(body["prompts"], params, strict=True)]
    else:
        outputs = llm.generate(body["prompts"], params, use_tqdm=False)
    seconds = time.monotonic() - start
    return {"seconds": seconds, "requests": [_request_json(output, start) for output in outputs],
            "counters": _counters(outputs, before, llm.stats().speculation)}


def _counters(outputs: list[RequestOutput], before: SpeculationStats | None,
              after: SpeculationStats | None) -> dict[str, float]:
    """Return the counters of speculation over a batch, by the names that `spill serve` has in /metrics."""
    if before is None or after is None:
        return {}
    counts, label = sum((output.drafts for output in outputs), NO_DRAFTS), f"/{str(after.simulated).lower()}"
    values = {"num_drafts": counts.drafts, "num_draft_tokens": counts.tokens, "num_accepted_tokens": counts.accepted,
              "num_proposed_tokens": after.proposed - before.proposed,
              "draft_milliseconds": 1e3 * (after.draft_seconds - before.draft_seconds),
              "verify_milliseconds": 1e3 * (after.verify_seconds - before.verify_seconds),
              **{f"num_accepted_tokens_per_pos/{position}": count for position, count in enumerate(counts.by_position)}}
    return {f"spec_decode_{name}{label}": value for name, value in values.items()}


def _request_json(output: RequestOutput, start: float) -> dict[str, Any]:
    timings = output.timings
    assert timings is not None
    return {"sent": timings.arrived - start, "first": timings.first_token - start, "done": timings.finished - start,
            "output_tokens": sum(len(each.token_ids) for each in output.outputs), "sources": asdict(output.sources),
            "timings": {"queue": timings.queue, "restore": timings.restore, "prefill": timings.prefill,
                        "decode": timings.decode}}
