"""What a server tells about itself besides answers: its counters, its version, whether it is up."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from spillover.errors import SpilloverError

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
NOT_TOLD_APART = {"model_name", "engine", "engine_type", "pid", "tp_rank", "pp_rank", "model"}


def counters(base_url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> dict[str, float]:
    """Prometheus counters of /metrics; none where the server has no such page.

    An engine's prefix and `_total` are left off, so that the same thing has the same name everywhere:
    `prefix_cache_hits`, `num_preemptions`. Labels that tell samples apart follow: `prompt_tokens_by_source/host`.
    """
    text = _get(base_url.rstrip("/") + "/metrics", headers, insecure)
    return {} if text is None else parse_counters(text)


def parse_counters(text: str) -> dict[str, float]:
    kinds: dict[str, str] = {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = [*line.split(" ", 3), ""][:4]
            kinds[name] = kind.strip()
            continue
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        base = name.removesuffix("_total")
        if "counter" not in (kinds.get(name), kinds.get(base)) or base.startswith(("process_", "python_")):
            continue
        told = [label for key, label in _LABEL.findall(labels or "") if key not in NOT_TOLD_APART]
        key = "/".join([base.rpartition(":")[2], *told])
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def version(base_url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> str | None:
    """As far as it can be known from outside: /version of vLLM and spillover, /props of llama.cpp, SGLang's info."""
    for path, key in (("/version", "version"), ("/props", "build_info"), ("/get_server_info", "version")):
        text = _get(base_url.rstrip("/") + path, headers, insecure)
        try:
            told = json.loads(text).get(key) if text else None
        except (ValueError, AttributeError):
            continue
        if told:
            return str(told)
    return None


def wait_until_ready(base_url: str, seconds: float, headers: Mapping[str, str] | None = None,
                     insecure: bool = False) -> None:
    """Returns when the server answers; says how to start one where it does not."""
    deadline = time.monotonic() + seconds
    while True:
        status = _exchange(base_url.rstrip("/") + "/health", headers, insecure)[0]
        if status == 404:  # it has no such page
            status = _exchange(base_url.rstrip("/") + "/v1/models", headers, insecure)[0]
        if status == 200:
            return
        if time.monotonic() >= deadline:
            raise SpilloverError(
                (f"no server answers at {base_url}; start one (`spill serve --port 8000`) or name another with "
                 "--base-url, --host and --port" if status == 0 else
                 f"the server at {base_url} is not ready: it answers {status} to /health")
                + f"; --ready-check-timeout-sec waits longer than {seconds:g} s")
        time.sleep(0.2)


def post(url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> bool:
    """Whether an empty POST was answered well."""
    return _get(url, headers, insecure, b"") is not None


def _get(url: str, headers: Mapping[str, str] | None, insecure: bool, data: bytes | None = None) -> str | None:
    status, text = _exchange(url, headers, insecure, data)
    return text if 200 <= status < 300 else None


def _exchange(url: str, headers: Mapping[str, str] | None, insecure: bool,
              data: bytes | None = None) -> tuple[int, str]:
    """Status and text; 0 where nobody answers."""
    request: Any = urllib.request.Request(url, data=data, headers=dict(headers or {}))
    context = ssl._create_unverified_context() if insecure and url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError, http.client.HTTPException):
        return 0, ""
