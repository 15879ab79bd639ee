"""Real stores that forget, expire, fill up or are removed under a real engine: the same tokens, and hits recur."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.memory.spill import spiller
from spillover.memory.tiers.disk import DiskTier
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model
from support.valkey import Valkey

PROMPTS = 8
LENGTH = 97  # tokens: 12 blocks of 8, and one that is always computed
WHOLE = PROMPTS * 96
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Asked:
    """Prompts that do not fit on the device, their answers, and the engine under test."""

    def __init__(self, folder: Path) -> None:
        model, _ = tiny_model("llama", seed=11)
        self.path = str(save_checkpoint(model, folder))
        self.prompts = [[(7 * i + 31 * at + at * at) % VOCAB for at in range(LENGTH)] for i in range(PROMPTS)]
        self.answers = [greedy(model, prompt, 4) for prompt in self.prompts]
        self.llm: LLM | None = None

    def open(self, **flags: Any) -> LLM:
        options = {"skip_tokenizer_init": True, "block_size": 8, "max_model_len": 128, "num_gpu_blocks_override": 40,
                   "restore": "always", "spill": "eager"}
        self.llm = LLM(self.path, **{**options, **flags})
        return self.llm

    def round(self, chosen: int = PROMPTS) -> int:
        """Send all prompts; return the number of tokens that were not computed."""
        assert self.llm is not None
        engine, cached = self.llm.engine, 0
        for prompt, answer in list(zip(self.prompts, self.answers, strict=True))[:chosen]:
            output = self.llm.generate(prompt, PARAMS, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == answer
            cached += LENGTH - output.sources.computed
            deadline = time.monotonic() + 30
            while engine.scheduler.connector.busy:
                engine.step()
                engine.wait(0.001)
                assert time.monotonic() < deadline
        return cached

    def heals(self, fault: Callable[[], object]) -> None:
        self.round()
        assert self.round() == WHOLE
        fault()
        after = self.round()
        assert after < WHOLE, "nothing was lost"
        assert self.round() == WHOLE


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen timeouts, so that no block is lost because a copy is slow on a busy machine."""
    monkeypatch.setattr(spiller, "LOSSY_AFTER_SECONDS", 30.0)


@pytest.mark.parametrize("host", [None, "160KB"])
def test_redis_flushed(asked: Asked, valkey: Valkey, host: str | None) -> None:
    with asked.open(remote=f"{valkey.url}?timeout=30", host_memory=host):
        for _ in range(2):
            asked.heals(lambda: valkey.client().flushall())


def test_redis_blocks_expire(asked: Asked, valkey: Valkey) -> None:
    def expire() -> None:
        client = valkey.client()
        for name in client.keys("spillover:*"):
            client.pexpire(name, 1)
        time.sleep(0.01)

    with asked.open(remote=f"{valkey.url}?ttl=3600&timeout=30"):
        asked.heals(expire)


def test_redis_evicts_by_itself(asked: Asked, valkey: Valkey) -> None:
    client = valkey.client()

    def squeeze() -> None:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 200_000)
        client.config_set("maxmemory", 0)

    with asked.open(remote=f"{valkey.url}?timeout=30"):
        asked.heals(squeeze)


def test_redis_restarted(asked: Asked, valkey: Valkey) -> None:
    def restart() -> None:
        assert asked.llm is not None
        valkey.kill()
        asked.round(2)  # the engine notices the loss
        valkey.start()
        deadline = time.monotonic() + 30
        while not asked.llm.stats().tiers[-1].available:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with asked.open(remote=f"{valkey.url}?timeout=30"):
        asked.heals(restart)


def test_disk_tier_that_is_full_goes_on_storing(asked: Asked, tmp_path: Path) -> None:
    with asked.open(disk=(f"{tmp_path / 'kv'}:420KB",)) as llm:
        written = [0]
        for _ in range(3):
            asked.round()
            written.append(llm.stats().tiers[0].bytes_in)
        assert written == sorted(set(written)), "what was computed again was not stored again"
        few = llm.stats().tiers[0].blocks // 12 // 2
        assert few >= 1
        asked.round(few)
        asked.round()
        asked.round(few)
        assert asked.round(few) == few * 96


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True,
                             text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_disk_that_fills_up_and_is_cleared(asked: Asked, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are truncated and a file fills the disk, so that every write fails with ENOSPC until it is removed."""
    monkeypatch.setitem(DiskTier.__init__.__kwdefaults__, "rest_seconds", 0.0)

    def fill() -> None:
        for path in (small_disk / "kv").glob("*/*.kv"):
            os.truncate(path, 4096)
        with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        asked.round(4)
        (small_disk / "filler").unlink()

    with asked.open(disk=(f"{small_disk / 'kv'}:7MB",)) as llm:
        asked.heals(fill)
        assert llm.stats().tiers[0].failures > 0


def test_disk_folder_removed_under_load(asked: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with asked.open(disk=(f"{folder}:20MB",)):
        asked.round()
        shutil.rmtree(folder)
        asked.round()
        assert asked.round() == WHOLE
    with asked.open(disk=(f"{folder}:20MB",)):
        shutil.rmtree(folder)  # before the first segment is opened
        asked.round()
        assert asked.round() == WHOLE
