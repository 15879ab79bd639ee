"""API keys: `Authorization: Bearer KEY`, compared in constant time. Off unless keys are given.

Everywhere else (metrics, logs, /usage) a key is referred to by its name.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from spillover.errors import SpilloverError
from spillover.server.api.errors import ApiError, error_response
from spillover.server.api.probes import PROBES

# Paths open without a key: those a load balancer checks, and the page itself; the data that the page shows needs a key.
OPEN_PATHS = frozenset((*PROBES, "/version", "/", "/docs", "/openapi.json", "/favicon.ico"))
OPEN_PREFIX = "/page/"

# Routes that change the state of the server for all clients.
ADMIN_PATHS = frozenset(("/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile"))
USAGE_PATH = "/usage"  # shows a key its own usage, and an admin key the usage of all keys

ANONYMOUS = "anonymous"  # the key name under which requests are counted if the server requires no key
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class KeyRing:
    """The keys that a server accepts, by name: those of --api-key as key1, key2, ..., and those of --api-key-file."""

    def __init__(self, keys: tuple[str, ...], file: str | None = None) -> None:
        self._given = {f"key{number}": _digest(key.encode()) for number, key in enumerate(keys, 1)}
        self._file = file
        self._digests = self._read()

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._digests)

    def reload(self) -> int:
        """Read the file again, return the number of keys; if it is wrong, raise SpilloverError, keep the old keys."""
        self._digests = self._read()
        return len(self._digests)

    def name_of(self, digest: bytes) -> str | None:
        """Return the name of the key with this digest; all keys are compared, so the time taken reveals nothing."""
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def _read(self) -> dict[str, bytes]:
        if self._file is None:
            return self._given
        named = {name: _digest(key.encode()) for name, key in read_keys(self._file).items()}
        double = next((name for name in named if name in self._given), None)
        if double is not None:
            raise SpilloverError(f"--api-key-file {self._file} names a key '{double}', which is the name of a key of "
                                 "--api-key; choose another name")
        return self._given | named


def read_keys(file: str) -> Mapping[str, str]:
    """Return a file's keys by name: `NAME KEY` per line, `#` starts a comment. No error message shows a key."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpilloverError(f"--api-key-file {file} cannot be read: {reason}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2 or not _NAME.fullmatch(parts[0]):
            raise SpilloverError(f"--api-key-file {file}, line {number}: write NAME KEY, with a name of at most 64 "
                                 f"letters, digits and _.@-")
        if parts[0] in keys:
            raise SpilloverError(f"--api-key-file {file}, line {number}: the name '{parts[0]}' is used twice")
        keys[parts[0]] = parts[1]
    if not keys:
        raise SpilloverError(f"--api-key-file {file} holds no key; write NAME KEY on a line, or leave the flag out")
    return keys


class ApiKeys:
    """Middleware that requires a key: one of `keys` on most routes, one of `admin_keys` (if any) on those that change
    the server for all clients."""

    def __init__(self, app: ASGIApp, keys: KeyRing, admin_keys: tuple[str, ...],
                 open_paths: frozenset[str] = OPEN_PATHS, admin_prefix: str | None = None) -> None:
        """Guard an application. `open_paths` need no key; paths below `admin_prefix` are admin paths too."""
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._admin_prefix = admin_prefix
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            own = self._is_admin(scope["path"]) and self._admin_digests
            admin = "the --admin-api-key" if own else "one of the keys"
            error = ApiError(401, f"An API key is needed: send the header Authorization: Bearer KEY, with {admin} "
                                  f"the server was started with.", code="invalid_api_key",
                             headers={"WWW-Authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        """Return whether a request may pass, and store its key's name in the scope."""
        path: str = scope["path"]
        if path in self._open_paths or path.startswith(OPEN_PREFIX):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = _digest(key.strip()) if kind.lower() == b"bearer" else b""
        is_admin = sum(hmac.compare_digest(digest, known) for known in self._admin_digests) > 0
        name = self._keys.name_of(digest)
        scope["spillover.admin"], scope["spillover.key"] = is_admin, name or ANONYMOUS
        if self._is_admin(path) and self._admin_digests:
            return is_admin
        return name is not None or not self._keys or (is_admin and path == USAGE_PATH)

    def _is_admin(self, path: str) -> bool:
        return path in ADMIN_PATHS or (self._admin_prefix is not None and path.startswith(self._admin_prefix))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
