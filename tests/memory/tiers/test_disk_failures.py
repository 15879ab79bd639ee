"""Disks that are full, read-only, forbidden or missing: no request fails, and everything still possible works."""

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.folder import CacheFolder
from support import TESTS
from support.disk_calls import PAYLOAD, open_disk, some_blocks
from support.tier_calls import IDENTITY, block_key, close, get, has, put


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 96 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture
def nobody_folder() -> Iterator[Path]:
    """Yield a folder that `as_nobody` can access, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="spillover-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Run as another user if the tests run as root, for whom nothing is forbidden."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_full_disk_keeps_working_within_what_it_has(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_disk(small_disk, slots=1000, rest_seconds=0.3)
    numbers = range(30)
    with caplog.at_level(logging.WARNING):
        results = [put(tier, some_blocks(number))[0] for number in numbers]
    stored = [number for number, result in zip(numbers, results, strict=True) if result]
    assert 8 < len(stored) < 30, "the disk was never full, or did not recover"
    assert results[-5:] == [True] * 5, "blocks that are there make way for new ones"
    stats = tier.stats()
    assert stats.store_failures == results.count(None) + results.count(False)
    assert stats.available
    kept = [number for number in numbers if has(tier, [block_key(number)])[0]]
    assert kept == stored[-len(kept) :]
    assert get(tier, [block_key(n) for n in kept], PAYLOAD) == list(some_blocks(*kept).values())
    assert sum("No space left" in line.message for line in caplog.records) == 1
    tier.check()
    close(tier)

    tier = open_disk(small_disk, slots=1000)
    assert get(tier, [block_key(n) for n in kept], PAYLOAD) == list(some_blocks(*kept).values())
    close(tier)


def test_disk_with_space_again_grows_again(small_disk: Path) -> None:
    (small_disk / "big").write_bytes(bytes(64 << 10))
    tier = open_disk(small_disk, slots=1000, rest_seconds=0.05)
    for number in range(10):
        put(tier, some_blocks(number))
    before = tier.stats().blocks
    (small_disk / "big").unlink()
    deadline = time.monotonic() + 20
    number = 100
    while tier.stats().blocks <= before:
        assert time.monotonic() < deadline, "the space that came back is not used"
        put(tier, some_blocks(number))
        number += 1
        time.sleep(0.01)
    tier.check()
    close(tier)


def test_limit_on_file_size(tmp_path: Path) -> None:
    """With a limit like a quota, only part of the first segment can be written."""
    script = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.disk_calls import PAYLOAD, open_disk, some_blocks
from support.tier_calls import IDENTITY, block_key, close, get, has, put
tier = open_disk(Path({str(tmp_path)!r}), slots=4)
results = [put(tier, some_blocks(number))[0] for number in range(9)]
kept = [number for number in range(9) if has(tier, [block_key(number)])[0]]
assert get(tier, [block_key(n) for n in kept], PAYLOAD) == list(some_blocks(*kept).values())
assert len(kept) == 2, kept
assert results.count(True) == 8, results
close(tier)
"""
    limit = 8192 + 2 * 8192 + 1000
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr


def test_folder_that_cannot_be_made_is_refused(nobody_folder: Path, as_nobody: None) -> None:
    with pytest.raises(SpilloverError, match=rf"--disk {nobody_folder}/cache cannot be used: Permission denied"):
        open_disk(nobody_folder / "cache")


def test_folder_that_cannot_be_written_is_refused(nobody_folder: Path, as_nobody: None) -> None:
    with pytest.raises(SpilloverError, match=rf"--disk {nobody_folder} cannot be used: Permission denied"):
        open_disk(nobody_folder)


