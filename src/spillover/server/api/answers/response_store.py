"""Stored responses that clients may refer to later: in memory, limited in bytes, least recently used evicted first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from spillover.server.schemas.schemas_chat import ChatMessage


@dataclass(frozen=True)
class StoredResponse:
    answer: bytes  # the response object, as JSON
    conversation: tuple[bytes, ...]  # all messages up to and including this answer, each as JSON, without instructions

    @property
    def nbytes(self) -> int:
        return len(self.answer) + sum(map(len, self.conversation))

    def messages(self) -> list[ChatMessage]:
        return [ChatMessage.model_validate_json(message) for message in self.conversation]


class ResponseStore:
    """Stored responses, keyed also by their owner: a response cannot be found with another API key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._stored: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    def put(self, owner: bytes, name: str, answer: bytes, messages: Sequence[ChatMessage]) -> None:
        conversation = tuple(message.model_dump_json(exclude_none=True).encode() for message in messages)
        stored = StoredResponse(answer, conversation)
        self._stored[owner, name] = stored
        self._nbytes += stored.nbytes
        while self._nbytes > self._max_bytes:
            self._nbytes -= self._stored.popitem(last=False)[1].nbytes

    def get(self, owner: bytes, name: str) -> StoredResponse | None:
        stored = self._stored.get((owner, name))
        if stored is not None:
            self._stored.move_to_end((owner, name))
        return stored

    def delete(self, owner: bytes, name: str) -> bool:
        stored = self._stored.pop((owner, name), None)
        self._nbytes -= stored.nbytes if stored is not None else 0
        return stored is not None


def owner_of(request: HttpRequest) -> bytes:
    return hashlib.sha256(request.headers.get("authorization", "").encode()).digest()
