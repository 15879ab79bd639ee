"""Every checkable instruction: an answer that follows it, and one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spillover.eval.tasks.ifeval import IFEval, ifeval, judge
from spillover.eval.tasks.ifeval_checks import CHECKS, count_sentences, follows, speaks

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cats and a Dog", "cats only"),
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "at least"}, "so and so", "so what"),
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "less than"}, "so what", "so, also"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a CAT!"),
    ("keywords:letter_frequency", {"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, "Quiq", "quick"),
    ("language:response_language", {"language": "hi"}, "यह एक वाक्य है (ok)", "this is a sentence"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Weg und die Zeit", "This is not the way"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One Dr. Who.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two-three", "one two"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
     "a\n\n\"so, b", "a\n\nnot so"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. more", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s: more", "p.s. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "I say: My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1 a SECTION 2 b", "SECTION 1 a Section 2 b"),
    ("detectable_format:json_format", {}, "```json\n{\"a\": [1]}\n```", "{a: 1}"),
    ("detectable_format:title", {}, "<<Joy>>\ntext", "<<>> <Joy>"),
    ("combination:two_responses", {}, "one******two", "one******one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. \"the end.\"", "The end. Or not."),
    ("startend:quotation", {}, ' "all of it" ', '"part" of it'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "A BIG-ONE here",
     "A Big one"),
    ("change_case:english_capital", {}, "THE CAT IS IN THE HOUSE", "THE CAT is IN"),
    ("change_case:english_lowercase", {}, "the cat is in the house", "The cat"),
    ("punctuation:no_comma", {}, "a b; c", "a, b"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(name, arguments, good)
    assert not follows(name, arguments, bad)
    assert not follows(name, arguments, " \n"), "an empty answer follows nothing"


def test_every_check_is_tested() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS)


def test_loose_forgives_a_first_line_a_last_line_and_asterisks() -> None:
    row = {"instruction_id_list": ["startend:quotation", "punctuation:no_comma"], "kwargs": [{}, {}]}
    assert judge('Sure, here it is:\n"**the answer**"', row) == ([False, False], [True, True])
    assert judge('"a, b"', row) == ([True, False], [True, False])


def test_sentences_and_languages_by_their_simple_rules() -> None:
    assert count_sentences("One. Two! Three?! e.g. this \"Four.\" and the rest") == 5
    assert count_sentences("v1.2 is 3.5 times as fast") == 1
    assert speaks("Привет мир", "ru")
    assert speaks("Tôi không có một người bạn và đó là của tôi", "vi")
    assert not speaks("der Hund ist nicht hier und die Katze", "en")
    assert speaks("whatever", "xx")


def test_the_published_prompts_can_all_be_checked(shared_data: Path) -> None:
    task = ifeval("ifeval", shared_data / "eval", None)
    assert isinstance(task, IFEval)
    for item in task.items(None):  # type: ignore[arg-type]
        judge("An answer, in *two* lines.\nThe second.", item.ask)
