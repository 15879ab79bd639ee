"""Structured output: which tokens may come next so that the whole output fits a schema, regex, grammar or choice.

llguidance does the matching; here are its doors: compiling what a request asks for, and one matcher a sequence.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from spillover.engine.sampling_params import StructuredOutputs
from spillover.errors import RequestError
from spillover.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# llguidance compiles by recursion, and an exhausted stack ends the process. What these limits let through needs far
# less than the stack that _with_deep_stack gives.
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024  # a rule is a few bytes here, and each may lead to the next
MAX_REGEX_BYTES = 16 * 1024  # many optional parts take time that grows with their square
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_REFERENCES = 512
_STACK_BYTES = 128 * 1024 * 1024
_CACHED_GRAMMARS = 64

# Without a bound a model may write blanks for ever.
_JSON_BLANKS = r"[\x20\x0A\x0D\x09]{1,100}"


class Grammar:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], mask_words: int) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._mask_words = mask_words
        self._accepted = 0
        self._ends = 0  # end tokens after the matcher had stopped, which it does not count itself

    def fill_mask(self, row: Tensor) -> None:
        """row [ceil(V/32)] int32 on the host: a bit a token, set where it may come next.

        The end tokens are set only where the output would be complete. V is the model's, which may have fewer tokens
        than the tokenizer, or more.
        """
        words = np.zeros(self._mask_words, dtype=np.uint32)
        if not self.finished:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.finished:  # also where computing the mask ran into llguidance's limits
            words[:] = 0
            for token in self._eos:
                words[token // 32] |= np.uint32(1 << token % 32)
        shared = min(len(words), len(row))
        bits = row.numpy()
        bits[:shared] = words[:shared].view(np.int32)
        bits[shared:] = 0

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and unchanged, where the grammar does not allow it."""
        if self.finished:
            if token_id not in self._eos:
                return False
            self._ends += 1
        elif self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._accepted += 1
        return True

    @property
    def finished(self) -> bool:
        """Nothing but an end token can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """The output so far fits as a whole, though more may follow."""
        return bool(self._matcher.is_accepting())

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        if not 0 <= count <= self._accepted:
            raise ValueError(f"cannot take back {count} of {self._accepted} tokens")
        self._accepted -= count
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            self._matcher.rollback(count - ends)


class GrammarCompiler:
    """Compiles for one tokenizer; keeps the last grammars, since requests tend to share them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eos = frozenset(tokenizer.eos_token_ids)
        if not self._eos:
            raise RequestError("structured output needs a tokenizer with an end-of-sequence token")
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=list(tokenizer.eos_token_ids))
        self._mask_words = (self._tokenizer.vocab_size + 31) // 32
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        source = _source(outputs)
        with self._lock:
            matcher = self._compiled.pop(source, None) or _with_deep_stack(self._tokenizer, source)
            if matcher.is_error():
                raise _refusal(_kind(outputs), matcher.get_error())
            self._compiled[source] = matcher
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Grammar(matcher.deep_copy(), self._eos, self._mask_words)


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of every token, and text to tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids | set(tokenizer.eos_token_ids))
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _kind(outputs: StructuredOutputs) -> str:
    return next(name for name in ("json", "json_object", "regex", "grammar", "choice")
                if getattr(outputs, name) not in (None, False))


def _source(outputs: StructuredOutputs) -> str:
    """What llguidance compiles, as its own JSON text."""
    if outputs.json_object:
        return _grammar_of_schema({"type": "object"})
    if outputs.json is not None:
        return _grammar_of_schema(_checked_schema(outputs.json))
    if outputs.choice is not None:
        text = "|".join("".join(f"\\x{{{ord(letter):x}}}" for letter in choice) for choice in outputs.choice)
        _check_size("choice", "".join(outputs.choice), MAX_GRAMMAR_BYTES)
        return str(LLMatcher.grammar_from_regex(f"(?:{text})"))
    if outputs.regex is not None:
        _check_size("regex", outputs.regex, MAX_REGEX_BYTES)
        return str(LLMatcher.grammar_from_regex(outputs.regex))
    assert outputs.grammar is not None
    _check_size("grammar", outputs.grammar, MAX_GRAMMAR_BYTES)
    try:
        return str(llguidance.grammar_from("grammar", outputs.grammar))  # Lark or GBNF
    except ValueError as error:
        raise _refusal("grammar", str(error)) from error


def _grammar_of_schema(schema: object) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _JSON_BLANKS}))


def _checked_schema(schema: str | dict[str, object]) -> object:
    if isinstance(schema, str):
        _check_size("json", schema, MAX_SCHEMA_BYTES)
        try:
            parsed: object = json.loads(schema)
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            raise RequestError(f"structured_outputs.json is not valid JSON: {error}") from error
    else:
        parsed = schema
    if not isinstance(parsed, dict):
        raise RequestError("structured_outputs.json must be a JSON schema object")
    references = set()
    for depth, key, value in _walk(parsed):
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_deep()
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            references.add(value)
    if len(references) > MAX_SCHEMA_REFERENCES:
        raise RequestError(f"structured_outputs.json refers to {len(references)} definitions; at most "
                           f"{MAX_SCHEMA_REFERENCES} are allowed")
    try:
        _check_size("json", json.dumps(parsed), MAX_SCHEMA_BYTES)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}") from error
    return parsed


def _too_deep() -> RequestError:
    return RequestError(f"structured_outputs.json is nested more than {MAX_SCHEMA_DEPTH} deep; "
                        "move inner parts to $defs and refer to them with $ref")


def _walk(schema: dict[str, object]) -> Iterator[tuple[int, object, object]]:
    """Every (depth, key, value), without recursion."""
    stack: list[tuple[int, object]] = [(1, schema)]
    while stack:
        depth, node = stack.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in pairs:
            yield depth, key, value
            stack.append((depth + 1, value))


def _check_size(kind: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise RequestError(f"structured_outputs.{kind} has {len(text)} characters; at most {limit} are allowed")


def _with_deep_stack(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile on a thread whose stack is deep enough for all that the limits let through."""
    compiled: Future[LLMatcher] = Future()

    def work() -> None:
        try:
            compiled.set_result(LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False)))
        except BaseException as error:  # handed to the caller, who waits for it
            compiled.set_exception(error)

    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="spillover-grammar")
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    return compiled.result()


def _refusal(kind: str, message: str) -> RequestError:
    """The compiler's message, without its long quotes from the source."""
    lines = [line if len(line) <= 160 else line[:157] + "..." for line in message.strip().splitlines()[:8]]
    return RequestError(f"structured_outputs.{kind} does not compile: " + "\n".join(lines))
