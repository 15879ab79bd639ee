"""Whatever the logits, masked output matches the grammar; what cannot be compiled is rejected."""

from __future__ import annotations

import json
import re
import threading
from functools import cache

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from spillover.engine.requests.sampling_params import StructuredOutputs
from spillover.engine.structured.grammar_source import MAX_SCHEMA_DEPTH
from spillover.engine.structured.structured import Grammar, GrammarCompiler
from spillover.errors import RequestError
from spillover.models.tokenizer import Tokenizer
from support.models.grammars import allowed, byte_level, model_mask, walk


@cache
def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "{", "}", '"', ":", ",", "a",
              "▁a", '{"', '":', "true", "b", "ab", "▁{"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, [], {}, "test")


@cache
def compiler(make: object = byte_level) -> GrammarCompiler:
    return GrammarCompiler(make())  # type: ignore[operator]


def compiled(**outputs: object) -> Grammar:
    return compiler().compile(StructuredOutputs(**outputs))  # type: ignore[arg-type]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", 'q"']}, "minItems": 1, "maxItems": 3},
        "child": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age", "tags", "child"],
    "additionalProperties": False,
}


def fits(value: object) -> bool:
    return (isinstance(value, dict) and set(value) == {"name", "age", "tags", "child"}
            and isinstance(value["name"], str) and len(value["name"]) <= 8
            and type(value["age"]) is int and 0 <= value["age"] <= 150
            and 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "grün", 'q"'}
            and (value["child"] is None or fits(value["child"])))


def test_random_logits_write_valid_documents() -> None:
    for seed in range(12):
        assert fits(json.loads(walk(compiled(json=SCHEMA), byte_level(), seed)))
        assert isinstance(json.loads(walk(compiled(json_object=True), byte_level(), seed)), dict)


def test_random_logits_fit_the_regex() -> None:
    for seed in range(10):
        for regex in (r"(foo|ba[rz]+)-[0-9]{2,4}", r"[a-zé]+"):
            assert re.fullmatch(regex, walk(compiled(regex=regex), byte_level(), seed, patience=10))


def test_a_choice_comes_out_as_it_is_written() -> None:
    choices = ("a", "ab", 'say "hi"', "x\\y\n", "😀.*", "日本", "[z]|(w)", "tab\t#-&~ /", "\x00")
    seen = {walk(compiled(choice=choices), byte_level(), seed) for seed in range(150)}
    assert seen == set(choices)


@pytest.mark.parametrize("grammar", ['start: "yes" | "no" NAME\nNAME: /[a-c]{2}/', 'root ::= "yes" | "no" [a-c] [a-c]'])
def test_lark_and_gbnf_grammars(grammar: str) -> None:
    for seed in range(6):
        assert re.fullmatch("yes|no[abc]{2}", walk(compiled(grammar=grammar), byte_level(), seed))


def test_byte_fallback_vocabularies_work_too() -> None:
    grammars = compiler(byte_fallback)
    choices = ("a ab", "{日本}")
    seen = {walk(grammars.compile(StructuredOutputs(choice=choices)), byte_fallback(), seed) for seed in range(20)}
    assert seen == set(choices)


def test_the_end_is_allowed_only_where_the_output_is_complete() -> None:
    tokenizer, grammar = byte_level(), compiled(regex="ab?")
    a, b = (tokenizer.backend.token_to_id(letter) for letter in "ab")
    ends = set(tokenizer.eos_token_ids)
    assert set(allowed(grammar, tokenizer)) == {a}
    assert not grammar.accept(b)
    assert not grammar.accept(tokenizer.eos_token_ids[0])
    assert grammar.accept(a)
    assert set(allowed(grammar, tokenizer)) == {b} | ends
    assert not grammar.finished
    assert grammar.accept(b)
    assert grammar.finished
    assert set(allowed(grammar, tokenizer)) == ends
    assert not grammar.accept(a)
    assert grammar.accept(tokenizer.eos_token_ids[1])
    assert set(allowed(grammar, tokenizer)) == ends


