"""Tokenizers made from a GGUF file's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from spillover.errors import CheckpointError, short_repr

# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
LONGEST = 512  # maximum characters of a token made by merges

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
          rf"{_CONTRACTION}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL)
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
           + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL)


@dataclass(frozen=True)
class _Split:
    """How text is split before merges are applied."""

    pattern: str
    single_digits: bool = False  # split digits one by one before applying the pattern
    nfc: bool = False  # normalise text to NFC first
    whole_words: bool = False  # a piece that is a token itself is not merged from smaller ones
    add_bos: bool = False  # default if the metadata does not say


_SPLITS = {
    "default": _Split(_GPT2),
    "gpt-2": _Split(_GPT2),
    "smollm": _Split(_GPT2, single_digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "gpt-4o": _Split(_GPT4O, whole_words=True),
    "tekken": _Split(_TEKKEN, whole_words=True, add_bos=True),
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "starcoder": "smollm"}


def gguf_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or model is None:
        raise CheckpointError(f"{path} carries no tokenizer; take a GGUF file that does")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{path} carries a tokenizer of kind {short_repr(model)}, which is not supported; "
                              "supported are gpt2 and llama")
    _check(metadata, path)
    try:
        tokenizer, add_bos = _byte_level(metadata, path) if model == "gpt2" else (_sentencepiece(metadata, path), True)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers package raises no specific exception
        raise CheckpointError(f"{path}: its tokenizer cannot be made ({short_repr(str(error))})") from error
    _add_special_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata, metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    return tokenizer


def _check(metadata: dict[str, Any], path: Path) -> None:
    """Check that every field has the expected type, and every id a token."""
    def wrong(key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{path}: tokenizer.ggml.{key} has {short_repr(value)}, which is not {wanted}")

    for key, kind, wanted in (("tokens", str, "a text"), ("merges", str, "a text"), ("token_type", int, "a number"),
                              ("scores", int | float, "a number")):
        values = metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list):
            raise wrong(key, values, "a list")
        for value in values:
            if not isinstance(value, kind):
                raise wrong(key, value, wanted)
    count = len(metadata["tokenizer.ggml.tokens"])
    for name in ("bos", "eos", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and (type(index) is not int or not 0 <= index < count):
            raise wrong(f"{name}_token_id", index, f"the id of one of its {count:,} tokens")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        value = metadata.get(f"tokenizer.ggml.{key}", False)
        if not isinstance(value, bool):
            raise wrong(key, value, "true or false")
    for line in metadata.get("tokenizer.ggml.merges", []):
        if " " not in line:
            raise wrong("merges", line, "two tokens with a space between them")


def _byte_level(metadata: dict[str, Any], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(_SAME.get(name, name)) if isinstance(name, str) else None
    if split is None:
        raise CheckpointError(f"{path} cuts text as {short_repr(name)} (tokenizer.ggml.pre), which is not supported; "
                              f"supported are {', '.join([*_SPLITS, *_SAME])}")
    tokens, lines = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges")
    if not lines:
        raise CheckpointError(f"{path} carries a gpt2 tokenizer without tokenizer.ggml.merges")
    merges = [tuple(line.split(" ", 1)) for line in lines]
    tokenizer = Tokenizer(BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *digits, pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(metadata: dict[str, Any], path: Path) -> Tokenizer:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(f"{path} carries a llama tokenizer without a score for every token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(BPE(vocab=_vocabulary(tokens), merges=_merges_from_scores(tokens, scores),
                              unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([
        *([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(content=" ", left=1)] if prefix else [])])
    return tokenizer


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return all merges that make each token, highest score first: SentencePiece merges the highest score."""
    score_of = dict(zip(tokens, scores, strict=True))
    merges: list[tuple[str, str]] = []
    for token in sorted(score_of, key=score_of.__getitem__, reverse=True):
        # Longer tokens are matched whole, as special tokens are: trying every cut would take quadratic time.
        cuts = range(1, len(token)) if len(token) <= LONGEST else ()
        pairs = [(token[:cut], token[cut:]) for cut in cuts]
        known = [pair for pair in pairs if pair[0] in score_of and pair[1] in score_of]
        merges += sorted(known, key=lambda pair: (score_of[pair[0]], score_of[pair[1]]), reverse=True)
    return merges


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Return ids by token; of tokens with the same text the first one counts, as in llama.cpp's table."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    added = {kind: [AddedToken(token, normalized=False, special=kind != USER_DEFINED)
                    for token, its in zip(tokens, kinds, strict=False) if its == kind and token]
             for kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens(added[UNKNOWN] + added[CONTROL])
    tokenizer.add_tokens(added[USER_DEFINED])


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: dict[str, Any], add_bos: bool) -> None:
    ids = {}
    for kind, wanted in (("bos", add_bos), ("eos", metadata.get("tokenizer.ggml.add_eos_token", False))):
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if wanted and index is not None:
            ids[kind] = (tokenizer.id_to_token(index), index)
    if ids:
        before, after = [ids["bos"][0]] if "bos" in ids else [], [ids["eos"][0]] if "eos" in ids else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *before, "$B:1", *after],
            special_tokens=list(ids.values()))
