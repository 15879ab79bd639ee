"""Server-sent events: bytes in, the `data` of each whole event out. The only such parser of this project's clients."""

from __future__ import annotations

from collections.abc import AsyncIterator


class EventParser:
    """A parser fed as bytes come, however they are cut. Comments and fields other than `data` are left out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, piece: bytes) -> list[bytes]:
        buffer = self._buffer + piece if self._buffer else piece
        if b"\r" in buffer:
            # A lone CR at the end may be half of a line's end.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._buffer = buffer.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]

    def finish(self) -> None:
        """End the stream: an event that was not ended is an error, as it may be half of one."""
        if self._buffer.strip():
            raise ValueError(f"the stream ends in half an event: {self._buffer[-80:]!r}")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the `data` of each event of a body that comes in pieces."""
    parser = EventParser()
    async for piece in pieces:
        for data in parser.feed(piece):
            yield data
    parser.finish()


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip() if lines else None
