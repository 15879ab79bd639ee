"""With a key, only its holders can store blocks that load; without one, any record with the right checksum loads."""

import logging
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.base import Tier, checksum
from spillover.memory.tiers.inspect import list_caches, verify
from spillover.memory.tiers.prune import prune
from spillover.memory.tiers.record import HEADER_BYTES, RecordHeader
from spillover.memory.tiers.remote import RemoteTier
from spillover.memory.tiers.seal import PLAIN, KeyedSeal, Seal, read_seal
from support.disk_calls import PAYLOAD, open_disk, some_blocks
from support.tier_calls import IDENTITY, block_key, close, get, has, no_wake, put
from support.valkey import Valkey

OURS, THEIRS = KeyedSeal(b"a key of ours, 0123456789"), KeyedSeal(b"a key of theirs, 0123456789")
BLOCKS = some_blocks(1, 2, 3)
EVIL = b"\x66" * PAYLOAD


def open_remote(url: str, seal: Seal) -> RemoteTier:
    return RemoteTier(url, PAYLOAD, IDENTITY, no_wake, timeout=30, lookup_timeout=30, seal=seal)


Opened = Callable[[Seal], Tier]


@pytest.fixture(params=["disk", "remote"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    if request.param == "disk":
        return lambda seal: open_disk(tmp_path / "kv", slots=200, seal=seal)
    url = request.getfixturevalue("valkey").url
    return lambda seal: open_remote(url, seal)


@pytest.mark.parametrize(("writer", "reader"), [(OURS, PLAIN), (PLAIN, OURS), (OURS, THEIRS), (OURS, OURS)])
def test_blocks_are_found_with_their_own_key_only(opened: Opened, writer: Seal, reader: Seal) -> None:
    tier = opened(writer)
    assert put(tier, BLOCKS) == [True] * 3
    close(tier)
    tier = opened(reader)
    same = writer is reader
    assert has(tier, list(BLOCKS)) == [same] * 3
    assert get(tier, list(BLOCKS), PAYLOAD) == (list(BLOCKS.values()) if same else [None] * 3)
    assert tier.stats().load_failures == 0, "another cache's block is a miss, not a failure"
    close(tier)


def forged(raw: bytes, seal: Seal) -> bytes:
    """Return a header for other bytes under the same key, as well as it can be forged without the secret."""
    header = RecordHeader.read(raw, seal.identity(IDENTITY))
    assert header is not None
    if seal is PLAIN:
        return RecordHeader(header.key, PAYLOAD, PLAIN.of_payload(EVIL), header.sequence, time.time()).pack(IDENTITY)
    attempt = THEIRS  # another secret, or checksums in place of MACs
    return RecordHeader(header.key, PAYLOAD, attempt.of_payload(EVIL), header.sequence, time.time()).pack(
        seal.identity(IDENTITY), attempt)


@pytest.mark.parametrize("seal", [OURS, PLAIN], ids=["key", "no key"])
@pytest.mark.parametrize("how", ["other key", "checksum", "payload", "swapped"])
def test_forged_values_in_a_remote_store(valkey: Valkey, seal: Seal, how: str) -> None:
    tier = open_remote(valkey.url, seal)
    put(tier, BLOCKS)
    client = valkey.client()
    first, second = (tier._name(block_key(number)) for number in (1, 2))
    value = client.get(first)
    if how == "other key":
        value = forged(value[:HEADER_BYTES], seal) + EVIL
    elif how == "checksum":
        value = RecordHeader(block_key(1), PAYLOAD, PLAIN.of_payload(EVIL), 0, 0.0).pack(seal.identity(IDENTITY)) + EVIL
    elif how == "payload":
        value = value[:HEADER_BYTES] + EVIL
    else:
        value = client.get(second)
    client.set(first, value)
    accepted = seal is PLAIN and how in ("other key", "checksum")  # the docs warn of these
    loaded = get(tier, [block_key(1), block_key(3)], PAYLOAD)
    assert loaded == [EVIL if accepted else None, BLOCKS[block_key(3)]]
    assert tier.stats().load_failures == (0 if accepted else 1)
    if not accepted:  # recomputed blocks are stored again
        assert put(tier, {block_key(1): BLOCKS[block_key(1)]}) == [True]
        assert get(tier, [block_key(1)], PAYLOAD) == [BLOCKS[block_key(1)]]
    close(tier)


@pytest.mark.parametrize("seal", [OURS, PLAIN], ids=["key", "no key"])
def test_forged_records_on_a_disk(tmp_path: Path, seal: Seal) -> None:
    tier = open_disk(tmp_path, seal=seal)
    put(tier, BLOCKS)
    segments = {id(segment): segment for segment in tier._segments}.values()
    for segment in segments:
        for slot, raw in enumerate(segment.raw_headers()):
            header = RecordHeader.read(raw, segment.identity)
            if header is not None and header.key == block_key(1):
                segment.write(slot, forged(raw, seal), memoryview(EVIL))
    before = get(tier, [block_key(1)], PAYLOAD)
    assert before == [None], "the tier that wrote it remembers what it must add up to"
    assert tier.stats().load_failures == 1
    put(tier, BLOCKS)
    for segment in segments:
        for slot, raw in enumerate(segment.raw_headers()):
            header = RecordHeader.read(raw, segment.identity)
            if header is not None and header.key == block_key(1):
                segment.write(slot, forged(raw, seal), memoryview(EVIL))
    close(tier)
    tier = open_disk(tmp_path, seal=seal)
    assert get(tier, [block_key(1)], PAYLOAD) == [EVIL if seal is PLAIN else None]
    assert tier.dropped == (0 if seal is PLAIN else 1)
    close(tier)


def test_cache_commands_and_a_key(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, seal=OURS)
    put(tier, BLOCKS)
    close(tier)
    assert [info.blocks for info in list_caches(tmp_path)] == [3]
    with pytest.raises(SpilloverError, match="--kv-store-key-file"):
        list(verify(tmp_path))
    assert [progress.bad for progress in verify(tmp_path, seal=OURS)] == [None] * 3
    assert all(progress.bad is not None for progress in verify(tmp_path, seal=THEIRS))
    assert prune(tmp_path, older_than=3600.0).blocks == 0
    tier = open_disk(tmp_path, seal=OURS)
    assert get(tier, list(BLOCKS), PAYLOAD) == list(BLOCKS.values()), "pruning without the key keeps what is valid"
    close(tier)


def test_records_without_a_key_have_the_format_they_always_had() -> None:
    header = RecordHeader(b"k" * 33, 5, PLAIN.of_payload(b"12345"), 7, 1.5).pack(IDENTITY)
    fields = struct.pack("<8sQQQdH206s", b"SPILLKV1", 7, 5, checksum(b"12345"), 1.5, 33, b"k" * 33)
    assert header == fields + struct.pack("<Q", checksum(fields + IDENTITY))


def test_key_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    with pytest.raises(SpilloverError, match=r"--kv-store-key-file .* cannot be read: No such file"):
        read_seal(str(path))
    path.write_text("short\n")
    with pytest.raises(SpilloverError, match="holds 5 bytes, and a key has 16 to 1024"):
        read_seal(str(path))
    path.write_text("s3cret-s3cret-s3cret\n")
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        ours = read_seal(str(path))
        assert not caplog.records
        path.chmod(0o644)
        again = read_seal(str(path))
    assert "chmod 600" in caplog.text
    assert "s3cret" not in caplog.text + repr(ours) + str(vars(ours))
    assert ours.of_payload(b"x") == again.of_payload(b"x") != KeyedSeal(b"s3cret-s3cret-s3creT").of_payload(b"x")
    assert read_seal(None) is PLAIN
