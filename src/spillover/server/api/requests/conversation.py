"""Converts messages to a prompt: joins content parts, renders roles and tools as the chat template supports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from spillover.models.tokenizer import Tokenizer
from spillover.server.api import tools as tool_calls
from spillover.server.api.errors import ApiError
from spillover.server.front import Front
from spillover.server.schemas.schemas_chat import ChatMessage, ContentPart, ConversationFields, Tool

_RESERVED = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "self", "source")
_END = "\ue0fe\ue0ffend of the final message\ue0ff "  # appended to a message to be continued, and cut at


def prompt_ids(front: Front, body: ConversationFields, tools: Sequence[Tool] = ()) -> list[int]:
    literal = front.literal_text
    text = prompt_text(front.tokenizer, body, tools, literal.mark if literal is not None else None)
    front.check_length(text)
    encode = front.tokenizer.encode if literal is None else literal.encode
    return encode(text, body.add_special_tokens)


def prompt_text(tokenizer: Tokenizer, body: ConversationFields, tools: Sequence[Tool] = (),
                mark: Callable[[Any], Any] | None = None) -> str:
    """Render a conversation. `mark` is applied to everything the client wrote, before the template is rendered."""
    template = tokenizer.chat_template or ""
    knows_tools = tool_calls.knows_tools(template)
    messages = [_as_dict(message, template, knows_tools) for message in body.messages]
    if tools and not knows_tools:
        _describe_tools(messages, tool_calls.described(tools))
    options = dict(body.chat_template_kwargs or {})
    reserved = next((name for name in options if name in _RESERVED), None)
    if reserved is not None:
        raise ApiError(400, f"chat_template_kwargs cannot set '{reserved}'", "chat_template_kwargs")
    if body.continue_final_message and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise ApiError(400, "continue_final_message and add_generation_prompt contradict each other: give one of them",
                       "continue_final_message")
    if body.continue_final_message:
        messages[-1]["content"] += _END if messages[-1]["content"].strip() else ""
    described = [tool.model_dump(exclude_none=True) for tool in tools] if tools and knows_tools else None
    if mark is not None:
        messages = [mark(message) | {"role": message["role"]} for message in messages]
        described = mark(described)
    text = tokenizer.apply_chat_template(
        messages, tools=described,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message, **options)
    return _cut(text) if body.continue_final_message else text


def joined(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _as_dict(message: ChatMessage, template: str, knows_tools: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    made: dict[str, Any] = {"role": role, "content": joined(message.content)}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    calls = [{"type": "function", **({"id": call.id} if call.id else {}),
              "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
             for call in message.tool_calls or ()]
    if calls and knows_tools:
        made["tool_calls"] = calls
    elif calls:
        made["content"] = "\n".join(part for part in (made["content"], tool_calls.written_calls(calls)) if part)
    if role == "tool" and not knows_tools:
        made = {"role": "user", "content": f"<tool_response>\n{made['content']}\n</tool_response>"}
    return made


def _arguments(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments, as templates expect an object and write it as JSON themselves."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a tool call must be a JSON object, as text", "messages")
    return value


def _describe_tools(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})


def _cut(text: str) -> str:
    """Cut the prompt after the last message's text, so that the model continues it."""
    before, mark, after = text.rpartition(_END.strip())
    if not mark:
        raise ApiError(400, "continue_final_message needs a last message with text that the chat template keeps",
                       "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()  # a stripping template removes the mark's blank
