"""Server-sent events: turns bytes into the `data` of each whole event. All clients in this project use this parser."""

from __future__ import annotations

from collections.abc import AsyncIterator


class EventParser:
    """An incremental parser of bytes in chunks of any size. Comments and fields other than `data` are skipped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        buffer = self._buffer + chunk if self._buffer else chunk
        if b"\r" in buffer:
            # A lone CR at the end may be the first half of a line end.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._buffer = buffer.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]

    def finish(self) -> None:
        """End the stream; raise ValueError if it ends within an event."""
        if self._buffer.strip():
            raise ValueError(f"the stream ends in half an event: {self._buffer[-80:]!r}")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the `data` of each event of a body that arrives in chunks."""
    parser = EventParser()
    async for chunk in chunks:
        for data in parser.feed(chunk):
            yield data
    parser.finish()


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip() if lines else None
