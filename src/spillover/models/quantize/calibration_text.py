"""Reading of calibration files: plain text, or JSON whose entries are texts or conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spillover.errors import SpilloverError, short_repr
from spillover.models.tokenizer import Tokenizer

LENGTH = 512  # tokens per sequence
LEAST_TOKENS = 128
MOST_BYTES = 1 << 30
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def read_tokens(file: Path, tokenizer: Tokenizer, wanted: int, max_position: int) -> Tensor:
    """Return the file's texts, concatenated, as sequences [n, length]: `wanted` tokens, or all if there are fewer."""
    ids: list[int] = []
    for text, special in _texts(file, tokenizer):
        ids += tokenizer.encode(text, add_special_tokens=special)
        if len(ids) >= wanted:
            break
    if len(ids) < LEAST_TOKENS:
        raise SpilloverError(f"{file} has only {len(ids)} tokens; calibration needs {LEAST_TOKENS} at least, and is "
                             f"better with {wanted:,}")
    length = min(LENGTH, max_position, len(ids))
    count = max(1, min(wanted, len(ids)) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def _texts(file: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether the tokenizer should add special tokens."""
    content = read_text(file)
    if file.suffix not in (".json", ".jsonl"):
        yield content, True
        return
    for place, entry in _entries(file, content):
        text = entry.get("text") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            yield text, True
            continue
        messages = _messages(entry)
        if messages is None:
            raise _no_text(file, place, entry)
        if tokenizer.chat_template is None:
            yield "\n".join(message["content"] for message in messages), True
        else:
            yield tokenizer.apply_chat_template(messages, add_generation_prompt=False), False


def conversations(file: Path) -> Iterator[list[dict[str, str]]]:
    """Yield each entry of a .json or .jsonl file as a conversation; a plain text becomes one user message."""
    for place, entry in _entries(file, read_text(file)):
        text = (entry.get("prompt") or entry.get("text")) if isinstance(entry, dict) else entry
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else _messages(entry)
        if messages is None:
            raise _no_text(file, place, entry)
        yield messages


def _no_text(file: Path, place: str, entry: object) -> SpilloverError:
    return SpilloverError(f"{file}, {place}: {short_repr(entry)} is no text; an entry is a string, an object with "
                          "'text', or one with 'messages' or 'conversations'")


def read_text(file: Path) -> str:
    """Return a file's text. Raises SpilloverError if it is missing, too large or not UTF-8."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise SpilloverError(f"{file} has more than {MOST_BYTES:,} bytes; a few megabytes of text are enough")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpilloverError(f"{file} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise SpilloverError(f"{file} is not text in UTF-8 ({error})") from error


def _entries(file: Path, content: str) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield f"line {number}", _parsed(line, f"{file}, line {number}")
        return
    entries = _parsed(content, str(file))
    if not isinstance(entries, list):
        raise SpilloverError(f"{file} does not hold a JSON list of texts")
    for number, entry in enumerate(entries, 1):
        yield f"entry {number}", entry


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpilloverError(f"{where} is not JSON ({error})") from error


def _messages(entry: object) -> list[dict[str, str]] | None:
    """Return messages for a chat template, from OpenAI's or ShareGPT's keys; None if it is not a conversation."""
    found = (entry.get("messages") or entry.get("conversations")) if isinstance(entry, dict) else None
    if not isinstance(found, list) or not found:
        return None
    messages = []
    for message in found:
        role, text = ((message.get("role") or message.get("from"), message.get("content") or message.get("value"))
                      if isinstance(message, dict) else (None, None))
        if not isinstance(role, str) or not isinstance(text, str):
            return None
        messages.append({"role": _ROLES.get(role, role), "content": text})
    return messages
