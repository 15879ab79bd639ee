"""Sizes and rates as people write them."""

import re

from spillover.errors import SpilloverError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[_letter + "IB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power


def parse_bytes(text: str | int | float) -> int:
    """'8GB' -> 8_000_000_000, '8GiB' or '8G' -> 8 * 1024**3; a plain number is bytes."""
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise SpilloverError(f"'{text}' is not a size; write one like 8GB, 512MiB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seconds(text: str) -> float:
    """'90s', '15min', '12h', '7d'; a plain number is seconds."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h|d|)\s*", text)
    if match is None:
        raise SpilloverError(f"'{text}' is not a time; write one like 90s, 15min, 12h or 7d")
    return float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]]


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'; binary units throughout, as memory is counted."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_rate(per_second: float, unit: str) -> str:
    """2.5e10, 'B/s' -> '25.0 GB/s'; decimal units, as links and FLOPs are counted."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= factor:
            return f"{per_second / factor:.1f} {prefix}{unit}"
    return f"{per_second:.1f} {unit}"
