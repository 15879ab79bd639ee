"""Servers that die, hang, refuse, fill up or are not Redis: misses within the deadline, one log line, no error."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from spillover.memory.tiers.base import Tier
from spillover.memory.tiers.remote import RemoteTier
from support.disk_calls import PAYLOAD, some_blocks
from support.tier_calls import IDENTITY, block_bytes, block_key, close, get, has, no_wake, put, wait
from support.valkey import Valkey

TIMEOUT = 0.4
# Generous for a busy machine, where threads may wait, but far below the usual timeout of a socket.
SOON = 5.0


def open_remote(url: str, **changes: Any) -> RemoteTier:
    settings: dict[str, Any] = {
        "payload_bytes": PAYLOAD, "identity": IDENTITY, "wake": no_wake, "timeout": TIMEOUT, "retry_seconds": 0.2,
    } | changes
    return RemoteTier(url, **settings)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def ends_without_success(tier: Tier) -> None:
    """Check that every kind of operation completes soon, finds nothing and raises nothing."""
    start = time.monotonic()
    blocks = some_blocks(1, 2, 3)
    assert not any(has(tier, list(blocks)))
    assert not any(put(tier, blocks))
    assert get(tier, list(blocks), PAYLOAD) == [None] * 3
    wait(tier, [tier.evict(2)])
    tier.poll()
    assert time.monotonic() - start < SOON


def closes_soon(tier: Tier) -> None:
    start = time.monotonic()
    tier.close(time.monotonic() + 0.5)
    assert time.monotonic() - start < SOON


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of another kind; `answer` is called for every connection, in a separate thread."""
    server = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=quietly, args=(connection,), daemon=True).start()

    def quietly(connection: socket.socket) -> None:
        with suppress(OSError):
            answer(connection)

    threading.Thread(target=accept, daemon=True).start()
    yield f"redis://127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in connections:
        connection.close()


def test_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with caplog.at_level(logging.INFO):
        tier = open_remote(f"redis://someone:hidden@127.0.0.1:{port}?size=1GB")
        for _ in range(5):
            ends_without_success(tier)
            time.sleep(0.1)
        assert not tier.stats().available
        assert tier.stats().store_failures == 15
        closes_soon(tier)
    (line,) = caplog.records
    assert f"redis://127.0.0.1:{port}" in line.message
    assert "hidden" not in caplog.text
    assert "someone" not in caplog.text


def test_once_it_has_failed_nothing_waits_for_it(valkey: Valkey) -> None:
    tier = open_remote(valkey.url, retry_seconds=60)
    put(tier, some_blocks(1))
    valkey.freeze()
    try:
        assert has(tier, [block_key(1)]) == [False]
        until(lambda: not tier.stats().available)
        for _ in range(100):
            assert tier.lookup([block_key(1)]).done()
            assert tier.load([(block_key(1), memoryview(bytearray(PAYLOAD)))])[0].done()
            assert tier.store([(block_key(2), memoryview(bytes(PAYLOAD)))])[0].done()
        closes_soon(tier)
    finally:
        valkey.thaw()


def test_killed_in_mid_use_and_back_again(valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_remote(valkey.url)
    blocks = some_blocks(*range(20))
    put(tier, blocks)
    with caplog.at_level(logging.INFO):
        tickets = []
        for number in range(100, 140):
            tickets.extend(tier.store([(block_key(number), memoryview(block_bytes(number, PAYLOAD)))]))
            buffer = memoryview(bytearray(PAYLOAD))
            tickets.extend(tier.load([(block_key(number % 20), buffer)]))
            if number == 115:
                valkey.kill()
        start = time.monotonic()
        wait(tier, tickets)
        assert time.monotonic() - start < SOON
        ends_without_success(tier)
        assert not tier.stats().available

        valkey.start()
        until(lambda: tier.stats().available)
        assert has(tier, list(blocks)) == [False] * 20, "it came back empty"
        assert put(tier, blocks) == [True] * 20
        assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
        close(tier)
    assert len(caplog.records) == 2, caplog.text
    assert "works again" in caplog.records[-1].message


def test_frozen_server_expires_and_recovers(valkey: Valkey) -> None:
    tier = open_remote(valkey.url)
    blocks = some_blocks(1, 2)
    put(tier, blocks)
    valkey.freeze()
    try:
        ends_without_success(tier)
        until(lambda: not tier.stats().available)
    finally:
        valkey.thaw()
    until(lambda: tier.stats().available)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)


def test_close_does_not_wait_for_a_frozen_server(valkey: Valkey) -> None:
    tier = open_remote(valkey.url, timeout=60.0)
    put(tier, some_blocks(1))
    valkey.freeze()
    try:
        tickets = tier.store([(key, memoryview(payload)) for key, payload in some_blocks(*range(2, 30)).items()])
        tickets += tier.load([(block_key(1), memoryview(bytearray(PAYLOAD)))])
        closes_soon(tier)
        wait(None, tickets, SOON)
    finally:
        valkey.thaw()


@pytest.mark.parametrize("credentials", [":wrong-password@", "nobody:wrong-password@", ""])
def test_wrong_password(valkey_program: str, credentials: str, caplog: pytest.LogCaptureFixture) -> None:
    with Valkey(valkey_program, "--requirepass", "right-password") as server, caplog.at_level(logging.DEBUG):
        tier = open_remote(server.url.replace("//", f"//{credentials}"))
        ends_without_success(tier)
        ends_without_success(tier)
        assert not tier.stats().available
        closes_soon(tier)
        assert sum(line.name == "spillover.memory" for line in caplog.records) == 1
        assert "password@" not in caplog.text
        assert "wrong-password" not in caplog.text


