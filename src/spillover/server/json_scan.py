"""The shape of a JSON body, checked before it is parsed, at the speed of `bytes.count`. Knows nothing of its fields."""

from __future__ import annotations

from itertools import accumulate

from spillover.server.errors import ApiError

MAX_DEPTH = 128
# Of the values a body may have, at most one in this many may be a field of an object, or an object or an array itself:
# these cost most to parse and to check.
VALUES_PER_FIELD = 8
VALUES_PER_CONTAINER = 32

_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_shape(body: bytes, max_values: int) -> None:
    """Raise ApiError for a body of too many values or of too deep nesting; what is inside strings does not count.

    Whether it is JSON is for the parser to say: of other bytes the counts are upper bounds.
    """
    containers = body.count(b"{") + body.count(b"[")
    if containers <= MAX_DEPTH and len(body) <= max_values // VALUES_PER_CONTAINER:
        return
    if b"\\" in body:
        # A run of backslashes escapes from its left end on: pairs first, then what escapes a quote.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = body.count(b'"') // 2
    if strings > 2 * max_values:  # each is a value or the name of one
        raise _too_many(strings // 2, max_values)
    outside = b"".join(body.split(b'"')[::2])
    containers = outside.count(b"{") + outside.count(b"[")
    values = containers + outside.count(b",") + 1
    if values > max_values:
        raise _too_many(values, max_values)
    for found, kind, share in ((containers, "objects and arrays", VALUES_PER_CONTAINER),
                               (outside.count(b":"), "fields", VALUES_PER_FIELD)):
        limit = max(1, max_values // share)
        if found > limit:
            raise ApiError(400, f"the body has {found} {kind}; at most {limit} are taken (1/{share} of "
                                f"--max-json-values)", code="too_many_values")
    if containers > MAX_DEPTH:
        steps = map(_STEP.__getitem__, outside.translate(None, _NOT_BRACKETS))
        if max(accumulate(steps), default=0) > MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep", code="too_deep")


def _too_many(found: int, limit: int) -> ApiError:
    return ApiError(400, f"the body has at least {found} JSON values; at most {limit} are taken (--max-json-values)",
                    code="too_many_values")
