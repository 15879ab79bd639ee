"""Converts a request's body to the keys of its prompt's blocks: the servers' token ids with the same digests, or,
without a known tokenizer, chunks of the text as sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spillover.cluster.fleet import Keys, Prompt
from spillover.cluster.segments import SegmentEncoder
from spillover.memory.kv.digest import TOKEN_BYTES, block_digest, packed, root_digest
from spillover.memory.kv.event_wire import block_hash
from spillover.models.literal_text import LiteralText
from spillover.models.tokenizer import Tokenizer
from spillover.server.api.requests.conversation import prompt_text
from spillover.server.api.tools import tool_use
from spillover.server.schemas.schemas_chat import ChatRequest

log = logging.getLogger("spillover.router")

TEXT = "text"  # the key space of servers whose tokenizer is not known
CHUNK = 64  # bytes of text that count as one block
CHUNK_TOKENS = 16  # approximate number of tokens in such a chunk
_OF_ANSWERS = ("n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens", "stop",
               "stream_options", "max_tokens", "response_format", "structured_outputs", "store")


@dataclass(frozen=True)
class TokenSpace:
    """The way in which servers of one model name their blocks."""

    identity: bytes
    block_size: int
    tokenizer: Tokenizer | None  # None if the servers have none, and prompts are token ids
    literal: LiteralText | None = None  # encoder if messages may not hold special tokens
    segments: SegmentEncoder | None = None  # encoder of other conversations

    def keys(self, tokens: Sequence[int], salt: str | None) -> Keys:
        return Keys(chain(packed(tokens), self.block_size * TOKEN_BYTES, root_digest(self.identity, salt)),
                    self.block_size)


def chain(data: bytes, width: int, digest: bytes) -> list[int]:
    """Return the key of each full block of `data`, whose chain starts at the root `digest`."""
    keys = []
    for end in range(width, len(data) + 1, width):
        digest = block_digest(digest, data[end - width:end])
        keys.append(block_hash(digest))
    return keys


def read_prompt(path: str, body: bytes, session: str | None, spaces: Mapping[str, TokenSpace | None]) -> Prompt:
    """Return what is known of a request. Of one that no server would accept only the size is known: the server reports
    what is wrong with it."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return Prompt(len(body) // 4, session=session)
    salt, model = _text(value.get("cache_salt")), _text(value.get("model"))
    output = value.get("max_completion_tokens", value.get("max_tokens"))
    keys: dict[str, Keys] = {}
    tokens = None
    for name, space in spaces.items():
        try:
            if space is None:
                keys[name] = _text_keys(value, salt)
            elif (ids := _token_ids(path, value, space)) is not None:
                tokens, keys[name] = len(ids), space.keys(ids, salt)
        except Exception as error:  # the server reports what is wrong with the request
            log.debug("a prompt cannot be read: %s", error)
    if tokens is None:
        tokens = next((len(each.keys) * CHUNK_TOKENS for each in keys.values()), len(body) // 4)
    return Prompt(tokens, keys, session or _text(value.get("prompt_cache_key")), model,
                  output if isinstance(output, int) and output > 0 else None)


def prompt_only(body: bytes) -> bytes | None:
    """Return a request that computes the same prompt and one token; None if the body cannot be read."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for name in _OF_ANSWERS:
        value.pop(name, None)
    length = "max_completion_tokens" if "max_completion_tokens" in value else (
        "max_output_tokens" if "input" in value else "max_tokens")
    return msgspec.json.encode({**value, length: 1, "stream": False})


def awaiting_kv(body: bytes) -> bytes:
    """Return the request with a flag that its prompt's KV is being stored where the server finds it."""
    value = msgspec.json.decode(body)
    return msgspec.json.encode({**value, "kv_transfer_params": {"do_remote_prefill": True}})


def _token_ids(path: str, value: Mapping[str, Any], space: TokenSpace) -> Sequence[int] | None:
    """Return the prompt's tokens as the server will make them; None if they cannot be derived."""
    if path.endswith("/chat/completions"):
        return _conversation(value, space)
    prompt = value.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts go to one server, chosen by the first
    if isinstance(prompt, str) and space.tokenizer is not None:
        prompt = space.tokenizer.encode(prompt, value.get("add_special_tokens") is not False)
    if not isinstance(prompt, list):
        return None
    cut = value.get("truncate_prompt_tokens")
    return prompt[-cut:] if isinstance(cut, int) and cut > 0 else prompt


def _conversation(value: Mapping[str, Any], space: TokenSpace) -> Sequence[int] | None:
    tokenizer, literal = space.tokenizer, space.literal
    if tokenizer is None:
        return None
    body = ChatRequest.model_validate(value)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer.chat_template or "")
    text = prompt_text(tokenizer, body, use.tools if use is not None else (),
                       literal.mark if literal is not None else None)
    if literal is None and space.segments is not None and not body.add_special_tokens:
        return space.segments.encode(text)
    encode: Callable[[str, bool], list[int]] = tokenizer.encode if literal is None else literal.encode
    return encode(text, body.add_special_tokens)


def _text_keys(value: Mapping[str, Any], salt: str | None) -> Keys:
    """Return keys of the fields that make up the prompt, in the order in which templates write them."""
    prompt = value.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        data, width = msgspec.msgpack.encode(prompt), CHUNK
    else:
        parts = [value.get("tools"), value.get("instructions"), prompt, value.get("input"), *_listed(value, "messages")]
        data, width = b"\0".join(msgspec.json.encode(part) for part in parts if part is not None), CHUNK
    return Keys(chain(data, width, root_digest(TEXT.encode(), salt)), CHUNK_TOKENS)


def _listed(value: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else ()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
