"""Structured output: masks of the tokens that may come next so that the output fits a schema, regex, grammar or choice.

llguidance does the matching. A new grammar is first tried out in another process, within limits of time and memory
(`grammar_trial`); only a grammar that passes is compiled in this process.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from spillover.engine.config import EngineConfig
from spillover.engine.requests.sampling_params import StructuredOutputs
from spillover.engine.structured.grammar_matcher import Vocabulary, compile_matcher, make_tokenizer
from spillover.engine.structured.grammar_process import SHORT_SECONDS, Verdict
from spillover.engine.structured.grammar_source import does_not_compile, kind_of, renamed, source_of
from spillover.engine.structured.grammar_trial import GrammarTrials
from spillover.errors import GrammarRefused, RequestError
from spillover.models.tokenizer import Tokenizer
from spillover.units import format_bytes, parse_bytes

# CPU time that the masks of a request may take: FIRST_SECONDS, and TOKEN_SECONDS more for each token. Usual grammars
# take well under a millisecond per token.
FIRST_SECONDS = 0.5
TOKEN_SECONDS = 0.005
REFUSALS_KEPT = 256
LEAST_BYTES = 64 * 1024  # minimum size that a cached grammar counts as


@dataclass(frozen=True)
class GrammarLimits:
    seconds: float = 3.0  # maximum CPU time to compile one grammar: --grammar-timeout
    nbytes: int = 256_000_000  # maximum memory of one grammar, and of all cached grammars: --grammar-memory

    @classmethod
    def of(cls, config: EngineConfig) -> GrammarLimits:
        return cls(config.grammar_timeout, parse_bytes(config.grammar_memory))


@dataclass(frozen=True)
class GrammarStats:
    """Counters of a grammar compiler."""

    compiled: int = 0
    reused: int = 0  # number of grammars found in the cache
    kept_bytes: int = 0
    refused: tuple[tuple[str, int], ...] = ()  # number of grammars refused, by reason


class Grammar:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], mask_words: int) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._mask_words = mask_words
        self._accepted = 0
        self._ends = 0  # end tokens accepted after the matcher stopped, which does not count them
        self._seconds = 0.0  # CPU time spent on masks and tokens
        self.error: str | None = None  # why the request fails under this grammar; None if it has not failed

    def copy(self) -> Grammar:
        """Return the same grammar for another sequence; must be called before the first token."""
        assert not self._accepted
        return Grammar(self._matcher.deep_copy(), self._eos, self._mask_words)

    def mask(self) -> bytes:
        """Return one bit per token of the tokenizer, in 32-bit words, set if the token may come next.

        End tokens are set only if the output would be complete.
        """
        words = np.zeros(self._mask_words, dtype=np.uint32)
        if not self.finished:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._took(time.thread_time() - started)
        if self.finished:
            words[:] = 0
            for token in self._eos:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words.tobytes()

    def draft_masks(self, draft: tuple[int, ...]) -> tuple[tuple[int, ...], bytes]:
        """Return the longest prefix of a draft that the grammar allows, with the mask for its first token and the masks
        after each of its tokens. They are computed on a copy: the state of this object does not change."""
        ahead = self.ahead()
        masks, allowed = [ahead.mask()], 0
        for token in draft:
            if ahead.finished or not ahead.accept(token) or ahead.error is not None:
                break
            masks.append(ahead.mask())
            if ahead.error is not None:
                masks.pop()
                break
            allowed += 1
        return draft[:allowed], b"".join(masks)

    def ahead(self) -> Grammar:
        """Return a copy in the current state."""
        return Grammar(self._matcher.deep_copy(), self._eos, self._mask_words)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False, unchanged, if the grammar does not allow it."""
        if self.finished:
            if token_id not in self._eos:
                return False
            self._ends += 1
        else:
            started = time.thread_time()
            taken = self._matcher.try_consume_tokens([token_id])
            self._took(time.thread_time() - started)
            if taken != 1:
                return False
        self._accepted += 1
        return True

    @property
    def finished(self) -> bool:
        """Return whether only an end token can follow."""
        return self.error is not None or bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Return whether the output so far is a complete match, though more may follow."""
        return bool(self._matcher.is_accepting())

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        if not 0 <= count <= self._accepted:
            raise ValueError(f"cannot take back {count} of {self._accepted} tokens")
        self._accepted -= count
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            self._matcher.rollback(count - ends)

    def _took(self, seconds: float) -> None:
        """Add time spent on masks, which all requests wait for; set `error` if the grammar is too expensive."""
        self._seconds += seconds
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).strip().splitlines()[0][:160]
            self.error = f"structured_outputs became too complex at output token {self._accepted}: {reason}"
        elif self._seconds > FIRST_SECONDS + TOKEN_SECONDS * self._accepted:
            self.error = (f"the grammar of structured_outputs took {self._seconds:.1f} s for {self._accepted} tokens, "
                          f"but at most {FIRST_SECONDS:g} s and {1000 * TOKEN_SECONDS:g} ms per token are allowed; "
                          "simplify it")


class GrammarCompiler:
    """A compiler of grammars for one tokenizer, with a cache of recent ones. Safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits | None = None) -> None:
        if not tokenizer.eos_token_ids:
            raise RequestError("structured output needs an end-of-sequence token, and this model's tokenizer names "
                               "none; set eos_token in its tokenizer_config.json")
        self._limits = limits or GrammarLimits()
        eos = list(tokenizer.eos_token_ids)
        self._vocabulary = Vocabulary([tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
                                      sorted(tokenizer.special_ids | set(eos)), eos, tokenizer.bos_token_id)
        self._tokenizer = make_tokenizer(self._vocabulary, lambda text: tokenizer.encode(text, False))
        self._trials = GrammarTrials(self._vocabulary, self._limits.seconds, self._limits.nbytes)
        # Two pools, so that a grammar that compiles for seconds does not delay small ones.
        self._quick = ThreadPoolExecutor(1, "spillover-grammars")
        self._slow = ThreadPoolExecutor(1, "spillover-large-grammars")
        self._lock = threading.Lock()  # guards all below
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()  # compiled grammars with their sizes
        self._kept_bytes = 0
        self._refusals: OrderedDict[bytes, GrammarRefused] = OrderedDict()
        self._in_work: dict[bytes, Future[LLMatcher]] = {}
        self._compiled = self._reused = 0
        self._refused: Counter[str] = Counter()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        return self.begin(outputs).result()

    def begin(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """Start compiling; return a future of the grammar, or of GrammarRefused."""
        made: Future[Grammar] = Future()

        def ended(future: Future[LLMatcher]) -> None:
            error = future.exception()
            if error is None:
                made.set_result(self._of(future.result()))
                return
            if isinstance(error, GrammarRefused):
                with self._lock:
                    self._refused[error.reason] += 1
                error = renamed(error, outputs)
            made.set_exception(error)

        def work() -> None:
            try:
                self._matcher(outputs).add_done_callback(ended)
            except Exception as error:
                failed: Future[LLMatcher] = Future()
                failed.set_exception(error)
                ended(failed)

        try:
            self._quick.submit(work)
        except RuntimeError:  # the pool has been shut down
            made.set_exception(GrammarRefused("the engine is closing", "unavailable"))
        return made

    def stats(self) -> GrammarStats:
        with self._lock:
            return GrammarStats(self._compiled, self._reused, self._kept_bytes, tuple(sorted(self._refused.items())))

    def close(self) -> None:
        """Stop the process that tries out grammars; grammars not ready yet are refused."""
        self._trials.close()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, matcher: LLMatcher) -> Grammar:
        words = (self._tokenizer.vocab_size + 31) // 32
        return Grammar(matcher.deep_copy(), frozenset(self._vocabulary.eos_ids), words)

    def _matcher(self, outputs: StructuredOutputs) -> Future[LLMatcher]:
        """Return a future of the matcher: cached, already being compiled for another request, or compiled now."""
        source = source_of(outputs)
        key = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            future = self._in_work.get(key)
            if future is not None:
                return future
            future = Future()
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self._reused += 1
                future.set_result(kept[0])
                return future
            if (refusal := self._refusals.get(key)) is not None:
                self._refusals.move_to_end(key)
                future.set_exception(refusal)
                return future
            self._in_work[key] = future
        kind = kind_of(outputs)

        def tried(trial: Future[Verdict]) -> None:
            try:
                verdict = trial.result()
                self._check(kind, verdict)
                pool = self._quick if verdict.seconds <= SHORT_SECONDS else self._slow
                pool.submit(self._compile, key, kind, source, verdict.nbytes, future)
            except Exception as error:
                self._end(key, future, error)

        self._trials.submit(source).add_done_callback(tried)
        return future

    def _check(self, kind: str, verdict: Verdict) -> None:
        name, limits = f"structured_outputs.{kind}", self._limits
        simpler = "simplify it, e.g. a smaller multipleOf, fewer properties, shorter repetitions"
        match verdict.outcome:
            case "invalid":
                raise does_not_compile(kind, verdict.message)
            case "time":
                raise GrammarRefused(f"{name} takes more than {limits.seconds:g} s to compile (--grammar-timeout); "
                                     f"{simpler}", "time")
            case "memory":
                raise GrammarRefused(f"{name} takes more than {format_bytes(limits.nbytes)} to compile "
                                     f"(--grammar-memory); {simpler}", "memory")
            case "crash":
                raise GrammarRefused(f"{name} cannot be compiled: the compiler crashed on it; {simpler}", "crash")

    def _compile(self, key: bytes, kind: str, source: str, nbytes: int, future: Future[LLMatcher]) -> None:
        try:
            matcher = compile_matcher(self._tokenizer, source)
            if matcher.is_error():
                raise does_not_compile(kind, str(matcher.get_error()))
        except Exception as error:
            self._end(key, future, error)
            return
        with self._lock:
            self._compiled += 1
            self._in_work.pop(key, None)
            nbytes = max(nbytes, len(source), LEAST_BYTES)
            self._kept[key] = matcher, nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > self._limits.nbytes:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        future.set_result(matcher)

    def _end(self, key: bytes, future: Future[LLMatcher], error: Exception) -> None:
        """Refuse the grammar; unless the trial was unavailable, cache the refusal so that it is not tried again."""
        with self._lock:
            self._in_work.pop(key, None)
            if isinstance(error, GrammarRefused) and error.reason != "unavailable":
                self._refusals[key] = error
                if len(self._refusals) > REFUSALS_KEPT:
                    self._refusals.popitem(last=False)
        future.set_exception(error)
