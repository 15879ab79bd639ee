"""Parsing and formatting of sizes, rates and times as users write them."""

import re

from spillover.errors import SpilloverError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[_letter + "IB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power


UNITS_HELP = "GB is 1000**3 bytes, GiB or G 1024**3"
_LEAST = 4096  # bytes; a budget below this without a unit is refused: the unit was probably forgotten


def parse_bytes(text: str | int | float, flag: str = "") -> int:
    """Parse a size: '8GB' -> 8_000_000_000, '8GiB' or '8G' -> 8 * 1024**3; a plain number is bytes."""
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        given = f"{flag} '{text}'".strip()
        raise SpilloverError(f"{given} is not a size; write one like 8GB, 512MiB or 1073741824 ({UNITS_HELP})")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_budget(text: str, flag: str, whole: int | None = None) -> int:
    """Return a size, or a share ('90%') of a tier of `whole` bytes; without `whole`, a share is only checked: 0."""
    share = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise SpilloverError(f"{flag} {text} is no share of a tier; write more than 0% and at most 100%")
        return int((whole or 0) * float(share[1]) / 100)
    size = parse_bytes(text, flag)
    if size <= 0 and not re.search(r"[1-9]", text):
        raise SpilloverError(f"{flag} must be above 0; got '{text}'")
    if size < _LEAST and re.fullmatch(r"[\s0-9.]*", text):
        typed = text.strip()
        share_of = f"{100 * float(typed):g}%" if 0 < float(typed) <= 1 else "90%"
        raise SpilloverError(f"{flag} {typed} is read as {typed} bytes; for a share of the tier write {share_of}, for "
                             f"a size 8GB or 512MiB ({UNITS_HELP})")
    return size


def parse_seconds(text: str) -> float:
    """Parse a time: '90s', '15min', '12h', '7d'; a plain number is seconds."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h|d|)\s*", text)
    if match is None:
        raise SpilloverError(f"'{text}' is not a time; write one like 90s, 15min, 12h or 7d")
    return float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]]


def format_bytes(count: float) -> str:
    """Format a size: 1536 -> '1.5 KiB'; binary units throughout, as is usual for memory."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_rate(per_second: float, unit: str) -> str:
    """Format a rate: 2.5e10, 'B/s' -> '25.0 GB/s'; decimal units, as is usual for links and FLOPs."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= factor:
            return f"{per_second / factor:.1f} {prefix}{unit}"
    return f"{per_second:.1f} {unit}"
