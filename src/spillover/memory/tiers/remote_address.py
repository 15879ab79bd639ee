"""The address of a remote store: the part for redis-py, this package's own parameters, and secrets kept out of logs."""

import math
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from spillover.errors import SpilloverError
from spillover.units import parse_bytes

SCHEMES = ("redis", "rediss", "unix")
HIDDEN = "***"


@dataclass(frozen=True, slots=True, repr=False)
class RemoteAddress:
    url: str  # address for redis-py, without this package's own parameters
    shown: str  # address for logs and errors, without user, password and parameters
    secrets: tuple[str, ...]
    ttl: float | None = None  # seconds that a block is kept after its last use; None: no limit
    size: int | None = None  # maximum bytes of all blocks of one identity; None: no limit
    timeout: float | None = None  # timeout of a store or load in seconds; None: the default

    @classmethod
    def parse(cls, text: str) -> "RemoteAddress":
        """Parse redis://[user:password@]host[:port][/db], rediss:// for TLS, unix://[user:password@]/path?db=0."""
        address = f"'{text.rpartition('@')[2].partition('?')[0]}'"  # error messages must not contain a password
        try:
            parts = urlsplit(text)
            host, port, user, password = parts.hostname, parts.port, parts.username, parts.password
        except ValueError:
            raise SpilloverError(f"--remote {address} has no valid host and port; write redis://HOST:PORT/NUMBER, an "
                                 "IPv6 address in brackets") from None
        if parts.scheme not in SCHEMES:
            raise SpilloverError(
                f"--remote {address} is not the address of a Redis or Valkey server; write redis://HOST:PORT, "
                "rediss://HOST:PORT or unix:///PATH"
            )
        if parts.scheme == "unix":
            if not parts.path:
                raise SpilloverError("--remote unix:// needs the path of a socket; write unix:///run/valkey.sock")
            shown = f"unix://{parts.path}"
        else:
            database = parts.path.strip("/")
            if not host or (database and not database.isdecimal()):
                raise SpilloverError(f"--remote {address} needs a host, and a number for a database; write redis://HOST:PORT/NUMBER")
            where = f"[{host}]" if ":" in host else host
            shown = f"{parts.scheme}://{where}:{port or 6379}" + (f"/{database}" if database else "")
        options: dict[str, str] = {}
        client_options: list[tuple[str, str]] = []
        secrets = {user or "", password or "", unquote(user or ""), unquote(password or "")}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in ("ttl", "size", "timeout"):
                options[name] = value
            else:
                client_options.append((name, value))
                if name in ("username", "password", "ssl_password"):
                    secrets.update((value, quote(value)))
        return cls(
            url=text.partition("?")[0] + ("?" + urlencode(client_options) if client_options else ""),
            shown=shown,
            secrets=tuple(sorted((secret for secret in secrets if secret), key=len, reverse=True)),
            ttl=_seconds(shown, "ttl", options.get("ttl")),
            size=_size(shown, options.get("size")),
            timeout=_seconds(shown, "timeout", options.get("timeout")),
        )

    def hide(self, text: str) -> str:
        """Return the text without user and password, which a server's error messages may repeat."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def __repr__(self) -> str:
        return f"RemoteAddress({self.shown})"


def _seconds(shown: str, name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds < 1e10:
        raise SpilloverError(f"{shown}: {name}={text} is not a number of seconds above 0; write {name}=60")
    return seconds


def _size(shown: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except SpilloverError as error:
        raise SpilloverError(f"{shown}: size: {error}") from None
