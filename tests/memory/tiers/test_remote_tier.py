"""The remote tier with a real server: blocks can be loaded again, are shared, are bounded, and are never mixed up."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import CorruptRecordError
from spillover.memory.tiers.record import HEADER_BYTES
from spillover.memory.tiers.remote import RemoteTier
from support.disk_calls import PAYLOAD, some_blocks
from support.faulty_tier import FaultRates, FaultyTier
from support.tier_calls import IDENTITY, OTHER_IDENTITY, block_bytes, block_key, close, get, has, no_wake, put, wait
from support.valkey import Valkey

# Seconds: these tests check contents, not timing, and on a busy machine a second is short.
PATIENT = 20.0


def open_remote(url: str, **changes: Any) -> RemoteTier:
    settings: dict[str, Any] = {
        "payload_bytes": PAYLOAD, "identity": IDENTITY, "wake": no_wake, "timeout": PATIENT, "retry_seconds": 0.1,
    } | changes
    return RemoteTier(url, **settings)


@pytest.fixture
def tier(valkey: Valkey) -> Iterator[RemoteTier]:
    opened = open_remote(valkey.url)
    yield opened
    close(opened)


def size_for(blocks: int) -> int:
    return blocks * (PAYLOAD + HEADER_BYTES)


def test_blocks_come_back_exactly(tier: RemoteTier) -> None:
    blocks = some_blocks(*range(30))
    assert put(tier, blocks) == [True] * 30
    assert has(tier, [*blocks, block_key(99)]) == [True] * 30 + [False]
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    assert get(tier, [block_key(99), block_key(3)], PAYLOAD) == [None, blocks[block_key(3)]]
    stats = tier.stats()
    assert (stats.stores, stats.loads, stats.bytes_read) == (30, 31, 31 * PAYLOAD)
    assert (stats.load_failures, stats.store_failures, stats.capacity_bytes, stats.available) == (0, 0, None, True)
    assert stats.seconds_writing > 0
    assert stats.seconds_reading > 0


def test_large_payloads_go_in_batches(valkey: Valkey) -> None:
    nbytes = 3_000_000
    tier = open_remote(valkey.url, payload_bytes=nbytes)
    blocks = {block_key(number): block_bytes(number, nbytes) for number in range(5)}
    assert put(tier, blocks) == [True] * 5
    assert get(tier, list(blocks), nbytes) == list(blocks.values())
    close(tier)


def test_two_servers_share_one_store_and_identities_do_not(valkey: Valkey) -> None:
    first, second = open_remote(valkey.url), open_remote(f"unix://{valkey.socket}")
    stranger = open_remote(valkey.url, identity=OTHER_IDENTITY)
    blocks = some_blocks(1, 2)
    put(first, blocks)
    assert get(second, list(blocks), PAYLOAD) == list(blocks.values())
    assert has(stranger, list(blocks)) == [False, False]
    assert get(stranger, list(blocks), PAYLOAD) == [None, None]
    client = valkey.client()
    name = f"spillover:{IDENTITY.hex()}:{block_key(1).hex()}"
    value = client.get(name)
    client.set(name.replace(IDENTITY.hex(), OTHER_IDENTITY.hex()), value)
    assert get(stranger, [block_key(1)], PAYLOAD) == [None], "a record that strayed"
    assert stranger.stats().load_failures == 1
    for tier in (first, second, stranger):
        close(tier)


def test_block_that_is_there_is_not_sent_again(valkey: Valkey) -> None:
    first, second = open_remote(valkey.url), open_remote(valkey.url)
    put(first, some_blocks(1))
    before = int(valkey.client().info("stats")["total_net_input_bytes"])
    assert put(second, some_blocks(1)) == [True]
    assert int(valkey.client().info("stats")["total_net_input_bytes"]) - before < PAYLOAD
    close(first)
    close(second)


def test_databases_are_apart(valkey: Valkey) -> None:
    zero, three = open_remote(valkey.url), open_remote(valkey.url + "/3")
    put(zero, some_blocks(1))
    assert has(three, [block_key(1)]) == [False]
    assert valkey.client(db=3).dbsize() == 0
    close(zero)
    close(three)


@pytest.mark.parametrize("damage", ["bit", "short", "long", "header", "swapped", "type", "empty"])
def test_damaged_value_is_a_miss(valkey: Valkey, tier: RemoteTier, damage: str) -> None:
    blocks = some_blocks(1, 2)
    put(tier, blocks)
    client = valkey.client()
    name, other = (f"spillover:{IDENTITY.hex()}:{block_key(number).hex()}" for number in (1, 2))
    value = client.get(name)
    if damage == "bit":
        assert tier.damage(block_key(1), 12345)
    elif damage == "type":
        client.delete(name)
        client.rpush(name, "a list")
    else:
        changed = {"short": value[:-1], "long": value + b"x", "header": b"X" + value[1:], "swapped": client.get(other),
                   "empty": b""}
        client.set(name, changed[damage])
    (ticket,) = tier.load([(block_key(1), memoryview(bytearray(PAYLOAD)))])
    assert wait(tier, [ticket]) == [None]
    assert isinstance(ticket.error, CorruptRecordError)
    assert tier.stats().load_failures == 1
    assert tier.stats().available
    assert get(tier, [block_key(2)], PAYLOAD) == [blocks[block_key(2)]]
    assert has(tier, [block_key(1)]) == [False], "removed, so that it can be stored again"
    assert put(tier, some_blocks(1)) == [True]
    assert get(tier, [block_key(1)], PAYLOAD) == [blocks[block_key(1)]]
    assert not tier.damage(block_key(77), 1)


def test_ttl_ends_what_is_not_used(valkey: Valkey) -> None:
    tier = open_remote(valkey.url + "?ttl=2")
    put(tier, some_blocks(1, 2))
    client = valkey.client()
    names = [f"spillover:{IDENTITY.hex()}:{block_key(number).hex()}" for number in (1, 2)]
    assert all(0 < client.pttl(name) <= 2000 for name in names)
    deadline = time.monotonic() + 30
    while client.pttl(names[0]) > 1000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    get(tier, [block_key(1)], PAYLOAD)
    assert client.pttl(names[0]) > client.pttl(names[1])
    while client.dbsize():
        assert time.monotonic() < deadline, "something stays for ever"
        time.sleep(0.05)
    assert has(tier, [block_key(1)]) == [False]
    close(tier)


def test_size_bounds_all_servers_together_and_the_oldest_goes(valkey: Valkey) -> None:
    url = f"{valkey.url}?size={size_for(6)}"
    first, second = open_remote(url), open_remote(url)
    client = valkey.client()
    for number in range(0, 6, 2):
        put(first, some_blocks(number))
        put(second, some_blocks(number + 1))
    get(second, [block_key(0)], PAYLOAD)
    put(first, some_blocks(10, 11))
    assert has(first, [block_key(number) for number in (0, 1, 2, 3, 4, 5, 10, 11)]) == [
        True, False, False, True, True, True, True, True]
    assert client.dbsize() == 7, "six blocks and the order of their use"
    assert first.stats().blocks == 6
    assert first.stats().bytes == 6 * PAYLOAD
    assert first.stats().capacity_bytes == size_for(6)
    assert first.stats().evictions == 2
    results = put(second, some_blocks(*range(20, 35)))
    assert results == [True] * 15
    assert client.dbsize() == 7
    (evicted,) = wait(first, [first.evict(4)])
    assert evicted == 4
    assert client.dbsize() == 3
    (evicted,) = wait(first, [first.evict(10)])
    assert evicted == 2
    assert client.dbsize() == 0
    close(first)
    close(second)


def test_size_with_ttl_counts_only_what_is_left(valkey: Valkey) -> None:
    tier = open_remote(f"{valkey.url}?size={size_for(4)}&ttl=0.6")
    put(tier, some_blocks(1, 2, 3))
    client = valkey.client()
    deadline = time.monotonic() + 30
    while client.dbsize() > 2:  # block 1, which is in use, and the order of use
        assert time.monotonic() < deadline
        assert get(tier, [block_key(1)], PAYLOAD) == [block_bytes(1, PAYLOAD)]
    put(tier, some_blocks(5))
    assert tier.stats().blocks == 2
    assert tier.stats().evictions == 0
    while client.dbsize():
        assert time.monotonic() < deadline, "the order of use stays for ever"
        time.sleep(0.05)
    close(tier)


def test_servers_that_store_at_once_leave_nothing_unaccounted(valkey: Valkey) -> None:
    """No block is missing from the accounts, where it would stay forever."""
    nbytes = 300_000  # more than the server reads at once
    tiers = [open_remote(f"{valkey.url}?size={3 * (nbytes + HEADER_BYTES)}", payload_bytes=nbytes) for _ in range(2)]
    tickets = []
    for number in range(0, 160, 2):
        for i, tier in enumerate(tiers):
            tickets += tier.store([(block_key(number + i), memoryview(bytes([number]) * nbytes))])
    assert wait(tiers[0], tickets) == [True] * 160
    client = valkey.client()
    order = f"spillover:{IDENTITY.hex()}:use".encode()
    names = set(client.keys())
    assert names - {order} == set(client.zrange(order, 0, -1))
    assert len(names) == 4
    for tier in tiers:
        close(tier)


def test_first_of_a_batch_outlives_the_last(valkey: Valkey) -> None:
    tier = open_remote(f"{valkey.url}?size={size_for(3)}")
    put(tier, some_blocks(1, 2, 3))
    put(tier, some_blocks(4))
    assert has(tier, [block_key(number) for number in (1, 2, 3, 4)]) == [True, True, False, True]
    get(tier, [block_key(1), block_key(2)], PAYLOAD)
    put(tier, some_blocks(5, 6))
    assert has(tier, [block_key(number) for number in (1, 2, 4, 5, 6)]) == [True, False, False, True, True]
    close(tier)


def test_evict_without_a_size_drops_nothing(tier: RemoteTier) -> None:
    put(tier, some_blocks(1))
    assert tier.evict(1).result() == 0
    assert has(tier, [block_key(1)]) == [True]


def test_clear_forgets_this_identity_and_no_other(valkey: Valkey) -> None:
    tier = open_remote(f"{valkey.url}?size=1GB")
    stranger = open_remote(valkey.url, identity=OTHER_IDENTITY)
    blocks = some_blocks(*range(20))
    put(tier, blocks)
    put(stranger, some_blocks(1))
    valkey.client().set("somebody", "else's")
    late = tier.store([(key, memoryview(payload)) for key, payload in some_blocks(*range(30, 60)).items()])
    tier.clear()
    assert has(tier, [*blocks, *(block_key(n) for n in range(30, 60))]) == [False] * 50
    wait(tier, late)
    deadline = time.monotonic() + 20
    while put(tier, some_blocks(99)) != [True]:
        assert time.monotonic() < deadline
    assert has(tier, [*blocks, *(block_key(n) for n in range(30, 60)), block_key(99)]) == [False] * 50 + [True]
    assert has(stranger, [block_key(1)]) == [True]
    assert valkey.client().get("somebody") == b"else's"
    close(tier)
    close(stranger)


def test_close_sends_what_was_queued(valkey: Valkey) -> None:
    tier = open_remote(valkey.url)
    blocks = some_blocks(*range(40))
    tier.store([(key, memoryview(payload)) for key, payload in blocks.items()])
    close(tier, PATIENT)
    close(tier)
    assert has(tier, list(blocks)) == [False] * 40
    tier = open_remote(valkey.url)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)


def test_clear_then_close_forgets(valkey: Valkey) -> None:
    tier = open_remote(valkey.url)
    put(tier, some_blocks(1, 2, 3))
    tier.clear()
    close(tier, PATIENT)
    assert valkey.client().dbsize() == 0


def test_password_and_user(valkey_program: str) -> None:
    with Valkey(valkey_program, "--requirepass", "open sesame!") as server:
        tier = open_remote(server.url.replace("//", "//:open%20sesame!@"))
        assert put(tier, some_blocks(1)) == [True]
        server.client(password="open sesame!").acl_setuser(
            "me", enabled=True, passwords=["+mine"], categories=["+@all"], keys=["spillover:*"]
        )
        other = open_remote(server.url.replace("//", "//me:mine@"))
        assert get(other, [block_key(1)], PAYLOAD) == [block_bytes(1, PAYLOAD)]
        close(tier)
        close(other)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate: install the Debian package openssl")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )
    return certificate, key


def test_tls(valkey_program: str, certificate: tuple[Path, Path]) -> None:
    with Valkey(valkey_program, tls=certificate) as server:
        assert server.url.startswith("rediss://")
        tier = open_remote(f"{server.url}?ssl_ca_certs={certificate[0]}&ttl=60")
        blocks = some_blocks(1, 2, 3)
        assert put(tier, blocks) == [True] * 3
        assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
        close(tier)
        doubtful = open_remote(server.url)  # its certificate is not trusted
        assert put(doubtful, blocks) in ([None] * 3, [False] * 3)
        assert not doubtful.stats().available
        close(doubtful)
        plain = open_remote(server.url.replace("rediss", "redis"))
        assert put(plain, blocks) in ([None] * 3, [False] * 3)
        close(plain)


def test_bad_settings_are_refused_in_one_sentence(valkey: Valkey) -> None:
    with pytest.raises(SpilloverError, match="cannot hold one block; give it at least size="):
        open_remote(f"{valkey.url}?size={size_for(1) - 1}")
    with pytest.raises(SpilloverError, match="tttl") as refused:
        open_remote("redis://:hidden@host?tttl=5")
    assert "hidden" not in str(refused.value)
    with pytest.raises(SpilloverError, match="socket_timeout"):
        open_remote("redis://host?socket_timeout=soon")


def test_faults_over_a_remote_store(valkey: Valkey) -> None:
    rates = FaultRates(slow=0.1, fail=0.1, corrupt=0.2, vanish=0.1, hang=0.05)
    tier = FaultyTier(open_remote(valkey.url), 5, rates, no_wake, slow_seconds=0.01, hang_seconds=0.02,
                      deadline_seconds=0.02)
    loaded = 0
    for number in range(100):
        put(tier, some_blocks(number % 10))
        (payload,) = get(tier, [block_key(number % 10)], PAYLOAD)
        assert payload in (None, block_bytes(number % 10, PAYLOAD))
        loaded += payload is not None
    assert loaded > 20
    assert tier.injected["corrupt"] > 5
    assert tier.stats().load_failures >= tier.injected["corrupt"]
    close(tier)
