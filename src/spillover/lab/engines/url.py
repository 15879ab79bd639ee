"""A server that is already running: measured, never started or stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from spillover.errors import SpilloverError
from spillover.lab.engines.base import CacheReset, Engine, EngineFailed, EngineSpec, Missing, Running
from spillover.lab.engines.metrics_text import bare, counters_from
from spillover.lab.engines.process import status_of

# Prefixes of metric names, by which the engine is recognised.
PREFIXES = ("spillover:", "vllm:", "sglang:", "llamacpp:")


class UrlEngine(Engine):
    kind = "url"

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        if spec.url is None:
            raise SpilloverError("an arm of kind 'url' needs the address of a server: give 'url: http://host:port'")
        return None

    def start(self) -> Running:
        self.installed(self.spec)
        url = str(self.spec.url).rstrip("/").removesuffix("/v1")
        self._wait(url)
        self._running = Running(url, "", None, None, "")
        listed = self.get_json("/v1/models")
        try:
            name = self.spec.model or str(listed["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise EngineFailed("no start", f"{url}/v1/models names no model; give 'model:' in the arm") from error
        self._running = Running(url, name, None, None, self.version())
        return self._running

    def stop(self) -> None:
        self._running = None

    def check(self) -> None:
        if self._running is not None and status_of(self.running.url + "/v1/models", timeout=30) != 200:
            raise EngineFailed("crash", f"{self.running.url} no longer answers")

    def version(self) -> str:
        reply: Any = self.get_json("/version")
        return str(reply["version"]) if isinstance(reply, dict) and "version" in reply else "unknown"

    def reset_cache(self) -> CacheReset:
        """Do nothing: the cache belongs to the server's owner, and others may be using it."""
        return CacheReset(False, "the lab may not reset this server: use prompts that it has not seen")

    def counters(self) -> Mapping[str, float]:
        samples = self.metrics()
        prefix = next((prefix for prefix in PREFIXES for key in samples if bare(key).startswith(prefix)), None)
        if prefix is None:
            return {}
        from spillover.lab.engines import engine_class

        return counters_from(samples, engine_class(prefix.removesuffix(":")).COUNTERS)

    def _wait(self, url: str) -> None:
        end = time.monotonic() + self.spec.ready_seconds
        while (status := status_of(url + "/v1/models")) != 200:
            if time.monotonic() > end:
                raise EngineFailed("no start", f"{url}/v1/models was answered with {status}" if status else
                                   f"no server answers at {url}")
            time.sleep(0.2)
