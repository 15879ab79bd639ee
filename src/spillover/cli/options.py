"""The engine's flags as command-line options, made from `EngineConfig` so that no flag is defined twice."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from spillover.engine.config import EngineConfig
from spillover.errors import SpilloverError, did_you_mean

Command = TypeVar("Command", bound=Callable[..., Any])

_TYPES: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


class NearestChoice(click.Choice[str]):
    """A choice whose error message suggests the closest value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r} is not one of {', '.join(self.choices)}{did_you_mean(str(value), self.choices)}"


_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


# One process serves one model on one device in one type: these cannot be swept.
NOT_SWEPT = {"skip_tokenizer_init", "load_format", "dtype", "device", "seed"}


# Receives the engine's flags and the command's own options, and may set flags before they are checked.
Complete = Callable[[dict[str, Any], dict[str, Any]], None]


def engine_options(positional: bool = True, defaults: Mapping[str, Any] | None = None,
                   complete: Complete | None = None) -> Callable[[Command], Command]:
    """Add every engine flag to a command; it receives them as `config: EngineConfig`."""
    return _engine_options(positional, defaults or {}, sweep=False, complete=complete)


def engine_sweep_options(defaults: Mapping[str, Any] | None = None) -> Callable[[Command], Command]:
    """Add flags as `engine_options` does, which may be comma-separated lists; the command receives `configs`."""
    return _engine_options(True, defaults or {}, sweep=True)


def comma_list(item: click.ParamType[Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return an option's callback: `16` or `8,16,32` becomes a tuple, each part checked as by `item`."""

    def split(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        if value is None:
            return None
        return tuple(item.convert(part.strip(), param, ctx) for part in value.split(","))

    return split


def _switch_list(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[bool, ...] | None:
    if value is None:
        return None
    parts = value.lower().split(",")
    if not all(part in _SWITCH for part in parts):
        raise SpilloverError(f"{param.opts[0]} takes nothing, on, off or a list like off,on; got '{value}' "
                             f"(if that is the model, put it before the options or use --model)")
    return tuple(_SWITCH[part] for part in parts)


def _engine_options(positional: bool, defaults: Mapping[str, Any], sweep: bool,
                    complete: Complete | None = None) -> Callable[[Command], Command]:
    fields = [item for item in dataclasses.fields(EngineConfig) if item.name != "model"]
    hints = get_type_hints(EngineConfig)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_config(**given: Any) -> Any:
            flags: dict[str, Any] = {}
            for item in fields:
                value = _switch(given, item.name, sweep) if hints[item.name] is bool else given.pop(item.name)
                flags[item.name] = defaults.get(item.name, item.default) if value in (None, ()) else value
            flags["model"] = _model(given.pop("model", None), given.pop("model_argument", None))
            if complete is not None:
                complete(flags, given)
            if not sweep:
                return command(config=EngineConfig.from_flags(**flags), **given)
            # An option that may be repeated is one point of the sweep, not an axis of it.
            axes = [[(name, one) for one in (value if isinstance(value, tuple) and not _repeatable(hints[name])
                                             else (value,))] for name, value in flags.items()]
            configs = [EngineConfig.from_flags(**dict(point)) for point in itertools.product(*axes)]
            return command(configs=configs, **given)

        wrapped: Any = with_config
        for item in reversed(fields):
            for option in reversed(_options(item, hints[item.name], defaults, sweep)):
                wrapped = option(wrapped)
        model_help = EngineConfig.__dataclass_fields__["model"].metadata["help"]
        wrapped = click.option("--model", "model", default=None, metavar="MODEL",
                               help=model_help + " Default: SmolLM2-135M-Instruct.")(wrapped)
        if positional:
            wrapped = click.argument("model_argument", metavar="[MODEL]", required=False)(wrapped)
        decorated: Command = wrapped
        return decorated

    return decorate


def _options(item: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, Any],
             sweep: bool) -> list[Callable[[Any], Any]]:
    option = "--" + item.name.replace("_", "-")
    default = defaults.get(item.name, item.default)
    sweep = sweep and item.name not in NOT_SWEPT
    text, choices = item.metadata["help"], item.metadata["choices"]
    # The default is None on the command line, so that "not given" differs from "given as its default".
    if hint is bool:
        off = "--no-" + option[2:]
        text += f"  [default: {'on' if default else 'off'}]"
        if not sweep:
            return [click.option(f"{option}/{off}", item.name, default=None, multiple=True, is_flag=True, help=text)]
        return [click.option(option, item.name, is_flag=False, flag_value="on", default=None, callback=_switch_list,
                             metavar="[on|off,...]", help=text),
                click.option(off, f"no_{item.name}", is_flag=True, help=f"The same as {option}=off.")]
    if _repeatable(hint):
        return [click.option(option, item.name, multiple=True, help=text)]
    kind = NearestChoice((*choices, *item.metadata["aliases"])) if choices else _TYPES[_plain(hint)]
    if default is not None:
        text += f"  [default: {default}]"
    shown = f"[{'|'.join(choices)}]" if choices else None  # without the aliases
    if sweep and (choices or _plain(hint) is not str):
        shown = (shown or _plain(hint).__name__.upper()) + ",..."
        return [click.option(option, item.name, callback=comma_list(kind), metavar=shown, default=None, help=text)]
    return [click.option(option, item.name, type=kind, default=None, metavar=shown, help=text)]


def _switch(given: dict[str, Any], name: str, sweep: bool) -> Any:
    """Return the parsed value of a switch, None if it was not given; refuse it if it was given both ways."""
    sweep = sweep and name not in NOT_SWEPT
    value, off = given.pop(name), sweep and given.pop(f"no_{name}")
    if (not sweep and len(set(value)) > 1) or (off and value is not None):
        option = name.replace("_", "-")
        raise SpilloverError(f"--{option} and --no-{option} contradict each other: give one of them")
    if sweep:
        return (False,) if off else value
    return value[0] if value else None


def _model(option: str | None, argument: str | None) -> str | None:
    source = click.get_current_context(silent=True)
    if source is not None and source.get_parameter_source("model") is click.core.ParameterSource.DEFAULT_MAP:
        option = None if argument is not None else option  # from a file; the command line overrides it
    if option is not None and argument is not None:
        raise SpilloverError(f"the model was given twice, as '{argument}' and as --model {option}: give it once")
    return option if option is not None else argument


def _repeatable(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _plain(hint: Any) -> type:
    """Return the type without None: int | None -> int."""
    if isinstance(hint, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    plain: type = hint
    return plain
