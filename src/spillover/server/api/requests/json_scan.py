"""Checks the shape of a JSON body before parsing, at the speed of `bytes.count` and whatever its fields mean.

A body is scanned in chunks, as every call into C blocks all other threads until it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from spillover.server.api.errors import ApiError

MAX_DEPTH = 128
# The share of a body's values that may be fields of an object, or objects and arrays: at most one in this many, as
# these cost the most to parse and validate.
VALUES_PER_FIELD = 8
VALUES_PER_CONTAINER = 32

_CHUNK_BYTES = 256 << 10
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass
class Shape:
    """The structure of a body outside its strings. For bytes that are not JSON the counts are upper bounds."""

    containers: int = 0  # number of objects and arrays
    fields: int = 0  # number of fields of all objects
    commas: int = 0
    depth: int = 0  # nesting depth at the end of the scanned part
    deepest: int = 0

    @property
    def values(self) -> int:
        return self.containers + self.commas + 1

    def count(self, outside: bytes) -> None:
        self.containers += outside.count(b"{") + outside.count(b"[")
        self.fields += outside.count(b":")
        self.commas += outside.count(b",")

    def follow(self, outside: bytes) -> None:
        """Update the depth from the brackets; called once their number is known to be within limits."""
        steps = map(_STEP.__getitem__, outside.translate(None, _NOT_BRACKETS))
        depths = list(accumulate(steps, initial=self.depth))
        self.depth, self.deepest = depths[-1], max(self.deepest, max(depths))


def check_shape(body: bytes, max_values: int) -> Shape:
    """Return the shape of a body; raise ApiError if it has too many values or is nested too deeply.

    Whether it is valid JSON is checked by the parser.
    """
    shape, start, in_string = Shape(), 0, False
    while start < len(body):
        chunk = body[start:start + _CHUNK_BYTES]
        if chunk.endswith(b"\\") and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk = body[start:start + _CHUNK_BYTES + 1]  # include the character that the last backslash escapes
        start += len(chunk)
        if b"\\" in chunk:
            # A run of backslashes is read from the left: remove escaped backslashes first, then escaped quotes.
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = chunk.split(b'"')
        outside = b" ".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        shape.count(outside)
        _check(shape, max_values)
        shape.follow(outside)
        if shape.deepest > MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep", code="too_deep")
    return shape


def _check(shape: Shape, max_values: int) -> None:
    if shape.values > max_values:
        raise ApiError(400, f"the body has at least {shape.values} JSON values; at most {max_values} are allowed "
                            f"(--max-json-values)", code="too_many_values")
    for found, kind, share in ((shape.containers, "objects and arrays", VALUES_PER_CONTAINER),
                               (shape.fields, "fields", VALUES_PER_FIELD)):
        limit = max(1, max_values // share)
        if found > limit:
            raise ApiError(400, f"the body has at least {found} {kind}; at most {limit} are allowed (1/{share} of "
                                f"--max-json-values)", code="too_many_values")
