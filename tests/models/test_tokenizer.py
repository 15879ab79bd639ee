"""Tokenizers from folders and GGUF files: the ids, the bytes and the chat prompts of transformers."""

from __future__ import annotations

import io
import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spillover.errors import CheckpointError, RequestError
from spillover.models.gguf.gguf_tokenizer import gguf_tokenizer
from spillover.models.hub import store
from spillover.models.tokenizer import load_tokenizer
from support.models.gguf_writing import llama_arrays, llama_fields, write_gguf

WRITTEN = [
    "", " ", "Hello, world!", "  12  345 six", "I'LL don't WE'RE it's", "naïve café e\u0301", "日本語テキスト 123456",
    "\n\n\n  x\r\n\t\ty \n", "🏳️‍🌈👩‍👩‍👧‍👦 ok",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "a" * 60, "HTTPServer fooBar/baz//\n", "Ⅷ ½ ² ﬁ",
    "def f(x):\n    return x ** 2  # ok\n", "https://example.org/a?b=1&c=%20", "x\u200by\u00a0z", '{"a": [1, 2.5e-3]}',
]
CHAT = [{"role": "system", "content": "Be <brief> & \"kind\"."}, {"role": "user", "content": "Héllo?"},
        {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "  2 + 2 "}]


@lru_cache
def texts() -> list[str]:
    """Return about 200 texts: conversations if the shared data is available, and always written and random ones."""
    chosen = list(WRITTEN)
    data = Path(__file__).parents[3] / "shared" / "data" / "sharegpt_sample.json"
    if data.is_file():
        turns = [turn["value"] for talk in json.loads(data.read_text())[:60] for turn in talk["conversations"]]
        chosen += turns[:120]
    letters = random.Random(0)
    ranges = [(32, 126)] * 4 + [(0xA0, 0x2FFF), (0x3000, 0x30FF), (0x1F300, 0x1F6FF), (9, 10)]
    return chosen + ["".join(chr(letters.randint(*letters.choice(ranges))) for _ in range(40)) for _ in range(80)]


@pytest.fixture(scope="module")
def default_model() -> Path:
    try:
        return store.resolve(None)
    except Exception as error:
        pytest.skip(f"the default model cannot be pulled: {error}")


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    # transformers ignores the file's tokenizer.ggml.pre: "smollm" splits digits off first, as the model was trained.
    # The default split differs only for several spaces before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def test_the_default_model_tokenizes_and_templates_as_in_transformers(default_model: Path, reference: Any) -> None:
    ours = load_tokenizer(default_model)
    for text in texts():
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)
    for prompt in (True, False):
        expected = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert (ours.bos_token_id, ours.eos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, 2, (2, 0), 49152)
    assert ours.special_ids == set(range(17))


def test_bytes_of_tokens_add_up_to_the_text(default_model: Path) -> None:
    ours = load_tokenizer(default_model)
    for text in texts():
        assert b"".join(ours.token_bytes(index) for index in ours.encode(text)) == text.encode()
    assert ours.token_bytes(1) == b"<|im_start|>"
    assert ours.token_bytes(10**6) == b""