def test_password_that_a_server_repeats_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def repeat(connection: socket.socket) -> None:
        while data := connection.recv(4096):
            time.sleep(0.1)  # so that the load is in flight before anything has failed
            connection.sendall(b"-ERR unknown command with args: " + data.replace(b"\r\n", b" ") + b"\r\n")

    with listening(repeat) as url, caplog.at_level(logging.DEBUG):
        tier = open_remote(url.replace("//", "//me-myself:very-secret@"), timeout=20.0)
        (ticket,) = tier.load([(block_key(1), memoryview(bytearray(PAYLOAD)))])
        wait(tier, [ticket])
        ends_without_success(tier)
        closes_soon(tier)
        assert "unknown command" in caplog.text
        assert "very-secret" not in caplog.text
        assert "unknown command" in str(ticket.error)
        assert "very-secret" not in str(ticket.error)


@pytest.mark.parametrize("size", ["", "?size=1GB"])
def test_full_server_still_serves_what_it_has(
    valkey_program: str, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Valkey(valkey_program, "--maxmemory-policy", "noeviction") as server, caplog.at_level(logging.INFO):
        tier = open_remote(server.url + size, timeout=20.0)
        blocks = some_blocks(*range(5))
        assert put(tier, blocks) == [True] * 5
        server.client().config_set("maxmemory", 1)
        assert put(tier, some_blocks(10, 11)) == [None, None]
        assert tier.stats().store_failures == 2
        assert not tier.stats().available
        assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
        assert put(tier, some_blocks(12)) in ([False], [None])
        server.client().config_set("maxmemory", 0)
        until(lambda: put(tier, some_blocks(10)) == [True])
        assert tier.stats().available
        assert get(tier, [block_key(10)], PAYLOAD) == [block_bytes(10, PAYLOAD)]
        if size:
            assert tier.stats().blocks == 6, "what was refused is in no account"
        close(tier)
        assert len(caplog.records) == 2, caplog.text


def test_read_only_replica_serves(valkey_program: str) -> None:
    blocks = some_blocks(1, 2)
    with (
        Valkey(valkey_program, "--repl-diskless-sync-delay", "0") as first,
        Valkey(valkey_program, "--replicaof", f"127.0.0.1 {first.port}") as replica,
    ):
        writer = open_remote(first.url, timeout=20.0)
        put(writer, blocks)
        until(lambda: replica.client().dbsize() == 2)
        reader = open_remote(replica.url + "?ttl=60&size=1GB", timeout=20.0)
        assert get(reader, list(blocks), PAYLOAD) == list(blocks.values())
        assert put(reader, some_blocks(3)) == [None]
        assert get(reader, list(blocks), PAYLOAD) == list(blocks.values())
        close(reader)
        close(writer)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x46", b""])
def test_no_redis_server_at_all(reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(reply)
        connection.close()

    with listening(answer) as url, caplog.at_level(logging.INFO):
        tier = open_remote(url)
        for _ in range(3):
            ends_without_success(tier)
            time.sleep(0.1)
        assert not tier.stats().available
        closes_soon(tier)
        assert len(caplog.records) == 1, caplog.text


def test_server_that_trickles_is_cut_off() -> None:
    """A server is cut off if each byte arrives before the socket's timeout but the answer never completes."""

    def trickle(connection: socket.socket) -> None:
        connection.recv(4096)
        for byte in b"$5256\r\n" + bytes(5256):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    with listening(trickle) as url:
        tier = open_remote(url, threads=1)
        buffer = memoryview(bytearray(PAYLOAD))
        (load,) = tier.load([(block_key(1), buffer)])
        lookup = tier.lookup([block_key(1)])
        start = time.monotonic()
        until(lambda: load.expired(time.monotonic()) or load.done(), SOON)
        wait(tier, [load, lookup], SOON)
        assert not load.result()
        assert time.monotonic() - start < SOON
        assert not tier.stats().available
        ends_without_success(tier)
        closes_soon(tier)


def test_clear_while_the_server_is_away_is_done_when_it_is_back(valkey: Valkey) -> None:
    """Cleared blocks are not served only because the server was stopped during the clear."""
    tier = open_remote(valkey.url)
    blocks = some_blocks(1, 2)
    put(tier, blocks)
    valkey.freeze()
    try:
        tier.clear()
        ends_without_success(tier)
        until(lambda: not tier.stats().available)
    finally:
        valkey.thaw()
    deadline = time.monotonic() + 20
    while not tier.stats().available:
        assert not any(has(tier, list(blocks)))
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert has(tier, list(blocks)) == [False, False]
    assert valkey.client().dbsize() == 0
    close(tier)


def test_a_server_that_nobody_asks_is_still_watched(valkey: Valkey) -> None:
    """An idle tier notices by itself that its server has died, hangs, or is available again."""
    tier = open_remote(valkey.url, probe_seconds=0.02, retry_seconds=0.02, lookup_timeout=0.2)

    def becomes(available: bool) -> None:
        deadline = time.monotonic() + 20
        while tier.stats().available != available:
            assert time.monotonic() < deadline, f"available is still {not available}"
            time.sleep(0.01)

    becomes(True)
    valkey.kill()
    becomes(False)
    valkey.start()
    becomes(True)
    valkey.freeze()
    becomes(False)
    valkey.thaw()
    becomes(True)
    close(tier)
