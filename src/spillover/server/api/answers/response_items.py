"""The items of a response (a message, function calls) while its answer grows, and the events that report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spillover.server.api.tools import Delta
from spillover.server.schemas.schemas_chat import ChatMessage, FunctionCall, ToolCall

Event = tuple[str, dict[str, Any]]  # the event's type and its fields


class Items:
    """A writer of events for the new parts of an answer. `items` are complete after `end`."""

    def __init__(self, request_id: str, call_id: Callable[[], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._call_id = call_id
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []  # pieces of the open item's text or arguments

    def add(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if delta.content:
                if self._open is None or self._open["type"] != "message":
                    events += [*self._close("completed"), *self._open_message()]
                events.append(self._grow("response.output_text.delta", delta.content, content_index=0, logprobs=[]))
            if delta.name is not None:
                events += [*self._close("completed"), *self._open_call(delta.name)]
            if delta.arguments:
                events.append(self._grow("response.function_call_arguments.delta", delta.arguments))
        return events

    def end(self, status: str) -> list[Event]:
        """Complete the items. `status` is the status of the response; a response has at least one item."""
        opened = [] if self.items else self._open_message()
        return [*opened, *self._close(status)]

    def messages(self) -> list[ChatMessage]:
        """Return the items as chat messages, to continue the conversation."""
        return as_messages(self.items)

    def _open_message(self) -> list[Event]:
        self._begin({"type": "message", "id": self._name("msg"), "status": "in_progress", "role": "assistant",
                     "content": []})
        return [self._added(), ("response.content_part.added", self._place(content_index=0, part=_part("")))]

    def _open_call(self, name: str) -> list[Event]:
        self._begin({"type": "function_call", "id": self._name("fc"), "call_id": self._call_id(), "name": name,
                     "arguments": "", "status": "in_progress"})
        return [self._added()]

    def _begin(self, item: dict[str, Any]) -> None:
        self._open, self._parts = item, []
        self.items.append(item)

    def _added(self) -> Event:
        assert self._open is not None
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(self._open)}

    def _grow(self, kind: str, text: str, **more: Any) -> Event:
        self._parts.append(text)
        return kind, self._place(delta=text, **more)

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, place = "".join(self._parts), {"item_id": item["id"], "output_index": len(self.items) - 1}
        item["status"] = status
        if item["type"] == "message":
            item["content"] = [_part(text)]
            events: list[Event] = [
                ("response.output_text.done", place | {"content_index": 0, "text": text, "logprobs": []}),
                ("response.content_part.done", place | {"content_index": 0, "part": _part(text)})]
        else:
            item["arguments"] = text
            events = [("response.function_call_arguments.done", place | {"name": item["name"], "arguments": text})]
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _place(self, **more: Any) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1} | more

    def _name(self, kind: str) -> str:
        return f"{kind}_{self._request_id}" + (f"_{len(self.items)}" if self.items else "")


def as_messages(items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Return items (messages, calls, outputs) as chat messages; a call joins the assistant message before it."""
    messages: list[ChatMessage] = []
    for item in items:
        if item["type"] == "message":
            content = item["content"]
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            messages.append(ChatMessage(role=item["role"], content=text))
        elif item["type"] == "function_call":
            call = ToolCall(id=item["call_id"], function=FunctionCall(name=item["name"], arguments=item["arguments"]))
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant", content=""))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        else:
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
            messages.append(ChatMessage(role="tool", tool_call_id=item["call_id"], content=text))
    return messages


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
