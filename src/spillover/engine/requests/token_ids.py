"""Token ids as an array of int32, so that even long prompts are copied, sent and compared fast."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # which takes no parameter before Python 3.12


def token_array(tokens: Sequence[SupportsIndex]) -> TokenIds:
    """Return integers of any type as an array; struct.error if one is not an integer or does not fit into 32 bits."""
    return array("i", struct.pack(f"{len(tokens)}i", *tokens))


def to_bytes(value: object) -> bytes:
    """Write token ids into a message: msgspec's enc_hook."""
    if not isinstance(value, array):
        raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")
    return value.tobytes()


def from_bytes(kind: type, value: Any) -> Any:
    """Read token ids from a message: msgspec's dec_hook, which is called for every type that msgspec does not know."""
    return array("i", value) if kind is array else value
