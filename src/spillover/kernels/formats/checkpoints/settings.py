"""The quantisation settings of a checkpoint, read one by one; errors name the setting that is not supported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spillover.errors import CheckpointError, short_repr

MOST_GROUP = 1 << 20  # maximum columns of a group; no row is longer


class Settings:
    """A section of config.json."""

    def __init__(self, method: str, values: Mapping[str, Any], file: str = "config.json") -> None:
        self.method = method
        self.values = values
        self._file = file

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that has one; None if none has."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def unsupported(self, key: str, value: object, supported: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {self.method} weights with {key} {short_repr(value)} are not supported, "
                               f"only {supported}; use another quantisation of the model, or the unquantised one")

    def one_of(self, keys: str | Sequence[str], allowed: Sequence[Any], default: Any = None) -> Any:
        """Return a setting that must have one of a few values. `keys`: its name, or a list of alternative names."""
        keys = [keys] if isinstance(keys, str) else keys
        value = self.get(*keys)
        value = default if value is None else value
        if any(type(value) is type(each) and value == each for each in allowed):
            return value
        raise self.unsupported(keys[0], value, " or ".join(map(str, allowed)))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.one_of(key, (True, False), default))

    def group(self, keys: Sequence[str], default: int) -> int:
        """Return the number of columns of a group; 0: all of a row, which files write as -1."""
        value = self.get(*keys)
        value = default if value is None else value
        if type(value) is not int or not (value == -1 or 0 < value <= MOST_GROUP):
            raise self.unsupported(keys[0], value, "-1 or a number of columns")
        return max(0, value)

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return a list of names or patterns; empty if there is none."""
        value = self.get(*keys)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.unsupported(keys[0], value, "a list of names")
        return tuple(value)

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.unsupported(key, value, "an object")
        return value or {}

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.unsupported(key, text, "regular expressions") from error


def is_head_or_router(name: str) -> bool:
    """Return whether a weight makes the logits of tokens or of experts."""
    return module_of(name).rsplit(".", 1)[-1] in ("lm_head", "gate", "router")


def module_of(name: str) -> str:
    """Return the module of a linear's tensor, as configurations name it."""
    return name.removesuffix(".weight")


def is_listed(module: str, names: Sequence[str]) -> bool:
    """Return whether a module is, is in, ends with or matches one of these names, as transformers reads such lists."""
    return any(module == name or module.startswith(f"{name}.") or module.endswith(name) or _matches(name, module)
               for name in names)


def _matches(name: str, module: str) -> bool:
    try:
        return re.match(name, module) is not None
    except (re.error, RecursionError, OverflowError):
        return False
