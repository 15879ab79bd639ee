"""The llguidance tokenizer of a vocabulary, and compilation of a grammar's source with it.

Both the engine and the process that tries out grammars (`grammar_process`) compile with this module, so that a trial's
verdict is valid for the engine. It imports neither torch nor the tokenizer, to keep the helper process small.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# llguidance compiles recursively, and a stack overflow kills the process. Sources within the limits of `grammar_source`
# need far less stack than this.
STACK_BYTES = 128 * 1024 * 1024
# llguidance's defaults, explicit because they bound the cost of one token: the lexer's fuel and the parser's items.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
                        max_items_in_row=2_000, max_lexer_states=250_000, max_grammar_size=500_000,
                        verbose_errors=False)


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    tokens: list[bytes]  # bytes of each token, by token id
    special_ids: list[int]
    eos_ids: list[int]
    bos_id: int | None


def make_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> LLTokenizer:
    """Make the tokenizer of grammars. `encode`: the model's, from text to token ids; None: one token per byte."""
    return LLTokenizer(TokenizerWrapper(_Wrapped(vocabulary, encode)), eos_token=vocabulary.eos_ids)


def compile_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile on a thread whose stack is large enough for every source within the limits."""
    compiled: Future[LLMatcher] = Future()

    def work() -> None:
        try:
            compiled.set_result(LLMatcher(tokenizer, source, log_level=0, limits=LIMITS))
        except BaseException as error:  # raised in the caller, which waits for the result
            compiled.set_exception(error)

    with _STACK_SIZE:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="spillover-grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return compiled.result()


_STACK_SIZE = threading.Lock()  # guards the stack size of new threads, which is a setting of the whole process


class _Wrapped:
    """A vocabulary in the form that llguidance's TokenizerWrapper expects."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.special_token_ids = vocabulary.special_ids
        self.tokens = vocabulary.tokens
        self._encode = encode
        self._of_byte = {token: index for index, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        if self._encode is not None:
            return self._encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)
        data = text.encode() if isinstance(text, str) else text
        found = (self._of_byte.get(bytes([byte])) for byte in data)
        return [token for token in found if token is not None]
