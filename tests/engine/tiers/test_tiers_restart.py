"""Stored KV outlives the process that computed it, even if killed while writing, and is found only by equal models."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spillover import LLM, SamplingParams
from spillover.memory.tiers.inspect import find_caches, verify
from spillover.memory.tiers.record import EMPTY_HEADER
from support.models.hf_reference import VOCAB, greedy, save_checkpoint, tiny_model
from support.valkey import Valkey

BLOCK = 8
LENGTH = 12
PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)

WRITER = """
import json, sys
from spillover import LLM, SamplingParams
model, disk, prompts = json.loads(sys.argv[1])
llm = LLM(model, skip_tokenizer_init=True, block_size=8, max_model_len=192, num_gpu_blocks_override=60, disk=(disk,),
          spill="eager")
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
for prompt in prompts:
    llm.generate(prompt, params, use_tqdm=False)
    print("done", flush=True)
"""


class Tiny:
    def __init__(self, folder: Path, name: str = "llama", seed: int = 11) -> None:
        self.hf, _ = tiny_model(name, seed=seed)
        self.path = str(save_checkpoint(self.hf, folder))

    def expected(self, prompt: list[int]) -> list[int]:
        return greedy(self.hf, prompt, LENGTH)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def prompts(count: int, seed: int = 0, length: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def load(path: str, **flags: Any) -> LLM:
    options = {"skip_tokenizer_init": True, "block_size": BLOCK, "max_model_len": 192, "num_gpu_blocks_override": 60}
    return LLM(path, **{**options, "restore": "always", **flags})


def ask(llm: LLM, tiny: Tiny, prompt: list[int], salt: str | None = None) -> dict[str, int]:
    """Check the answer to a prompt; return its number of tokens by source."""
    output = llm.generate(prompt, PARAMS, use_tqdm=False, cache_salt=salt)[0]
    assert output.outputs[0].token_ids == tiny.expected(prompt)
    sources = {name: getattr(output.sources, name) for name in ("computed", "device", "host", "disk", "remote")}
    assert sum(sources.values()) == len(prompt)
    return sources


@pytest.mark.parametrize("moment", [0.0, 0.004, 0.02])
def test_a_process_killed_while_it_writes(tiny: Tiny, tmp_path: Path, moment: float) -> None:
    disk, asked = f"{tmp_path / 'kv'}:50MB", prompts(40, seed=int(moment * 1000))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, json.dumps([tiny.path, disk, asked])],
                              stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(8):
        assert writer.stdout.readline() == "done\n"
    time.sleep(moment)
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    with load(tiny.path, disk=(disk,)) as llm:
        found = [ask(llm, tiny, prompt)["disk"] for prompt in asked[:12]]
    assert sum(found) > 5 * 100, f"what was written in peace is not found: {found}"


def test_a_clean_end_leaves_everything_on_disk(tiny: Tiny, tmp_path: Path) -> None:
    disk, asked = f"{tmp_path / 'kv'}:50MB", prompts(6)
    with load(tiny.path, disk=(disk,), host_memory="20MB") as llm:
        for prompt in asked:
            assert ask(llm, tiny, prompt)["disk"] == 0
    with load(tiny.path, disk=(disk,)) as llm:
        assert [ask(llm, tiny, prompt)["disk"] for prompt in asked] == [112] * 6  # of 120; one is always computed


def test_only_equals_find_it(tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk, (prompt,) = f"{tmp_path / 'kv'}:2GB", prompts(1)
    with load(tiny.path, disk=(disk,), spill="eager") as llm:
        ask(llm, tiny, prompt, salt="a")
    other = Tiny(tmp_path_factory.mktemp("other"), seed=12)
    layout = Tiny(tmp_path_factory.mktemp("layout"), "qwen3", seed=12)
    for model, salt, flags in [
        (other, "a", {}),
        (layout, "a", {}),
        (tiny, "a", {"block_size": 16}),
        (tiny, "b", {}),
        (tiny, None, {}),
    ]:
        with load(model.path, disk=(disk,), **flags) as llm:
            assert ask(llm, model, prompt, salt)["disk"] == 0, (model.path, salt, flags)
    for flags in ({"kv_cache_dtype": "int8"}, {"spill_dtype": "int8"}, {"spill_dtype": "fp8"}, {"spill_dtype": "int4"},
                  {"kv_cache_dtype": "int8", "spill_dtype": "int4"}, {"dtype": "bfloat16"}):
        with load(tiny.path, disk=(disk,), **flags) as llm:  # these may draw other tokens
            assert llm.generate(prompt, PARAMS, use_tqdm=False, cache_salt="a")[0].sources.disk == 0, flags
    with load(tiny.path, disk=(disk,)) as llm:
        assert ask(llm, tiny, prompt, "a")["disk"] > 0


def test_a_copy_of_the_model_elsewhere_is_its_equal(tiny: Tiny, tmp_path: Path) -> None:
    disk, (prompt,) = f"{tmp_path / 'kv'}:2GB", prompts(1)
    copy = Tiny(tmp_path / "copy")
    with load(tiny.path, disk=(disk,), spill="eager") as llm:
        ask(llm, tiny, prompt)
    with load(copy.path, disk=(disk,)) as llm:
        assert ask(llm, copy, prompt)["disk"] > 0


def test_two_engines_share_a_remote_store(tiny: Tiny, valkey: Valkey) -> None:
    prompt, other = prompts(2, seed=77)
    with load(tiny.path, remote=valkey.url, spill="eager") as one, load(tiny.path, remote=valkey.url) as two:
        ask(one, tiny, prompt, "tenant")
        wait_for(lambda: not one.engine.scheduler.connector.busy or one.engine.step() is None)
        assert ask(two, tiny, prompt, "tenant")["remote"] == 112
        assert ask(two, tiny, prompt, "another")["remote"] == 0
        assert ask(two, tiny, other, "tenant")["remote"] == 0


@pytest.mark.parametrize("pool", [{}, {"kv_cache_dtype": "int8"}], ids=str)
def test_four_bits_in_every_tier(tiny: Tiny, tmp_path: Path, valkey: Valkey, pool: dict[str, str]) -> None:
    """Host memory, disk and a remote store hold and move codes of about a quarter of 16 bits, or half of 8."""
    (prompt,) = prompts(1, seed=5)
    first, folder = None, tmp_path / "kv"
    tiers = {"disk": {"disk": (f"{folder}:50MB",)}, "remote": {"remote": valkey.url}}
    for name, flags in tiers.items():
        for attempt in range(2):
            with load(tiny.path, **pool, **flags, spill="eager", spill_dtype="int4", host_memory="20MB") as llm:
                output = llm.generate(prompt, PARAMS, use_tqdm=False)[0]
                wait_for(lambda llm=llm: not llm.engine.scheduler.connector.busy or llm.engine.step() is None)
                plan, reports = llm.plan, {tier.name: tier for tier in llm.engine.scheduler.connector.reports()}
            first = first or output.outputs[0].token_ids
            values = 2 * tiny.hf.config.num_hidden_layers * tiny.hf.config.num_key_value_heads * BLOCK
            dim = tiny.hf.config.head_dim
            assert plan.slot_bytes == values * (dim // 2 + 2)
            assert plan.block_bytes == values * (dim + 4 if pool else dim * 4)
            if attempt == 0:
                assert (getattr(output.sources, name), output.outputs[0].token_ids) == (0, first)
                assert reports["host"].bytes_in >= 112 // BLOCK * plan.slot_bytes
            else:
                assert getattr(output.sources, name) == 112
                assert reports["host"].bytes_out == 112 // BLOCK * plan.slot_bytes
            assert reports["host"].bytes_in % plan.slot_bytes == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_bit_that_flips_on_disk_is_computed_again(tiny: Tiny, tmp_path: Path) -> None:
    """With one bit of every stored block flipped, each block is detected, recomputed, and stored again."""
    folder, asked = tmp_path / "kv", prompts(4)

    def found(**flags: Any) -> list[int]:
        with load(tiny.path, disk=(f"{folder}:50MB",), **flags) as llm:
            return [ask(llm, tiny, prompt)["disk"] for prompt in asked]

    assert found(spill="eager") == [0] * 4
    assert found() == [112] * 4, "nothing was read from disk before a bit was flipped"
    flipped = flip_a_bit_of_every_block(folder)
    assert flipped >= 4 * 112 // BLOCK
    assert sum(step.bad is not None for step in verify(folder)) == flipped
    assert found(spill="eager") == [0] * 4
    assert found() == [112] * 4, "what was computed again was not stored again"


def flip_a_bit_of_every_block(folder: Path) -> int:
    """Flip a bit of every stored block; return the number of blocks."""
    rng, flipped = random.Random(1), 0
    for cache in find_caches(folder):
        for segment in cache.segments(writable=True):
            for slot, header in enumerate(segment.raw_headers()):
                if header != EMPTY_HEADER:
                    segment.flip_bit(slot, rng.randrange(8 * segment.payload_bytes))
                    flipped += 1
            segment.close()
    return flipped


def test_a_key_keeps_out_what_was_not_written_with_it(tiny: Tiny, tmp_path: Path) -> None:
    disk, (prompt,) = f"{tmp_path / 'kv'}:2GB", prompts(1)
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"a key of {name}, long enough")
        (tmp_path / name).chmod(0o600)
    ours, theirs = {"kv_store_key_file": str(tmp_path / "ours")}, {"kv_store_key_file": str(tmp_path / "theirs")}
    found = []
    for flags in (ours, theirs, {}, ours, theirs, {}):
        with load(tiny.path, disk=(disk,), spill="eager", **flags) as llm:
            assert "long enough" not in repr(llm.config) + repr(llm.plan)
            found.append(ask(llm, tiny, prompt)["disk"])
    assert found == [0, 0, 0, 112, 112, 112]