def test_disk_without_space_for_a_block_is_refused_unless_blocks_are_there(small_disk: Path) -> None:
    (small_disk / "big").write_bytes(bytes(72 << 10))
    with pytest.raises(SpilloverError, match=r"cannot be used: .* is free there, and one block takes"):
        open_disk(small_disk / "cache", payload_bytes=30_000, capacity_bytes=1 << 20)
    (small_disk / "big").unlink()
    tier = open_disk(small_disk / "cache")
    put(tier, some_blocks(1))
    close(tier)
    with suppress(OSError):
        (small_disk / "big").write_bytes(bytes(1 << 20))  # fills the disk
    tier = open_disk(small_disk / "cache")
    assert get(tier, [block_key(1)], PAYLOAD) == list(some_blocks(1).values())
    close(tier)


@pytest.mark.parametrize("lock_stays", [True, False])
def test_read_only_folder_still_serves_what_is_in_it(nobody_folder: Path, lock_stays: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can hand a folder over to somebody else")
    path = nobody_folder / "cache"
    blocks = some_blocks(*range(5))
    tier = open_disk(path)
    put(tier, blocks)
    close(tier)
    if not lock_stays:
        (path / "lock").unlink()
    for file in [path, *path.rglob("*")]:
        file.chmod(0o555)
    os.seteuid(65534)
    try:
        tier = open_disk(path)
        assert tier.stats().blocks == 5
        assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
        assert put(tier, some_blocks(9)) == [None]
        assert tier.stats().store_failures == 1
        assert put(tier, {block_key(1): blocks[block_key(1)]}) == [True], "it is there"
        tier.check()
        close(tier)
    finally:
        os.seteuid(0)
    tier = open_disk(path)
    assert get(tier, list(blocks), PAYLOAD) == list(blocks.values())
    close(tier)


def test_folder_removed_under_a_running_tier(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    tier = open_disk(path, slots=6)
    blocks = some_blocks(*range(4))
    put(tier, blocks)
    shutil.rmtree(path)
    for key, loaded in zip(blocks, get(tier, list(blocks), PAYLOAD), strict=True):
        assert loaded in (None, blocks[key])
    assert put(tier, some_blocks(10, 11, 12)) == [True] * 3, "the folder is made again"
    assert get(tier, [block_key(12)], PAYLOAD) == list(some_blocks(12).values())
    tier.check()
    close(tier)
    tier = open_disk(path, slots=6)
    shutil.rmtree(path)  # before the first segment is opened again
    assert put(tier, some_blocks(20)) == [True]
    close(tier)


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    """Another user with write access to the folder cannot make the tier overwrite files through links."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious" * 10_000)
    path = tmp_path / "cache"
    tier = open_disk(path, slots=12, rest_seconds=0.0)
    folder = next(path.glob("*/description.json")).parent
    for number in range(3):
        (folder / f"{number:06}.kv").symlink_to(precious)
    for name in ("recency.tmp", "description.json.tmp"):
        (folder / name).symlink_to(precious)
    put(tier, some_blocks(*range(12)))
    close(tier)
    assert precious.read_bytes() == b"precious" * 10_000
    tier = open_disk(path, slots=12)  # links are not accepted as segments
    assert put(tier, some_blocks(*range(4))) == [True] * 4
    close(tier)
    assert precious.read_bytes() == b"precious" * 10_000


def test_lock_or_cache_folder_that_is_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "cache"
    path.mkdir()
    (path / "lock").symlink_to(precious)
    (path / IDENTITY.hex()).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SpilloverError, match="is a symbolic link"):
        open_disk(path)
    assert precious.read_text() == "precious"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_segment_that_cannot_be_removed_stays_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = b"\x07" * 32
    other = open_disk(tmp_path, slots=8, identity=identity)
    for number in range(8):
        put(other, some_blocks(number))
    close(other)
    real = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".kv" and path.parent.name == identity.hex():
            raise PermissionError(errno.EPERM, "not yours")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    tier = open_disk(tmp_path, slots=8)
    assert put(tier, some_blocks(1)) == [False], "there is no room, and none can be made"
    close(tier)
    monkeypatch.undo()
    (cache,) = [cache for cache in CacheFolder.all(tmp_path) if cache.identity == identity]
    assert len(cache.segment_files()) == 2


def test_description_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpilloverError, match="description"):
        open_disk(tmp_path, description={"model": "m" * 5000})
    close(open_disk(tmp_path))
