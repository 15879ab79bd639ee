"""`--config FILE`: a command's flags from a JSON, TOML or YAML file. The command line has precedence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from spillover.errors import SpilloverError, did_you_mean

Command = TypeVar("Command", bound=Callable[..., Any])


def config_file_option(command: Command) -> Command:
    """Add `--config` to a command; it must be above the options that a file may set."""
    option = click.option("--config", is_eager=True, expose_value=False, metavar="FILE", callback=_use,
                          help="Flags from a .json, .toml or .yaml file, by their names; the command line wins.")
    return option(command)


def _use(ctx: click.Context, _param: click.Parameter, name: str | None) -> None:
    if name is None:
        return
    options = {_plain(text): param for param in ctx.command.params if isinstance(param, click.Option)
               for text in param.opts if text.startswith("--")}
    del options["config"]
    defaults: dict[str, Any] = {}
    for key, value in _read(Path(name).expanduser()).items():
        param = options.get(_plain(key))
        if param is None:
            raise SpilloverError(f"{name} sets '{key}', which is not a flag of this command"
                                 + did_you_mean(_plain(key), options))
        assert param.name is not None
        defaults[param.name] = _value(param, value, f"'{key}' in {name}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpilloverError(f"--config {file} cannot be read: {error}") from None
    try:
        value = _parse(text, file)
    except SpilloverError:
        raise
    except Exception as error:
        raise SpilloverError(f"--config {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SpilloverError(f"--config {file} must hold flags and their values, as in port: 9000")
    return value


def _parse(text: str, file: Path) -> Any:
    if file.suffix == ".json":
        return json.loads(text)
    if file.suffix == ".toml":
        return tomllib.loads(text)
    if file.suffix not in (".yaml", ".yml"):
        raise SpilloverError(f"--config takes a .json, .toml or .yaml file; got '{file}'")
    try:
        import yaml
    except ImportError:
        raise SpilloverError("a .yaml file needs PyYAML: pip install pyyaml, or write it as .toml or .json") from None
    return yaml.safe_load(text) or {}


def _value(param: click.Option, value: Any, where: str) -> Any:
    """Return a value as a default for click: a list for repeated options, text or a switch otherwise."""
    many = value if isinstance(value, list) else [value]
    if any(isinstance(one, dict | list) or one is None for one in many) or (isinstance(value, list)
                                                                            and not param.multiple):
        raise SpilloverError(f"{where} must be one value{' or a list of them' if param.multiple else ''}")
    if param.is_flag != isinstance(many[0] if many else param.is_flag, bool):
        raise SpilloverError(f"{where} must be {'true or false' if param.is_flag else 'a value, not true or false'}")
    made = many if param.is_flag else [str(one) for one in many]
    return made if param.multiple else made[0]


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
