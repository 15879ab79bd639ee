"""Request bodies as bytes: JSON is parsed as by the standard library, anything else is rejected with a message."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.server.api.errors import ApiError
from spillover.server.api.requests.json_body import parse_json
from spillover.server.api.requests.json_scan import MAX_DEPTH

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                      | st.text(st.characters(codec="utf-8")),
                      lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner))


@given(VALUES, st.booleans())
def test_json_is_read(value: object, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary() | st.text('{}[]",:\\u0d8tNaInfy1e+-. ').map(str.encode))
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body)
    except ApiError:
        return
    assert json.loads(body) == value
    assert not isinstance(value, float) or math.isfinite(value)


def test_depth_counts_brackets_outside_strings_only() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse_json(b'"' + b"[" * 1000 + b'"') == "[" * 1000
    with pytest.raises(ApiError, match="nested"):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