def test_rollback_returns_to_any_earlier_state() -> None:
    tokenizer, grammar = byte_level(), compiled(regex="(ab|cd)e")
    tokens = [tokenizer.backend.token_to_id(letter) for letter in "abe"] + [tokenizer.eos_token_ids[0]]
    masks = []
    for token in tokens:
        masks.append(allowed(grammar, tokenizer))
        assert grammar.accept(token)
    for count in range(1, 5):
        grammar.rollback(count)
        assert allowed(grammar, tokenizer) == masks[-count]
        for token in tokens[-count:]:
            assert grammar.accept(token)
    with pytest.raises(ValueError, match="cannot take back 5 of 4"):
        grammar.rollback(5)


def test_a_model_with_fewer_tokens_than_the_tokenizer_gets_a_shorter_mask() -> None:
    row = model_mask(compiled(regex="[ -~]"), 64)
    assert len(row) == 2
    assert row[1] != 0


def test_sequences_of_one_grammar_do_not_share_their_state() -> None:
    first, second = compiled(regex="ab"), compiled(regex="ab")
    a = byte_level().backend.token_to_id("a")
    assert first.accept(a)
    assert allowed(second, byte_level()) == [a]


def test_blanks_in_json_end() -> None:
    tokenizer, grammar = byte_level(), compiled(json_object=True)
    assert grammar.accept(tokenizer.backend.token_to_id("{"))
    space = tokenizer.backend.token_to_id("Ġ")
    assert sum(grammar.accept(space) for _ in range(1000)) == 100
    assert not grammar.finished


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(length: int, wrap: int = 0) -> dict[str, object]:
    """Return a chain of definitions, each of which refers to the next."""
    definitions: dict[str, object] = {f"d{length}": {"type": "string"}}
    for i in range(length):
        inner: dict[str, object] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(wrap):
            inner = {"type": "array", "items": inner}
        definitions[f"d{i}"] = {"type": "object", "properties": {"a": inner}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(("outputs", "message"), [
    ({"json": {"type": "objekt"}}, "json does not compile: .*objekt"),
    ({"json": '{"type": '}, "not valid JSON"),
    ({"json": "[1]"}, "must be a JSON schema object"),
    ({"json": {"type": object()}}, "not a JSON schema"),
    ({"json": {"$ref": "#/$defs/none"}}, "json does not compile"),
    ({"json": nested(5000)}, f"more than {MAX_SCHEMA_DEPTH} deep"),
    ({"json": '{"items":' * 100_000}, "characters; at most"),
    ({"json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, f"more than {MAX_SCHEMA_DEPTH} deep"),
    ({"json": chain(2000)}, "2001 definitions"),
    ({"regex": "(a"}, "regex does not compile: .*\n.*"),
    ({"regex": "(" * 8000 + "a" + ")" * 8000}, "regex does not compile"),
    ({"regex": "a?" * 20_000}, "characters; at most"),
    ({"grammar": "start: nothing"}, "grammar does not compile: .*nothing"),
    ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "grammar does not compile"),
    ({"grammar": "x" * 100_000}, "characters; at most"),
])
def test_what_cannot_be_compiled_is_refused_with_the_reason(outputs: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        compiled(**outputs)
    assert len(str(refusal.value)) < 1500


def test_the_deepest_schemas_and_grammars_let_through_compile() -> None:
    """The deepest accepted schemas and grammars compile, also on a thread with a small stack, as a server's may be."""
    rules = 4000
    lark = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(rules)) + f'r{rules}: "a"'
    made: list[Grammar] = []

    def work() -> None:
        made.extend([compiled(json=nested(MAX_SCHEMA_DEPTH // 2 - 1)), compiled(json=chain(500, wrap=4)),
                     compiled(grammar=lark)])

    usual = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    assert len(made) == 3
    assert all(allowed(grammar, byte_level()) for grammar in made)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(Tokenizer(byte_level().backend, {}, [], {}, "test"))
