"""The configuration of KV events: vLLM's `--kv-events-config` as JSON, checked before the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillover.errors import SpilloverError, did_you_mean

FLAG = "--kv-events-config"
EXAMPLE = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
LOCAL = "tcp://127.0.0.1:5557"
HERE = ("*", "0.0.0.0", "[::]", "::", "127.0.0.1", "localhost", "[::1]")  # hosts to bind to; others are connected to
_TYPES: Mapping[str, type] = {"enable_kv_cache_events": bool, "publisher": str, "endpoint": str, "replay_endpoint": str,
                              "buffer_steps": int, "hwm": int, "topic": str}
_WORDS = {bool: "true or false", str: "a string", int: "a whole number"}


@dataclass(frozen=True)
class KVEventsConfig:
    endpoint: str = LOCAL  # address for batches: bound to if it is of this machine, otherwise connected to
    replay_endpoint: str | None = None  # address for requests for earlier batches or a snapshot; None: no replay
    buffer_steps: int = 10_000  # number of batches kept for replay
    hwm: int = 100_000  # maximum messages queued for a slow subscriber; more are dropped
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            _check_address(name, getattr(self, name))
        if self.replay_endpoint is not None and not binds(self.replay_endpoint):
            raise SpilloverError(f"{FLAG}: replay_endpoint {self.replay_endpoint} is not an address of this machine, "
                                 "where requests come in; write one like tcp://127.0.0.1:5558")
        if self.endpoint == self.replay_endpoint:
            raise SpilloverError(f"{FLAG}: endpoint and replay_endpoint are both {self.endpoint}; give each its own "
                                 "port")
        for name in ("buffer_steps", "hwm"):
            if getattr(self, name) < 1:
                raise SpilloverError(f"{FLAG}: {name} must be at least 1; got {getattr(self, name)}")

    @classmethod
    def of(cls, text: str | None) -> KVEventsConfig | None:
        """Parse the value of the flag; None if events are not to be published."""
        if text is None:
            return None
        fields = _object(text)
        for name, value in fields.items():
            if name == "max_queue_size":
                raise SpilloverError(f"{FLAG}: max_queue_size is not needed, as steps never wait for the publisher; "
                                     "leave it out")
            if name not in _TYPES:
                raise SpilloverError(f"{FLAG} has no key {name!r}"
                                     f"{did_you_mean(name, _TYPES) or '; it takes ' + ', '.join(_TYPES)}")
            if value is not None and type(value) is not _TYPES[name]:
                raise SpilloverError(f"{FLAG}: {name} is {_WORDS[_TYPES[name]]}; got {value!r}")
        given = {name: value for name, value in fields.items() if value is not None}
        publisher = given.pop("publisher", "zmq")
        if publisher not in ("zmq", "null"):
            raise SpilloverError(f"{FLAG}: publisher is zmq or null; got {publisher!r}")
        enabled = given.pop("enable_kv_cache_events", False)
        config = cls(**given)
        return config if enabled and publisher == "zmq" else None


def binds(endpoint: str) -> bool:
    """Return whether the address is one of this machine, to bind to."""
    scheme, _, place = endpoint.partition("://")
    return scheme == "ipc" or place.rpartition(":")[0] in HERE


def _check_address(name: str, address: str | None) -> None:
    if address is None:
        return
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if not (scheme == "ipc" and place) and not (scheme == "tcp" and host and port.isdigit() and 0 < int(port) < 65536):
        raise SpilloverError(f"{FLAG}: {name} {address!r} is not an address like tcp://*:5557 or ipc:///run/kv-events")


def _object(text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise SpilloverError(f"{FLAG} is not JSON ({error}); write something like '{EXAMPLE}'") from None
    if not isinstance(fields, dict):
        raise SpilloverError(f"{FLAG} is a JSON object such as '{EXAMPLE}'; got {text!r}")
    return fields
