"""The engine's log probabilities in the formats of legacy completions, chat, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spillover.engine.output.outputs import Logprob, PositionLogprobs
from spillover.server.api.answers.token_text import TextOffsets, TokenTexts

LOWEST = -9999.0  # the value sent for minus infinity, which JSON cannot express

Row = PositionLogprobs | None


def legacy_logprobs(texts: TokenTexts, offsets: TextOffsets, tokens: Sequence[int], rows: Sequence[Row], top: int,
                    as_ids: bool = False) -> dict[str, Any]:
    """Return legacy log probabilities. `rows`: one per token; None for a prompt's first, which nothing predicts."""
    return {
        "tokens": [texts.name(token, as_ids) for token in tokens],
        "token_logprobs": [None if row is None else _finite(row[token])
                           for token, row in zip(tokens, rows, strict=True)],
        "top_logprobs": [None if row is None else _by_name(texts, row, token, top, as_ids)
                         for token, row in zip(tokens, rows, strict=True)] if top else None,
        "text_offset": offsets.take(tokens),
    }


def chat_logprobs(texts: TokenTexts, tokens: Sequence[int], rows: Sequence[PositionLogprobs], top: int,
                  as_ids: bool = False) -> dict[str, Any]:
    return {
        "content": [_entry(texts, token, row[token], as_ids) | {
            "top_logprobs": [_entry(texts, other, value, as_ids) for other, value in _ranked(row)[:top]]}
                    for token, row in zip(tokens, rows, strict=True)],
        "refusal": None,
    }


def prompt_rows(texts: TokenTexts, rows: Sequence[Row], as_ids: bool = False) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: by token id, with rank and text."""
    return [None if row is None else
            {str(token): {"logprob": _finite(value), "rank": value.rank, "decoded_token": texts.name(token, as_ids)}
             for token, value in row.items()} for row in rows]


def _by_name(texts: TokenTexts, row: PositionLogprobs, chosen: int, top: int, as_ids: bool) -> dict[str, float]:
    """Return the `top` likeliest tokens, and the chosen one even if it is not among them."""
    named: dict[str, float] = {}
    for token, value in row.items():
        if token != chosen and (value.rank or 0) > top:
            continue
        name = texts.name(token, as_ids)
        named[name] = max(named.get(name, LOWEST), _finite(value))  # of two tokens with the same text, the likelier
    return named


def _ranked(row: PositionLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda item: item[1].rank or 0)


def _entry(texts: TokenTexts, token: int, value: Logprob, as_ids: bool) -> dict[str, Any]:
    return {"token": texts.name(token, as_ids), "logprob": _finite(value), "bytes": list(texts.raw(token))}


def _finite(value: Logprob) -> float:
    return max(value.logprob, LOWEST)
