"""Reading of URLs: small pages whole; large files as a stream, bounded, resumed and verified by a known sha256."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

CHUNK_NBYTES = 1 << 18
ATTEMPTS, ATTEMPT_NBYTES = 5, 1 << 20  # maximum consecutive attempts that receive fewer bytes than this
RETRY_SECONDS = 0.1  # delay before a retry; doubled with every failed attempt
STALL_SECONDS, STALL_NBYTES = 60.0, 64 << 10  # a connection that receives fewer bytes in this time has stalled


class DownloadError(Exception):
    """A failed download; the message is a short reason, to which callers add what the download was for."""


class HashMismatchError(DownloadError):
    """The downloaded bytes are not the expected ones."""


@dataclass(frozen=True)
class Connection:
    """Settings of connections to hosts."""

    cert: str | None = None  # file with certificates; None: those of the system
    proxy: str | None = None  # URL of a proxy; None: that of the environment
    timeout: float = 15.0  # seconds without receiving a byte

    def read(self, url: str, limit: int, accept: str) -> tuple[bytes, str, str]:
        """Return a page's bytes, its URL after redirects, and its content type."""
        with self._open(url, {"Accept": accept}) as response:
            try:
                content = response.read(limit + 1)
            except (OSError, http.client.HTTPException) as error:
                raise DownloadError(_reason(error)) from error
            if len(content) > limit:
                raise DownloadError(f"its page is larger than {limit:,} bytes")
            return content, response.url, response.headers.get("Content-Type", "")

    def fetch(self, url: str, target: Path, nbytes: int, sha256: str, progress: Callable[[int], None]) -> None:
        """Download a file of this size and hash to `target`, or raise; resumes where a connection was cut off."""
        digest, done, failures, reached = hashlib.sha256(), 0, 0, 0
        with target.open("wb") as sink:
            while done < nbytes:
                reason = "the connection was closed early"
                try:
                    with self._open(url, {"Range": f"bytes={done}-"} if done else {}) as response:
                        if done and not _continues(response, done):
                            sink.truncate(0)
                            sink.seek(0)
                            digest, done = hashlib.sha256(), 0
                        _check_size(response, nbytes, done)
                        for chunk in _chunks(response):
                            done += len(chunk)
                            if done > nbytes:
                                raise HashMismatchError(f"more than the {nbytes:,} bytes it should have")
                            sink.write(chunk)
                            digest.update(chunk)
                            progress(done)
                except HashMismatchError:
                    raise
                except _PermanentError as error:
                    raise DownloadError(str(error)) from error
                except DownloadError as error:
                    reason = str(error)
                if done == nbytes:
                    break
                failures = 0 if done >= reached + ATTEMPT_NBYTES else failures + 1
                if failures >= ATTEMPTS:
                    raise DownloadError(f"{reason} after {done:,} of {nbytes:,} bytes")
                reached = max(reached, done)
                time.sleep(RETRY_SECONDS * 2 ** failures)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != sha256:
            raise HashMismatchError(f"its sha256 is {digest.hexdigest()}, expected {sha256}")

    @contextmanager
    def _open(self, url: str, headers: dict[str, str]) -> Iterator[Any]:
        address, authorization = _without_credentials(url)
        headers = {"User-Agent": "spillover", "Accept-Encoding": "identity", **headers}
        request = urllib.request.Request(address, headers=headers)
        if authorization:  # not sent to another host after a redirect
            request.add_unredirected_header("Authorization", authorization)
        try:
            response = self._opener(address).open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            kind = DownloadError if error.code >= 500 or error.code in (408, 429) else _PermanentError
            raise kind(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DownloadError(_reason(error)) from error
        with response:
            yield response

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        proxies = {"http": self.proxy, "https": self.proxy} if self.proxy else None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler(proxies)]
        if not url.startswith("file:"):
            handlers.append(urllib.request.HTTPSHandler(context=_certificates(self.cert)))
        return urllib.request.build_opener(*handlers)


class _PermanentError(DownloadError):
    """An error that a retry would not change."""


def shown(url: str) -> str:
    """Return a URL for display: without user name, password and fragment."""
    return _without_credentials(url)[0]


def _without_credentials(url: str) -> tuple[str, str | None]:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    plain = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
    if parts.username is None:
        return plain, None
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return plain, "Basic " + base64.b64encode(login.encode()).decode()


def _continues(response: IO[bytes], done: int) -> bool:
    status, headers = getattr(response, "status", None), getattr(response, "headers", {})
    return status == 206 and str(headers.get("Content-Range", "")).startswith(f"bytes {done}-")


def _check_size(response: Any, nbytes: int, done: int) -> None:
    length = response.headers.get("Content-Length") or ""
    if length.isdigit() and int(length) != nbytes - done:
        raise HashMismatchError(f"it has {int(length) + done:,} bytes, expected {nbytes:,}")


def _chunks(response: Any) -> Iterator[bytes]:
    read = getattr(response, "read1", response.read)  # read1 returns what has arrived, without waiting for a full chunk
    window, arrived = time.monotonic(), 0
    while True:
        try:
            chunk = read(CHUNK_NBYTES)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadError(_reason(error)) from error
        if not chunk:
            return
        yield chunk
        arrived += len(chunk)
        if time.monotonic() - window > STALL_SECONDS:
            if arrived < STALL_NBYTES:
                raise DownloadError(f"fewer than {STALL_NBYTES:,} bytes arrived in {STALL_SECONDS:.0f} s")
            window, arrived = time.monotonic(), 0


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return str(inner) or type(inner).__name__


@cache
def _certificates(file: str | None) -> ssl.SSLContext:
    """Load certificates from a file, or else the system's, or else certifi's: some builds of Python find none."""
    paths = ssl.get_default_verify_paths()
    if file is None and not (os.environ.get("SSL_CERT_FILE") or paths.cafile or paths.capath):
        try:
            import certifi

            file = certifi.where()
        except ImportError:
            pass
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise DownloadError(f"the certificates {file} cannot be read ({error})") from error
