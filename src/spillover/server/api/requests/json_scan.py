"""The shape of a JSON body, checked before it is parsed, at the speed of `bytes.count`. Knows nothing of its fields.

A body is looked at in chunks, as each call into C holds up every other thread until it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from spillover.server.api.errors import ApiError

MAX_DEPTH = 128
# Of the values a body may have, at most one in this many may be a field of an object, or an object or an array itself:
# these cost most to parse and to check.
VALUES_PER_FIELD = 8
VALUES_PER_CONTAINER = 32

_CHUNK_BYTES = 256 << 10
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass
class Shape:
    """What a body holds outside its strings. Of bytes that are not JSON the counts are upper bounds."""

    containers: int = 0  # objects and arrays
    fields: int = 0  # fields of all objects
    commas: int = 0
    depth: int = 0  # at the end of what has been looked at
    deepest: int = 0

    @property
    def values(self) -> int:
        return self.containers + self.commas + 1

    def count(self, outside: bytes) -> None:
        self.containers += outside.count(b"{") + outside.count(b"[")
        self.fields += outside.count(b":")
        self.commas += outside.count(b",")

    def follow(self, outside: bytes) -> None:
        """Follow the brackets; called once their number is known to be within limits."""
        steps = map(_STEP.__getitem__, outside.translate(None, _NOT_BRACKETS))
        depths = list(accumulate(steps, initial=self.depth))
        self.depth, self.deepest = depths[-1], max(self.deepest, max(depths))


def check_shape(body: bytes, max_values: int) -> Shape:
    """Return the shape of a body; raise ApiError for one of too many values or of too deep nesting.

    Whether it is JSON is for the parser to say.
    """
    shape, start, in_string = Shape(), 0, False
    while start < len(body):
        chunk = body[start:start + _CHUNK_BYTES]
        if chunk.endswith(b"\\") and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk = body[start:start + _CHUNK_BYTES + 1]  # with the character that the last backslash escapes
        start += len(chunk)
        if b"\\" in chunk:
            # A run of backslashes escapes from its left end on: pairs first, then what escapes a quote.
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
        raise ApiError(400, f"the body has at least {shape.values} JSON values; at most {max_values} are taken "
                            f"(--max-json-values)", code="too_many_values")
    for found, kind, share in ((shape.containers, "objects and arrays", VALUES_PER_CONTAINER),
                               (shape.fields, "fields", VALUES_PER_FIELD)):
        limit = max(1, max_values // share)
        if found > limit:
            raise ApiError(400, f"the body has at least {found} {kind}; at most {limit} are taken (1/{share} of "
                                f"--max-json-values)", code="too_many_values")
