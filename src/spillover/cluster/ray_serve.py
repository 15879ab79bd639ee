"""`spill serve --ray` within a Ray Serve deployment, which places, monitors and restarts it.

The deployment answers with a redirection to the router, so that tokens go from replicas through the router to clients
and never through Serve's proxy. An example is `deploy/ray/serve_app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time

from spillover.cluster.upstream import Upstream
from spillover.errors import SpilloverError
from spillover.http_wire import NoAnswer

START_SECONDS = 900.0  # timeout until all replicas serve
CHECK_SECONDS = 0.2
_COMMAND = ("from spillover.server.replica import end_with_parent; end_with_parent(); "
            "from spillover.cli.main import main; main()")


class RouterProcess:
    """`spill serve --ray FLAGS` as a child of this process; it ends with this process, however that ends."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self.process = process

    @classmethod
    async def start(cls, *flags: str, port: int = 8000) -> RouterProcess:
        """Start the router on this machine, at `port` of all its addresses, and wait until it serves."""
        import ray

        context = ray.get_runtime_context()
        url = f"http://{ray.util.get_node_ip_address()}:{port}"
        command = [sys.executable, "-P", "-c", _COMMAND, "serve", *flags, "--ray", "--ray-address",
                   context.gcs_address, "--host", "0.0.0.0", "--port", str(port)]
        made = cls(subprocess.Popen(command, stdin=subprocess.PIPE), url)
        upstream, deadline = Upstream(url), time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            made.check()
            with contextlib.suppress(NoAnswer):
                answer, _ = await upstream.fetch("GET", "/health", timeout=CHECK_SECONDS * 10)
                if answer.status == 200:
                    upstream.close()
                    return made
            await asyncio.sleep(CHECK_SECONDS)
        made.process.kill()
        raise SpilloverError(f"the router was not ready within {START_SECONDS:.0f} s; see its log")

    def check(self) -> None:
        """Raise SpilloverError if the router has exited, so that Serve restarts the deployment."""
        code = self.process.poll()
        if code is not None:
            raise SpilloverError(f"the router exited with status {code}; see its log")
