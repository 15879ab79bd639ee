"""A server whose behaviour is set by arguments: in tests it stands in for an engine that crashes, hangs or forgets.

Run as a program: `stub_server.py --port N [--then WHAT] [--child] [--say TEXT] ...`. It answers health, /v1/models,
/version, /metrics (a counter that grows with each POST to /work) and the routes by which engines empty their caches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def main(argv: list[str]) -> None:
    flags = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--then", default="serve", choices=("serve", "exit", "hang", "stubborn"))
    flags.add_argument("--status", type=int, default=1, help="exit status of --then exit")
    flags.add_argument("--say", action="append", default=[])
    flags.add_argument("--children", type=Path, help="start two processes and write their numbers here")
    flags.add_argument("--page", type=Path, help="what /metrics says, with N where the counter stands")
    asked, _ = flags.parse_known_args(argv)
    for text in asked.say:
        print(text, flush=True)
    if asked.children is not None:
        children = [subprocess.Popen(SLEEPER), subprocess.Popen(SLEEPER, start_new_session=True)]
        asked.children.write_text(json.dumps([child.pid for child in children]))
    if asked.then == "exit":
        sys.exit(asked.status)
    if asked.then == "hang":
        time.sleep(600)
    if asked.then == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    page = asked.page.read_text() if asked.page is not None else "work_total{who=\"stub\"} N\n"
    serve(asked.port, page)


def serve(port: int, page: str) -> None:
    work = 0
    healthy = True

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "/health": {"status": "ok"}, "/health_generate": {"status": "ok"},
                "/v1/models": {"data": [{"id": "stub-model"}]},
                "/version": {"version": "1.2.3"},
                "/server_info": {"version": "4.5.6", "max_total_num_tokens": 777},
                "/props": {"build_info": "b42-stub"},
                "/slots": [{"id": 0, "n_ctx": 512}, {"id": 1, "n_ctx": 512}],
                "/argv": sys.argv, "/environ": dict(os.environ),
            }
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self.answer(200, page.replace("N", str(work)))
            elif path.startswith("/health") and not healthy:
                self.answer(500, "{}")
            elif path in answers:
                self.answer(200, json.dumps(answers[path]))
            else:
                self.answer(404, "{}")

        def do_POST(self) -> None:
            nonlocal work, healthy
            if self.path == "/work":
                work += 1
            elif self.path == "/sicken":
                healthy = False
            elif self.path == "/die":
                print("Segmentation fault (core dumped)", flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            elif self.path.partition("?")[0] not in ("/reset_prefix_cache", "/flush_cache", "/slots/0", "/slots/1"):
                self.answer(404, "{}")
                return
            self.answer(200, "{}")

        def answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Pages).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