def byte_level_metadata(pre: str, single: str, **fields: Any) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """Return a vocabulary trained on a few lines, and the tokenizer that must result from the file written with it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "gpt-4o", "tekken")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(single), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken("<s>", special=True), AddedToken("</s>", special=True)]))
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    kinds = [3 if token in ("<s>", "</s>") else 1 for token in tokens]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in content["merges"]], **fields}, tokenizer


# The patterns as in the models' own tokenizer.json files.
PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
              r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
              r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
              r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
              r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("pre", PATTERNS)
def test_text_is_cut_as_the_file_says(pre: str) -> None:
    metadata, expected = byte_level_metadata(pre, PATTERNS[pre])
    ours = gguf_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False}, Path("m.gguf"))
    for text in texts():
        assert ours.encode(text).ids == expected.encode(text).ids, text


def test_a_first_token_is_added_where_the_file_says_so() -> None:
    def ids(pre: str, **fields: Any) -> list[int]:
        metadata, _ = byte_level_metadata(pre, PATTERNS[pre], **fields)
        return list(gguf_tokenizer(metadata, Path("m.gguf")).encode("a").ids)

    assert ids("llama-bpe")[0] == 0
    assert ids("gpt-2")[0] != 0
    assert ids("gpt-2", **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})[::2] == [0, 1]


def test_qwen_text_is_composed_first() -> None:
    metadata, _ = byte_level_metadata("qwen2", PATTERNS["llama-bpe"])
    ours = gguf_tokenizer(metadata, Path("m.gguf"))
    assert ours.encode("e\u0301").ids == ours.encode("\u00e9").ids


@lru_cache
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """Train a model as Llama's was: BPE, bytes for unseen text, spaces preserved."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts() for line in text.splitlines() if line.isascii() and line),
        model_writer=trained, model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<tool>"], minloglevel=2, num_threads=1,
        hard_vocab_limit=False)
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def sentencepiece_metadata() -> dict[str, Any]:
    model = sentencepiece_model()
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(index) else 3 if model.is_control(index) else 6 if model.is_byte(index)
             else 4 if model.id_to_piece(index) == "<tool>" else 1 for index in ids]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in ids],
            "tokenizer.ggml.scores": [model.get_score(index) for index in ids], "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def test_a_sentencepiece_vocabulary_tokenizes_as_in_sentencepiece(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_fields(**sentencepiece_metadata()), llama_arrays(Kind.F32))
    ours, model = load_tokenizer(path), sentencepiece_model()
    for text in texts():
        if text and "<tool>" not in text:
            ids = ours.encode(text)
            assert ids == [1, *model.encode(text)], text
            assert ours.decode(ids) == text
            assert b"".join(ours.token_bytes(index) for index in ids[1:]) == b" " + text.encode()
    assert ours.encode("<tool>", add_special_tokens=False) == [model.piece_to_id("<tool>")]
    assert ours.token_bytes(model.piece_to_id("<0xC3>")) == b"\xc3"
    assert ours.special_ids == {0, 1, 2}
    unprefixed = gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}, path)
    assert unprefixed.decode(unprefixed.encode(" the").ids) == " the"
    assert unprefixed.encode("the", add_special_tokens=False).ids != model.encode("the")


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokenizer.ggml.model": "t5"}, "kind 't5'"), ({"tokenizer.ggml.scores": []}, "without a score"),
    ({"tokenizer.ggml.model": "gpt2"}, r"without tokenizer\.ggml\.merges"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"}, "'odd'.*llama-bpe"),
    ({"tokenizer.ggml.model": None}, "carries no tokenizer")])
def test_tokenizers_that_cannot_be_made_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{message}"):
        gguf_tokenizer(sentencepiece_metadata() | changes, Path("m.gguf"))


def hf_folder(path: Path, **settings: Any) -> Path:
    _, backend = byte_level_metadata("gpt-2", PATTERNS["gpt-2"])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'odd' %}{{ raise_exception('no odd roles') }}{% endif %}
{{ message['role'] + ': ' + message['content'] }}{% if loop.last %}{% break %}{% endif %}

{% endfor %}
{% if add_generation_prompt %}assistant{{ suffix }}{% endif %}{{ strftime_now('%Y')[:2] }}
"""
TOOLS = [{"type": "function", "function": {"name": "f<é>", "parameters": {}}}]


def test_chat_templates_render_as_in_transformers(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", chat_template=TEMPLATE)
    ours = load_tokenizer(folder)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>",
                                        eos_token="</s>", chat_template=TEMPLATE)
    for tools in (None, TOOLS):
        expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=True,
                                                 suffix="!")
        assert ours.apply_chat_template(CHAT, tools=tools, suffix="!") == expected
    with pytest.raises(RequestError, match="no odd roles"):
        ours.apply_chat_template([{"role": "odd", "content": "x"}])
    with pytest.raises(RequestError, match="cannot render these messages"):
        ours.apply_chat_template([{"role": "user", "content": ["part"]}])
    escape = hf_folder(tmp_path / "e", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        load_tokenizer(escape).apply_chat_template(CHAT)


def test_where_a_folder_may_keep_its_template(tmp_path: Path) -> None:
    def rendered(folder: Path, **given: Any) -> str:
        return load_tokenizer(folder).apply_chat_template(CHAT, **given)

    with pytest.raises(RequestError, match="has no chat template"):
        rendered(hf_folder(tmp_path / "none"))
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder = hf_folder(tmp_path / "m", chat_template=named)
    assert (rendered(folder), rendered(folder, tools=TOOLS)) == ("named", "tools")
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert rendered(folder) == "from json"
    (folder / "chat_template.jinja").write_text("from jinja{% generation %}, marked{% endgeneration %}")
    assert rendered(folder) == "from jinja, marked"


def test_every_id_that_ends_a_generation(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(folder).eos_token_ids == (1,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (1, (1, 7), 0)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (5,)


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; make one"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "absent")
