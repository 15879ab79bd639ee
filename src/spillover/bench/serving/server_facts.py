"""What a server reports about itself: its counters, its version, and whether it is ready."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from spillover.errors import SpilloverError

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MAX_REFUSAL_BYTES = 65536
POST_SECONDS = 120.0  # timeout of a POST in seconds; writing a trace takes a while
STARTING_SECONDS = 600.0  # seconds to wait for a server that answers "not ready": loading a large model takes minutes
ABSENT_SECONDS = 30.0  # seconds to wait while nothing listens: the server may be about to start
POLL_SECONDS = 0.5
MERGED_LABELS = {"model_name", "engine", "engine_type", "pid", "tp_rank", "pp_rank", "model"}


def counters(base_url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> dict[str, float]:
    """Return the Prometheus counters of /metrics; empty if the server has no such page.

    The engine's prefix and `_total` are removed, so that the same quantity has one name for every engine:
    `prefix_cache_hits`, `num_preemptions`. Labels that distinguish samples follow: `prompt_tokens_by_source/host`.
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
        kept = [label for key, label in _LABEL.findall(labels or "") if key not in MERGED_LABELS]
        key = "/".join([base.rpartition(":")[2], *kept])
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def version(base_url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> str | None:
    """Return the server's version: /version of vLLM and spillover, /props of llama.cpp, /get_server_info of SGLang."""
    for path, key in (("/version", "version"), ("/props", "build_info"), ("/get_server_info", "version")):
        text = _get(base_url.rstrip("/") + path, headers, insecure)
        try:
            found = json.loads(text).get(key) if text else None
        except (ValueError, AttributeError):
            continue
        if found:
            return str(found)
    return None


def wait_until_ready(base_url: str, seconds: float | None, headers: Mapping[str, str] | None = None,
                     insecure: bool = False, say: Callable[[str], None] | None = None) -> None:
    """Wait until the server is healthy. `seconds`: the longest wait; None for STARTING_SECONDS if a server is starting,
    ABSENT_SECONDS if none answers. `say` is called repeatedly with a progress message."""
    began = time.monotonic()
    while True:
        status, text = exchange(base_url.rstrip("/") + "/health", headers, insecure)
        if status == 404:  # the server has no such page
            status, text = exchange(base_url.rstrip("/") + "/v1/models", headers, insecure)
        if status == 200:
            return
        reason = _refusal(text) or f"it answers {status} to /health"
        limit = seconds if seconds is not None else ABSENT_SECONDS if status == 0 else STARTING_SECONDS
        waited = time.monotonic() - began
        if 400 <= status < 500:
            raise SpilloverError(f"the server at {base_url} refuses health checks: {reason}")
        if waited >= limit:
            raise SpilloverError(
                (f"no server answers at {base_url}; start one (`spill serve --port 8000`) or name another with "
                 "--base-url, --host and --port" if status == 0 else f"the server at {base_url} is not ready: {reason}")
                + f"; --ready-check-timeout-sec waits longer than {limit:g} s")
        if say is not None:
            why = "no server answers yet" if status == 0 else reason
            say(f"Waiting for {base_url} ({why}): {waited:.0f} s of at most {limit:g} s")
        time.sleep(min(POLL_SECONDS, max(0.0, limit - waited)))


def post(url: str, headers: Mapping[str, str] | None = None, insecure: bool = False) -> dict[str, Any]:
    """Return the answer to an empty POST, {} if it is not a JSON object; raise SpilloverError if it is refused."""
    status, text = exchange(url, headers, insecure, b"", POST_SECONDS)
    if 200 <= status < 300:
        return _object(text)
    raise SpilloverError(_refusal(text) or (f"it answers {status}" if status else "it does not answer"))


def _refusal(text: str) -> str | None:
    """Return the message of an error in OpenAI's shape; None if there is none."""
    error = _object(text).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return None if message is None else " ".join(str(message).split()).rstrip(".")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _get(url: str, headers: Mapping[str, str] | None, insecure: bool) -> str | None:
    status, text = exchange(url, headers, insecure)
    return text if 200 <= status < 300 else None


def exchange(url: str, headers: Mapping[str, str] | None = None, insecure: bool = False,
             data: bytes | None = None, seconds: float = 10.0) -> tuple[int, str]:
    """Return the status and text of a GET, or of a POST if `data` is given; status 0 if no server answers."""
    context = ssl._create_unverified_context() if insecure and url.startswith("https") else None
    try:
        request = urllib.request.Request(url, data=data, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            return error.code, error.read(MAX_REFUSAL_BYTES).decode(errors="replace")
        return error.code, ""
    except (OSError, ValueError, http.client.HTTPException):
        return 0, ""
