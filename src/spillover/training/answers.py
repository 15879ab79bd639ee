"""Training data of draft models: the model's own answers, and its most likely tokens at each of their positions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spillover.engine.llm import LLM
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.errors import SpilloverError
from spillover.models.quantize.calibration_text import conversations, read_text

TOP = 64  # number of most likely tokens stored per position
TEMPERATURE = 0.7  # temperature of every second answer; the others are greedy
BATCH_FACTOR = 2  # requests passed to the engine in one call, as a multiple of max_num_seqs

Show = Callable[[int, int], None]

_TOPICS = ("everyday life", "history", "physics", "biology", "cooking", "travel", "programming in Python", "databases",
           "mathematics", "economics", "music", "sport", "a short story", "a letter", "health", "gardening", "law",
           "geography", "language learning", "film", "astronomy", "chemistry", "school", "work", "family", "weather")
_TEMPLATES = ("Write one question that somebody might ask an assistant about {}. Write the question only.",
              "Write one instruction for an assistant that has to do with {}. Write the instruction only.",
              "Write the first sentence of a text about {}.")


@dataclass(frozen=True)
class Answers:
    """Concatenated sequences of prompt and answer, and the most likely tokens at each answer token's position."""

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]  # number of tokens of each sequence
    prompts: npt.NDArray[np.int32]  # number of prompt tokens of each sequence
    top_ids: npt.NDArray[np.int32]  # [answer tokens, TOP]
    top_logprobs: npt.NDArray[np.float16]

    def save(self, file: Path) -> None:
        """Write the file atomically."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npz")
        np.savez(part, **{name: getattr(self, name) for name in self.__dataclass_fields__})
        os.replace(part, file)

    @classmethod
    def load(cls, file: Path) -> Answers:
        try:
            with np.load(file) as stored:
                return cls(**{name: stored[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError) as error:
            raise SpilloverError(f"{file} cannot be read ({error}); remove it, or leave --resume out") from error


def read_prompts(file: Path, llm: LLM, longest: int) -> list[list[int]]:
    """Return the prompts of a file, in tokens: each line of a text, or each entry of a .json or .jsonl file (a string,
    an object with 'text' or 'prompt', or a conversation, of which the first user message is used)."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    found = []
    if file.suffix in (".json", ".jsonl"):
        texts = [next((message["content"] for message in messages if message["role"] == "user"),
                      messages[0]["content"]) for messages in conversations(file)]
    else:
        texts = [line.strip() for line in read_text(file).splitlines()]
    for text in texts:
        if text:
            found.append(_encode_prompt(llm, " ".join(text.split())[:8 * longest]))
    usable = [prompt for prompt in found if 0 < len(prompt) <= longest]
    if not usable:
        raise SpilloverError(f"{file} has no prompt of up to {longest} tokens; give one prompt a line")
    return usable


def generate_prompts(llm: LLM, count: int, longest: int, seed: int, show: Show) -> list[list[int]]:
    """Generate prompts with the model itself."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    requests = [_encode_prompt(llm, template.format(topic)) for template in _TEMPLATES for topic in _TOPICS]
    params = [SamplingParams(temperature=1.0, max_tokens=48, seed=seed + index) for index in range(count)]
    found = _generate(llm, [requests[index % len(requests)] for index in range(count)], params, show)
    texts = [tokenizer.decode(tokens).strip().partition("\n")[0] for tokens in found]
    prompts = [_encode_prompt(llm, text) for text in texts if text]
    return [prompt for prompt in prompts if len(prompt) <= longest] or requests


def answer(llm: LLM, prompts: Sequence[Sequence[int]], count: int, longest: int, seed: int, show: Show) -> Answers:
    """Generate `count` answers, greedily and sampled in turn, and score the most likely tokens at every position."""
    repeated = [list(prompts[index // 2 % len(prompts)]) for index in range(count)]
    params = [SamplingParams(temperature=TEMPERATURE if index % 2 else 0.0, max_tokens=longest, seed=seed + index)
              for index in range(count)]
    done = 2 * count  # each request is answered, then scored
    answers = _generate(llm, repeated, params, lambda part, _: show(part, done))
    pairs = [(prompt, tokens) for prompt, tokens in zip(repeated, answers, strict=True) if tokens]
    if not pairs:
        raise SpilloverError("the model's answer to every prompt was empty; give other prompts with --data")
    scores = _scores(llm, pairs, lambda part: show(count + part, done))
    return Answers(
        np.concatenate([np.array(prompt + tokens, dtype=np.int32) for prompt, tokens in pairs]),
        np.array([len(prompt) + len(tokens) for prompt, tokens in pairs], dtype=np.int32),
        np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
        np.concatenate([ids for ids, _ in scores]), np.concatenate([values for _, values in scores]))


def _encode_prompt(llm: LLM, text: str) -> list[int]:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams],
              show: Show) -> list[list[int]]:
    found: list[list[int]] = []
    at_once = BATCH_FACTOR * llm.plan.max_num_seqs
    for start in range(0, len(prompts), at_once):
        some = [{"prompt_token_ids": list(prompt)} for prompt in prompts[start:start + at_once]]
        outputs = llm.generate(some, list(params[start:start + at_once]), use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
        show(len(found), len(prompts))
    return found


def _scores(llm: LLM, pairs: Sequence[tuple[list[int], list[int]]], show: Callable[[int], None],
            ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]]:
    """Return the most likely tokens at each answer token, [tokens, TOP], of each pair, and their log probabilities."""
    found = []
    at_once = BATCH_FACTOR * llm.plan.max_num_seqs
    for start in range(0, len(pairs), at_once):
        some = pairs[start:start + at_once]
        indices: dict[tuple[int, ...], list[int]] = {}
        for index, (prompt, tokens) in enumerate(some):
            indices.setdefault(tuple(prompt + tokens), []).append(index)
        rows = [(np.zeros((len(tokens), TOP), np.int32), np.full((len(tokens), TOP), -np.inf, np.float16))
                for _, tokens in some]

        def observe(prompt: Sequence[int], position: int, logits: Tensor, indices: dict[tuple[int, ...], list[int]]
                    = indices, some: Sequence[tuple[list[int], list[int]]] = some, rows: list[tuple[
                        npt.NDArray[np.int32], npt.NDArray[np.float16]]] = rows) -> None:
            values, ids = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
            for index in indices[tuple(prompt)]:
                first = position - len(some[index][0])  # index in the answer; negative for rows of the prompt
                skip = max(0, -first)
                part = slice(first + skip, first + len(ids))
                rows[index][0][part, :ids.shape[1]] = ids[skip:].cpu().numpy()
                rows[index][1][part, :ids.shape[1]] = values[skip:].cpu().numpy()

        llm.observe_prompt_logits(observe)
        try:
            llm.generate([{"prompt_token_ids": prompt + tokens} for prompt, tokens in some],
                         [SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=len(prompt))
                          for prompt, _ in some], use_tqdm=False)
        finally:
            llm.observe_prompt_logits(None)
        found += rows
        show(start + len(some))
    return found


def write_settings(file: Path, settings: dict[str, object]) -> None:
    """Write the settings of a training run to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")
