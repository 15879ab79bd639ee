"""`spill cache`: a disk tier is listed, verified, pruned and warmed, and a flipped bit is found and located."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spillover import LLM, SamplingParams
from spillover.cli.cache.cache_warm import read_prompts
from spillover.cli.main import main
from spillover.errors import SpilloverError
from spillover.memory.tiers.disk import DiskTier
from spillover.units import parse_seconds
from support.models.hf_reference import VOCAB, save_checkpoint, tiny_model

PAYLOAD = 5000
BLOCKS = 6
IDENTITY, OTHER = bytes(16), bytes(range(16))


def spill(*arguments: str, **options: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments], **options)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + b"\0"


def fill(folder: Path, identity: bytes = IDENTITY, model: str = "tiny") -> DiskTier:
    """Return an open tier with some blocks in it."""
    about = {"model": model, "dtype": "bfloat16", "kv_cache_dtype": "auto", "spill_dtype": "int8", "block_size": "16"}
    tier = DiskTier(folder, 1 << 20, PAYLOAD, identity, about, lambda: None, segment_bytes=1 << 16)
    payloads = [random.Random(number).randbytes(PAYLOAD) for number in range(BLOCKS)]
    tickets = tier.store([(key(number), memoryview(payload)) for number, payload in enumerate(payloads)])
    deadline = time.monotonic() + 30
    while not all(ticket.done() for ticket in tickets):
        assert time.monotonic() < deadline, "the disk takes too long"
        time.sleep(0.001)
    tier.poll()
    return tier


def close(tier: DiskTier) -> None:
    tier.close(time.monotonic() + 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    close(fill(tmp_path / "kv"))
    return tmp_path / "kv"


def test_ls_shows_what_is_there(folder: Path) -> None:
    close(fill(folder, OTHER, "another"))
    page = spill("ls", str(folder))
    assert page.exit_code == 0
    for words in ("tiny", "another", "bfloat16", "int8", IDENTITY.hex()[:8], OTHER.hex()[:8], f"{2 * BLOCKS} blocks"):
        assert words in page.stdout
    listed = json.loads(spill("ls", str(folder), "--json").stdout)
    assert {row["identity"]: row["blocks"] for row in listed} == {IDENTITY.hex(): BLOCKS, OTHER.hex(): BLOCKS}
    assert all(row["bytes"] > BLOCKS * PAYLOAD for row in listed)


def test_a_folder_may_be_named_as_disk_names_it(folder: Path, tmp_path: Path) -> None:
    assert "tiny" in spill("ls", f"{folder}:200GB").stdout
    result = spill("ls", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no KV in" in spill("ls", str(empty)).stdout


def test_verify_finds_nothing_wrong_also_beside_a_server(tmp_path: Path) -> None:
    tier = fill(tmp_path)
    try:
        result = spill("verify", str(tmp_path))
        assert result.exit_code == 0
        assert f"{BLOCKS} records" in result.stdout
        assert "all checksums match" in result.stdout
    finally:
        close(tier)


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_names_the_record_with_a_flipped_bit(tmp_path: Path, as_json: bool) -> None:
    tier = fill(tmp_path)
    assert tier.damage(key(4), bit=12345)
    close(tier)
    result = spill("verify", str(tmp_path), *(["--json"] if as_json else []))
    assert result.exit_code == 1
    if as_json:
        data = json.loads(result.stdout)
        assert data["checked"] == BLOCKS
        assert [bad["key"] for bad in data["bad"]] == [key(4).hex()]
    else:
        [line] = [line for line in result.stdout.splitlines() if "checksum" in line]
        assert key(4).hex() in line
        assert ".kv at byte" in line
        assert key(3).hex() not in result.stdout
        assert "1 damaged" in result.stdout


def test_verify_names_a_segment_that_cannot_be_read(folder: Path) -> None:
    segment = min(folder.rglob("*.kv"))
    segment.write_bytes(b"")
    result = spill("verify", str(folder))
    assert result.exit_code == 1
    assert f"{segment} at byte 0: the segment's first page is damaged" in result.stdout
    assert "1 damaged" in result.stdout
    data = json.loads(spill("verify", str(folder), "--json").stdout)
    assert [(bad["file"], bad["key"]) for bad in data["bad"]] == [(str(segment), None)]


def test_verify_may_look_at_one_cache_only(tmp_path: Path) -> None:
    tier = fill(tmp_path)
    tier.damage(key(0), bit=1)
    close(tier)
    close(fill(tmp_path, OTHER))
    assert spill("verify", str(tmp_path)).exit_code == 1
    assert spill("verify", str(tmp_path), "--identity", OTHER.hex()[:10]).exit_code == 0
    assert spill("verify", str(tmp_path), "--identity", "ff").exit_code == 2


def test_prune_gives_space_back(folder: Path) -> None:
    def on_disk() -> int:
        return sum(file.stat().st_size for file in folder.rglob("*.kv"))

    before = on_disk()
    result = spill("prune", str(folder), "--size", str(before - 2 * PAYLOAD), "--json")
    assert result.exit_code == 0
    pruned = json.loads(result.stdout)
    assert 2 <= pruned["blocks"] < BLOCKS
    assert on_disk() <= before - 2 * PAYLOAD
    assert pruned["bytes"] >= 2 * PAYLOAD
    assert json.loads(spill("ls", str(folder), "--json").stdout)[0]["blocks"] == BLOCKS - pruned["blocks"]
    assert spill("verify", str(folder)).exit_code == 0
    assert "0 blocks" in spill("prune", str(folder), "--older-than", "1h").stdout
    assert spill("prune", str(folder), "--identity", IDENTITY.hex()).exit_code == 0
    assert spill("ls", str(folder), "--json").stdout.strip() == "[]"


def test_prune_wants_to_know_what_and_leaves_a_server_alone(tmp_path: Path) -> None:
    tier = fill(tmp_path)
    try:
        assert "--older-than" in spill("prune", str(tmp_path)).stderr
        result = spill("prune", str(tmp_path), "--size", "1")
        assert result.exit_code == 2
        assert "in use" in result.stderr
        assert tier.stats().blocks == BLOCKS
    finally:
        close(tier)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15min", 900), ("1.5h", 5400), ("7d", 604800)])
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "7 weeks", "-1d", "1e3"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(SpilloverError, match="is not a time"):
        parse_seconds(text)


# Warming

@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    made, _ = tiny_model("llama", seed=3)
    return str(save_checkpoint(made, tmp_path_factory.mktemp("tiny")))


ENGINE = {"block_size": 8, "max_model_len": 192, "num_gpu_blocks_override": 60, "skip_tokenizer_init": True}


def flags() -> list[str]:
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in ENGINE.items()]


def test_what_was_warmed_is_found_by_the_next_process_and_changes_no_token(model: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(50)] for _ in range(8)]
    lines = "\n".join(json.dumps({"prompt_token_ids": prompt}) for prompt in prompts)
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    place = f"{tmp_path / 'kv'}:50MB"

    first = json.loads(spill("warm", place, model, "--prompts", str(file), "--json", *flags()).stdout)
    assert (first["prompts"], first["tokens"], first["computed"], first["found"]) == (8, 400, 400, 0)
    assert (first["blocks_written"], first["block_tokens"], first["failures"]) == (48, 384, 0)
    assert first["bytes_written"] > 0
    again = json.loads(spill("warm", place, model, "--prompts", "-", "--json", *flags(), input=lines).stdout)
    assert (again["computed"], again["found"], again["blocks_written"], again["blocks"]) == (16, 384, 0, 48)
    assert spill("verify", str(tmp_path / "kv")).exit_code == 0

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, **ENGINE) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(model, disk=place, restore="always", **ENGINE) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.sources.disk for output in outputs) == 384


def test_another_model_does_not_find_it(model: str, tmp_path: Path) -> None:
    place, line = f"{tmp_path / 'kv'}:1GB", json.dumps({"prompt_token_ids": list(range(50))})
    other, _ = tiny_model("llama", seed=4)
    folder = str(save_checkpoint(other, tmp_path / "other"))
    for checkpoint in (model, folder):
        result = spill("warm", place, checkpoint, "--prompts", "-", "--json", *flags(), input=line)
        assert json.loads(result.stdout)["found"] == 0
    assert len(json.loads(spill("ls", place, "--json").stdout)) == 2


@pytest.mark.parametrize(("arguments", "words"), [
    (["kv", "--prompts", "-"], "PATH:SIZE"),
    (["kv:1GB", "--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    (["kv:1GB", "--prompts", "-", "--disk", "other:1GB"], "leave out --disk"),
    (["kv:1GB", "--prompts", "-"], "no prompts"),
    (["kv:1GB"], "--prompts"),
])
def test_what_warm_cannot_do_is_said_before_anything_is_loaded(arguments: list[str], words: str) -> None:
    result = spill("warm", *arguments, input="")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_prompts_are_json_lines() -> None:
    lines = ['"a text"', "", '{"prompt": "b"}', '{"messages": [{"role": "user", "content": "c"}]}',
             '{"prompt_token_ids": [1, 2]}']
    assert read_prompts(lines) == [json.loads(line) for line in lines if line]
    for bad in ("a text", "[1, 2]", '{"text": "a"}', "3", '{"prompt_token_ids": ["a"]}'):
        with pytest.raises(SpilloverError, match="line 2"):
            read_prompts(['"a text"', bad])
