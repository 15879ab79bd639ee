"""Engine flags of the KV tiers: other engines' spellings are accepted, contradictions are rejected in one sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError
from spillover.memory.budgets import parse_disk
from spillover.units import parse_bytes


def test_one_disk_may_be_a_string_and_several_any_sequence() -> None:
    assert EngineConfig(disk="/nvme/kv:200GB").disk == ("/nvme/kv:200GB",)
    assert EngineConfig(disk=["/a:1GB", "/b:2GB"]).disk == ("/a:1GB", "/b:2GB")
    assert EngineConfig().disk == ()


def test_vllms_spellings_become_ours() -> None:
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    config = EngineConfig(kv_offloading_size=1.5)
    assert config.host_memory is not None
    assert parse_bytes(config.host_memory) == 3 << 29


def test_a_settled_config_can_be_settled_again() -> None:
    """A processed config can be processed again, as when the planner replaces fields or it is sent to the engine."""
    config = EngineConfig(kv_offloading_size=2, disk="/a:1GB", spill_dtype="fp8_e4m3")
    assert dataclasses.replace(config, max_model_len=8) == dataclasses.replace(config, max_model_len=8)
    assert EngineConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(("flags", "words"), [
    ({"disk": "/nvme/kv"}, ["PATH:SIZE", "/nvme/kv"]),
    ({"disk": ":4GB"}, ["PATH:SIZE"]),
    ({"disk": "/nvme/kv:"}, ["PATH:SIZE"]),
    ({"disk": "/nvme/kv:many"}, ["'many'", "not a size"]),
    ({"disk": "/nvme/kv:0GB"}, ["above 0"]),
    ({"disk": ("/a/b:1GB", "/a/../a/b:2GB")}, ["twice", "/a/b"]),
    ({"host_memory": "lots"}, ["'lots'", "not a size"]),
    ({"host_memory": "0"}, ["--host-memory", "above 0"]),
    ({"kv_offloading_size": -1.0}, ["--kv-offloading-size", "above 0"]),
    ({"kv_offloading_size": 1.0, "host_memory": "1GB"}, ["--kv-offloading-size", "--host-memory"]),
    ({"remote": "http://host:6379"}, ["redis://", "rediss://", "unix://", "http://host:6379"]),
    ({"remote": "redis://host?size=many"}, ["size", "'many'"]),
    ({"host_pool": "/" + "x" * 200}, ["107 bytes"]),
    ({"host_pool": "auto", "enable_prefix_caching": False}, ["--host-pool", "--enable-prefix-caching"]),
    ({"host_memory": "1GB", "spill_dtype": "int8", "kv_cache_dtype": "fp8"}, ["contradict"]),
    ({"host_memory": "1GB", "enable_prefix_caching": False}, ["--host-memory", "--enable-prefix-caching"]),
    ({"disk": "/a:1GB", "enable_prefix_caching": False}, ["--disk", "--enable-prefix-caching"]),
    ({"remote": "redis://a", "load_format": "null"}, ["--remote", "--load-format null"]),
    ({"spill": "eager"}, ["--spill eager", "--host-memory, --host-pool, --disk or --remote"]),
    ({"restore": "never"}, ["--restore never"]),
    ({"spill_dtype": "fp8"}, ["--spill-dtype fp8"]),
    ({"host_memory": "1GB", "spill_admission": "sometimes"}, ["second-use", "'sometimes'"]),
    ({"host_memory": "1GB", "spill": "later"}, ["--spill", "evict, eager"]),
    ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype", "auto, fp8, int8"]),
    ({"kv_cache_dtype": "int4"}, ["--kv-cache-dtype", "auto, fp8, int8"]),
])
def test_what_cannot_be_is_refused_in_one_sentence(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpilloverError) as refused:
        EngineConfig.from_flags(**flags)
    sentence = str(refused.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("flags", [
    {"host_memory": "1GB", "spill_dtype": "int8", "kv_cache_dtype": "int8"},
    {"host_memory": "1GB", "spill_dtype": "int4", "kv_cache_dtype": "fp8"},
    {"host_memory": "1GB", "spill_admission": "my_package.policies:Rarely", "restore": "always", "spill": "eager"},
    {"remote": "unix:///run/valkey.sock", "spill_admission": "second-use"},
    {"host_pool": "auto", "spill": "eager"},
    {"kv_cache_dtype": "fp8", "enable_prefix_caching": False},
], ids=lambda flags: "+".join(flags))
def test_what_goes_together_is_taken(flags: dict[str, Any]) -> None:
    config = EngineConfig.from_flags(**flags)
    assert {name: getattr(config, name) for name in flags} == flags


def test_what_is_shown_has_no_password() -> None:
    config = EngineConfig(remote="redis://me:secret@far:6379/1?ttl=60", max_num_seqs=3)
    assert config.shown()["remote"] == "redis://far:6379/1"
    assert config.shown()["max_num_seqs"] == 3
    assert "secret" not in str(config.shown())


def test_a_disk_path_may_hold_colons_and_is_made_absolute(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse_disk("/a:b/c:2GiB").path.as_posix() == "/a:b/c"
    assert parse_disk("kv:2GiB").path == tmp_path / "kv"
    assert parse_disk("~/kv:2GiB").path == tmp_path / "home/kv"
    assert parse_disk("kv:2GiB").capacity_bytes == 2 << 30
