"""Flags as users type them: underscores, misspellings, contradictions, and errors without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from spillover.cli.main import SpillGroup, main
from spillover.cli.options import engine_options, engine_sweep_options
from spillover.engine import vllm_flags
from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError


def invoke(*arguments: str, group: click.Group = main) -> Result:
    return CliRunner().invoke(group, list(arguments))


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def group(seen: list[Any]) -> click.Group:
    """Return two commands that record their arguments."""

    @click.group(cls=SpillGroup, context_settings=main.context_settings)
    def root() -> None: ...

    @root.command()
    @engine_options()
    def one(config: EngineConfig) -> None:
        seen.append(config)

    @root.command()
    @engine_sweep_options(defaults={"block_size": 32})
    def many(configs: list[EngineConfig]) -> None:
        seen.extend(configs)

    @root.command()
    @click.argument("how")
    def fail(how: str) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        raise SpilloverError("there is no such thing; try another")

    return root


@pytest.mark.parametrize("spelling", [["--max-num-seqs", "7"], ["--max_num_seqs", "7"], ["--max_num_seqs=7"],
                                      ["--max-num_seqs=7"]])
def test_hyphens_and_underscores_are_alike(group: click.Group, seen: list[Any], spelling: list[str]) -> None:
    assert invoke("one", *spelling, group=group).exit_code == 0
    assert seen[0].max_num_seqs == 7


def test_underscores_in_a_value_are_left_alone(group: click.Group, seen: list[Any]) -> None:
    assert invoke("one", "--tokenizer", "my_folder/a_b", "my_model", group=group).exit_code == 0
    assert (seen[0].model, seen[0].tokenizer) == ("my_model", "my_folder/a_b")


def test_every_engine_flag_is_an_option_and_defaults_are_the_engines(group: click.Group, seen: list[Any]) -> None:
    assert invoke("one", group=group).exit_code == 0
    assert seen[0] == EngineConfig()
    options = {name for param in group.commands["one"].params for name in param.opts}
    assert {"--" + name.replace("_", "-") for name in EngineConfig.__dataclass_fields__} <= options


def test_an_unknown_option_gets_the_nearest_one(group: click.Group) -> None:
    result = invoke("one", "--max-num-seq", "3", group=group)
    assert result.exit_code == 2
    assert result.stderr == "spill: No such option --max-num-seq; did you mean --max-num-seqs?\n"
    assert "did you mean 'many'" in invoke("manny", group=group).stderr


def test_a_flag_of_vllms_server_gets_what_to_use_instead(group: click.Group) -> None:
    result = invoke("one", "--pipeline-parallel-size", "2", group=group)
    assert result.exit_code == 2
    assert result.stderr == ("spill: vLLM's --pipeline-parallel-size is not supported here: layers are not divided "
                             "among devices; use --tensor-parallel-size, which divides every layer\n")
    options = {name for param in group.commands["one"].params for name in param.opts} | {"--replicas"}
    for name in vllm_flags._KNOWN:  # none is a flag of ours, and the messages name flags that are
        assert name not in EngineConfig.__dataclass_fields__
        instead = vllm_flags.replacement_for("--" + name.replace("_", "-")) or ""
        assert set(re.findall(r"--[a-z-]+", instead)) <= options, instead
        assert not re.search(r"[a-z]_[a-z]|=", instead), instead


def test_a_model_is_given_once_by_either_way(group: click.Group, seen: list[Any]) -> None:
    invoke("one", "folder", group=group)
    invoke("one", "--model", "folder", group=group)
    assert [config.model for config in seen] == ["folder", "folder"]
    result = invoke("one", "folder", "--model", "other", group=group)
    assert result.exit_code == 2
    assert "given twice" in result.stderr


@pytest.mark.parametrize("arguments", [
    ["one", "--enable-prefix-caching", "--no-enable-prefix-caching"],
    ["many", "--enable-prefix-caching", "--no-enable-prefix-caching"],
    ["one", "--gpu-memory", "1GB", "--num-gpu-blocks-override", "8"],
])
def test_contradictions_are_refused(group: click.Group, seen: list[Any], arguments: list[str]) -> None:
    result = invoke(*arguments, group=group)
    assert result.exit_code == 2
    assert "contradict" in result.stderr
    assert not seen


def test_switches(group: click.Group, seen: list[Any]) -> None:
    invoke("one", "--no-enable-prefix-caching", group=group)
    invoke("many", "--enable-prefix-caching", group=group)
    invoke("many", "--no-enable-prefix-caching", group=group)
    assert [config.enable_prefix_caching for config in seen] == [False, True, False]


def test_comma_lists_give_every_combination(group: click.Group, seen: list[Any]) -> None:
    result = invoke("many", "--max-num-seqs", "1,4,16", "--batching", "static,continuous",
                    "--enable-prefix-caching", "off,on", group=group)
    assert result.exit_code == 0
    assert len(seen) == 12
    assert {(c.max_num_seqs, c.batching, c.enable_prefix_caching) for c in seen} == {
        (size, batching, on) for size in (1, 4, 16) for batching in ("static", "continuous") for on in (True, False)}
    assert {c.block_size for c in seen} == {32}  # the command's own default


def test_disks_are_given_one_by_one_and_never_swept(group: click.Group, seen: list[Any]) -> None:
    disks = ["--disk", "/a,b:1GB", "--disk", "/c:2GB"]
    assert invoke("one", *disks, group=group).exit_code == 0
    assert invoke("many", *disks, "--max-num-seqs", "1,2", group=group).exit_code == 0
    assert [config.disk for config in seen] == [("/a,b:1GB", "/c:2GB")] * 3
    assert [config.max_num_seqs for config in seen] == [None, 1, 2]


def test_host_memory_in_vllms_words_may_be_swept(group: click.Group, seen: list[Any]) -> None:
    sweep = ["--kv-offloading-size", "1,2", "--kv-cache-dtype", "fp8_e4m3,int8"]
    assert invoke("many", *sweep, group=group).exit_code == 0
    assert len({config.host_memory for config in seen}) == 2
    assert [config.kv_cache_dtype for config in seen] == ["fp8", "int8"] * 2


def test_aliases_are_taken_but_not_shown(group: click.Group, seen: list[Any]) -> None:
    assert invoke("one", "--kv-cache-dtype", "fp8_e4m3", group=group).exit_code == 0
    assert seen[0].kv_cache_dtype == "fp8"
    shown = invoke("one", "--help", group=group).stdout
    assert "[auto|fp8|int8]" in shown
    assert "e4m3]" not in shown


def test_a_bad_value_in_a_list_is_refused(group: click.Group) -> None:
    assert "'x' is not a valid integer" in invoke("many", "--max-num-seqs", "1,x", group=group).stderr
    assert "multiple of 8" in invoke("many", "--block-size", "8,9", group=group).stderr
    assert "put it before the options" in invoke("many", "--enable-prefix-caching", "folder", group=group).stderr


def test_errors_are_one_line_and_no_traceback(group: click.Group) -> None:
    result = invoke("fail", "plainly", group=group)
    assert result.exit_code == 2
    assert result.stderr == "spill: there is no such thing; try another\n"
    assert result.stdout == ""
    assert invoke("fail", "interrupt", group=group).exit_code == 130
    assert invoke("one", "--block-size", "9", group=group).stderr.count("\n") == 1


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"spill {command}" in result.stdout.split("Example")[1]


def test_version() -> None:
    assert invoke("--version").stdout.startswith("spill, version 0.")


def test_help_imports_nothing_heavy() -> None:
    """`spill --help` answers at once: slow imports are left to the commands that need them."""
    code = ("import sys; from spillover.cli.main import main; "
            "print([name for name in ('torch', 'numpy', 'rich', 'tokenizers') if name in sys.modules])")
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.perf_counter() - start < 5


def test_a_closed_pipe_is_quiet() -> None:
    code = "from spillover.cli.main import main; main(['bench', 'throughput', '--help'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
