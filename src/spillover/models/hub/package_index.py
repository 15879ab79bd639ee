"""Lookup of one file by its exact name on the package indexes that pip is configured with; pip itself is not run.

Reads pip's configuration files and variables (index-url, extra-index-url, find-links, no-index, cert, proxy, timeout),
so that a mirror configured for pip is used here too.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from spillover.errors import SpilloverError
from spillover.models.hub.download import Connection, DownloadError, shown

PYPI = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.2"
PAGE_NBYTES = 16 << 20


@dataclass(frozen=True)
class Source:
    """One location that pip would search."""

    url: str  # http, https or file
    links: bool  # whether it is a page or folder of files (find-links), not an index with a page per project


@dataclass(frozen=True)
class Settings:
    sources: tuple[Source, ...]
    connection: Connection


def pip_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read pip's settings: configuration files, of which later ones take precedence, overridden by PIP_ variables."""
    values: dict[str, str] = {}
    for file in _config_files(environment):
        values |= _read_config(file)
    for name, value in environment.items():
        if name.startswith("PIP_") and value:
            values[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    found = [Source(_as_url(text), links=True) for text in values.get("find-links", "").split()]
    if values.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [values.get("index-url", PYPI), *values.get("extra-index-url", "").split()]
        found += [Source(_as_url(text), links=False) for text in indexes if text]
    connection = Connection(cert=values.get("cert"), proxy=values.get("proxy"),
                            timeout=_seconds(values.get("timeout") or values.get("default-timeout")))
    return Settings(tuple(found), connection)


def find(project: str, file: str, settings: Settings) -> str:
    """Return the URL of `file` from the first source that has it, with the fragment that states the index's hash."""
    failures = []
    for source in settings.sources:
        try:
            for url in _links(project, source, settings.connection):
                if unquote(urlsplit(url).path).rsplit("/", 1)[-1] == file and _may_link(source.url, url):
                    return url
        except DownloadError as error:
            failures.append(f"{shown(source.url)}: {error}")
        else:
            failures.append(f"{shown(source.url)} does not have it")
    reasons = "; ".join(failures) or "pip is configured with no index"
    raise SpilloverError(f"no package index gave {file} ({reasons}); check the network and which index pip is "
                         "configured with (pip config list)")


def _links(project: str, source: Source, connection: Connection) -> list[str]:
    parts = urlsplit(source.url)
    page = source.url if source.links else f"{source.url.rstrip('/')}/{project}/"
    if parts.scheme == "file":
        path = Path(unquote(urlsplit(page).path))
        if path.is_dir() and not (path / "index.html").is_file():
            return [entry.as_uri() for entry in path.iterdir()]
        if not path.exists():
            return []
        page = (path / "index.html" if path.is_dir() else path).as_uri()
    content, final_url, kind = connection.read(page, PAGE_NBYTES, ACCEPT)
    return parse_page(content, final_url, kind)


def parse_page(content: bytes, url: str, kind: str) -> list[str]:
    """Return the links of a page of the Simple API, as HTML (PEP 503) or JSON (PEP 691)."""
    if "json" in kind:
        try:
            files = json.loads(content)["files"]
            return [_with_hash(urljoin(url, file["url"]), file.get("hashes")) for file in files]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DownloadError("its answer is not a page of the Simple API") from error
    parser = _Anchors(url)
    parser.feed(content.decode("utf-8", errors="replace"))
    return parser.links


def stated_sha256(url: str) -> str | None:
    """Return the sha256 that an index states for a link. It proves nothing, but a mismatch avoids a download."""
    match = re.search(r"sha256=([0-9a-f]{64})", urldefrag(url).fragment)
    return match[1] if match else None


class _Anchors(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._base = url
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = next((value for name, value in attrs if name == "href" and value), None)
        if target is None:
            return
        try:
            if tag == "base":
                self._base = urljoin(self._base, target)
            elif tag == "a":
                self.links.append(urljoin(self._base, target))
        except ValueError:  # not a valid URL
            return


def _with_hash(url: str, hashes: object) -> str:
    sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
    return f"{urldefrag(url).url}#sha256={sha256}" if sha256 else url


def _may_link(source: str, url: str) -> bool:
    """Return whether a page may link to `url`: one from the network must not point to this machine's files."""
    scheme = urlsplit(url).scheme
    return scheme in ("http", "https") or (scheme == "file" and urlsplit(source).scheme == "file")


def _config_files(environment: Mapping[str, str]) -> list[Path]:
    own = environment.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return []
    home = Path.home()
    files = [Path(folder, "pip", "pip.conf") for folder in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files += [Path("/Library/Application Support/pip/pip.conf"), Path("/etc/pip.conf")]
    if own is None or not Path(own).exists():
        files += [home / ".pip/pip.conf", home / "Library/Application Support/pip/pip.conf",
                  Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")]
    files.append(Path(sys.prefix, "pip.conf"))
    return [*files, *([Path(own)] if own else [])]


def _read_config(file: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):  # pip itself reports such files
        return {}
    sections = [parser[name] for name in ("global", "download") if parser.has_section(name)]
    return {key.replace("_", "-"): value for section in sections for key, value in section.items() if value}


def _as_url(text: str) -> str:
    scheme = urlsplit(text).scheme
    return text if scheme in ("http", "https", "file") else Path(text).expanduser().absolute().as_uri()


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 15), 1.0), 300.0)
    except ValueError:
        return 15.0
