"""The way from a step's hidden states to its result: sampler inputs, prompt log probabilities, tokens on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spillover.engine.batch.request_table import RequestTable
from spillover.engine.batch.sampler import (
    RowState,
    SampledLogprobs,
    SamplingBatch,
    build_sampling_batch,
    prompt_logprobs,
    to_position_logprobs,
)
from spillover.engine.speculation.drafters.simulated import num_accepted
from spillover.engine.step import NewRequest, Step, StepItem, StepResult, scored_positions
from spillover.models.layers import Decoder
from spillover.models.weights import Weights

# Called with (prompt, position, logits): the logits [P, V] that predict the prompt's tokens from `position` on.
PromptObserver = Callable[[Sequence[int], int, Tensor], None]

PROMPT_LOGITS_ROWS = 64  # rows of prompt logits computed at a time, to bound memory: a row has the whole vocabulary


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step for which log probabilities of the next tokens, known from the prompt, are wanted."""

    item: int  # index into the step's items
    first_row: int
    next_token_ids: list[int]  # the prompt token that follows each row
    next_ids: Tensor  # the same on the device, [P]
    alternatives: int
    prompt: Sequence[int]
    first_position: int  # position of the prompt token that follows the first row


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for the copy."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def sampling_batch(items: Sequence[StepItem], table: RequestTable, vocab_size: int,
                   device: torch.device) -> SamplingBatch:
    """Return the sampler's inputs for all sampled rows of these items."""
    states = []
    for item in items:
        row = table[item.id]
        request, params = row.request, row.request.params
        masks = step_masks(item, vocab_size)
        output: Sequence[int] = row.token_ids[request.num_prompt:] if params.needs_history else []
        for sample in range(item.num_samples):
            states.append(RowState(
                params=params,
                seed=request.seed,
                step=item.end - item.num_samples + sample + 1 - request.num_prompt,
                prompt_token_ids=request.token_ids[:request.num_prompt] if params.needs_history else (),
                output_token_ids=[*output, *item.draft[:sample]] if item.draft else output,
                mask=None if masks is None else masks[sample],
                stop_ids=request.stop_ids,
            ))
    return build_sampling_batch(states, vocab_size, device)


def step_masks(item: StepItem, vocab_size: int) -> Tensor | None:
    """Return the item's masks as [samples, ceil(V / 32)] int32; V may be less or more than the tokenizer's size."""
    if not item.mask:
        return None
    given = np.frombuffer(item.mask, dtype=np.int32).reshape(item.num_samples, -1)
    words = np.zeros((item.num_samples, (vocab_size + 31) // 32), dtype=np.int32)
    shared = min(words.shape[1], given.shape[1])
    words[:, :shared] = given[:, :shared]
    return torch.from_numpy(words)


def prompt_rows(step: Step, table: RequestTable, device: torch.device) -> tuple[PromptRows, ...]:
    """Return the rows of items with `score_prompt`, one PromptRows per item."""
    found, first_row = [], 0
    for index, item in enumerate(step.items):
        if item.score_prompt:
            request = table[item.id].request
            scored = scored_positions(item, request)
            next_ids = list(request.token_ids[scored])
            ids = to_device(torch.tensor(next_ids, dtype=torch.int64), device)
            found.append(PromptRows(index, first_row + scored.start - 1 - item.start, next_ids, ids,
                                    request.params.prompt_logprobs or 0, request.token_ids[:request.num_prompt],
                                    scored.start))
        first_row += item.count
    return tuple(found)


def score(model: Decoder, weights: Weights, hidden: Tensor, rows: PromptRows,
          observe: PromptObserver | None = None) -> list[SampledLogprobs]:
    """Return the log probabilities of a prompt's tokens, computed in chunks of rows; nothing on ranks other than 0,
    which have only a part of the logits."""
    parts = []
    for start in range(0, len(rows.next_ids), PROMPT_LOGITS_ROWS):
        ids = rows.next_ids[start:start + PROMPT_LOGITS_ROWS]
        first = rows.first_row + start
        logits = model.logits(hidden[first:first + len(ids)], weights)
        if model.ranks.rank:
            continue
        parts.append(prompt_logprobs(logits, ids, rows.alternatives))
        if observe is not None:
            observe(rows.prompt, rows.first_position + start, logits)
    return parts


def decode_result(step: Step, table: RequestTable, drawn: list[int]) -> StepResult:
    """Make the result as `to_result` does, for a step that only decodes and returns no log probabilities."""
    count = len(drawn)
    result = StepResult([(token,) for token in drawn], [()] * count, [None] * count)
    table.end(step, result)
    return result


def to_result(step: Step, table: RequestTable, drawn: list[int], logprobs: SampledLogprobs | None,
              prompts: Sequence[PromptRows], scored: Sequence[Sequence[SampledLogprobs]],
              decode: Callable[[int], str] | None, drafts: Mapping[int, Sequence[int]] | None = None) -> StepResult:
    """Make the result from the sampled rows, and append its tokens to the table. `drafts`: by request id, the draft
    tokens that only the device knew when the step was made."""
    count = len(step.items)
    result = StepResult([()] * count, [()] * count, [None] * count)
    host = logprobs.host_rows() if logprobs is not None else None
    first = 0
    for index, item in enumerate(step.items):
        if not item.num_samples:
            continue
        draft = drafts[item.id] if drafts is not None and item.draft_on_device else None
        tokens = accepted(item, drawn[first:first + item.num_samples], table[item.id].request, table.simulated, draft)
        result.token_ids[index] = tokens
        wanted = table[item.id].request.params.logprobs
        if wanted is not None and host is not None:
            result.logprobs[index] = tuple(to_position_logprobs(host[first + i], token, wanted, decode)
                                           for i, token in enumerate(tokens))
        first += item.num_samples
    for rows, parts in zip(prompts, scored, strict=True):
        found = [row for part in parts for row in part.host_rows()]
        result.prompt_logprobs[rows.item] = [
            to_position_logprobs(row, token, rows.alternatives, decode)
            for row, token in zip(found, rows.next_token_ids, strict=True)
        ]
    table.end(step, result)
    return result


def accepted(item: StepItem, drawn: Sequence[int], request: NewRequest, simulated: Sequence[float] = (),
             draft: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the accepted draft tokens, which the model sampled as well, and the token that it sampled after them.
    `simulated`: by position, the share of drafts that count as accepted whatever was sampled; `draft`: the draft's
    tokens, if the item has only ON_DEVICE for them."""
    if simulated and item.draft:
        return tuple(drawn[:1 + num_accepted(simulated, request.seed, item.start, len(item.draft))])
    draft, same = item.draft if draft is None else draft, 0
    while same < len(item.draft) and drawn[same] == draft[same]:
        same += 1
    return tuple(drawn[:same + 1])
