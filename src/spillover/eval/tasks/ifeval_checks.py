"""IFEval's checkable instructions: each is a function of an answer and the instruction's own arguments.

The rules are those of the published checker, except for three that need a language detector or a word tokenizer there:
languages, sentences and words in capitals, whose simple rules are at the end of this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Check = Callable[..., bool]


def follows(instruction: str, arguments: dict[str, Any], answer: str) -> bool:
    """Return whether an answer follows one instruction; an empty one follows none."""
    given = {name: value for name, value in arguments.items() if value}
    return bool(answer.strip()) and CHECKS[instruction](answer, **given)


def looser(answer: str) -> list[str]:
    """Return the variants used by the loose count, of which one must follow: without the first line, the last, both,
    and each of them without asterisks."""
    lines = answer.split("\n")
    kept = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return kept + [each.replace("*", "") for each in kept]


def _compared(count: int, relation: str, number: int) -> bool:
    return count < number if relation == "less than" else count >= number


def _keywords(answer: str, keywords: list[str]) -> bool:
    return all(re.search(word, answer, re.IGNORECASE) for word in keywords)


def _keyword_frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(keyword.strip(), answer, re.IGNORECASE)), relation, frequency)


def _forbidden(answer: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", answer, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(answer.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _language(answer: str, language: str) -> bool:
    return speaks(answer, language)


def _sentences(answer: str, num_sentences: int, relation: str) -> bool:
    return _compared(count_sentences(answer), relation, num_sentences)


def _words(answer: str, num_words: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", answer)), relation, num_words)


def _paragraphs(answer: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", answer)
    empty = [not part.strip() for part in parts]
    return not any(empty[1:-1]) and len(parts) - sum(empty) == num_paragraphs


def _paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = re.split(r"\n\n", answer)
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"""[.,?!'"]""", word)[0].lower() == first_word.lower()


def _placeholders(answer: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", answer)) >= num_placeholders


def _postscript(answer: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(rf"\s*{known.get(marker, marker.lower())}.*$", answer.lower(), re.MULTILINE) is not None


def _bullets(answer: str, num_bullets: int) -> bool:
    stars, dashes = (re.findall(pattern, answer, re.MULTILINE) for pattern in (r"^\s*\*[^\*].*$", r"^\s*-.*$"))
    return len(stars) + len(dashes) == num_bullets


def _constrained(answer: str) -> bool:
    return any(option in answer for option in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def _highlights(answer: str, num_highlights: int) -> bool:
    single = [each for each in re.findall(r"\*[^\n\*]*\*", answer) if each.strip("*").strip()]
    double = [each for each in re.findall(r"\*\*[^\n\*]*\*\*", answer)
              if each.removeprefix("**").removesuffix("**").strip()]
    return len(single) + len(double) >= num_highlights


def _sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", answer)) - 1 >= num_sections


def _json(answer: str) -> bool:
    text = answer.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(answer: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", answer))


def _two_responses(answer: str) -> bool:
    parts = answer.split("******")
    kept = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(kept) == 2 and kept[0] != kept[1]


def _repeats(answer: str, prompt_to_repeat: str) -> bool:
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends(answer: str, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compared(sum(word.isupper() for word in _WORD.findall(answer)), capital_relation, capital_frequency)


def _capitals(answer: str) -> bool:
    return answer.isupper() and speaks(answer, "en")


def _lowercase(answer: str) -> bool:
    return answer.islower() and speaks(answer, "en")


def _no_comma(answer: str) -> bool:
    return "," not in answer


def _quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capitals,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
}

# Rules of this project.

_WORD = re.compile(r"\w+(?:-\w+)*")
_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|No|[A-Z])\.(?=\s)")
_END = re.compile(r"""[.!?]+["'”’)\]*_]*(?:\s+|$)""")
_SCRIPTS = {  # ranges of code points; languages with the same script are not distinguished
    "ar": ((0x600, 0x6FF),), "fa": ((0x600, 0x6FF),), "ur": ((0x600, 0x6FF),), "he": ((0x590, 0x5FF),),
    "hi": ((0x900, 0x97F),), "mr": ((0x900, 0x97F),), "ne": ((0x900, 0x97F),), "bn": ((0x980, 0x9FF),),
    "pa": ((0xA00, 0xA7F),), "gu": ((0xA80, 0xAFF),), "ta": ((0xB80, 0xBFF),), "te": ((0xC00, 0xC7F),),
    "kn": ((0xC80, 0xCFF),), "ml": ((0xD00, 0xD7F),), "th": ((0xE00, 0xE7F),), "ru": ((0x400, 0x4FF),),
    "bg": ((0x400, 0x4FF),), "uk": ((0x400, 0x4FF),), "el": ((0x370, 0x3FF),), "ko": ((0xAC00, 0xD7AF),),
    "ja": ((0x3040, 0x30FF), (0x4E00, 0x9FFF)), "zh": ((0x4E00, 0x9FFF),),
}
_COMMON_WORDS = {
    "en": "the and of to in is that it for you with as on are this be not have",
    "de": "der die und das ist nicht ein eine zu mit den von ich sie auf für es dem",
    "fr": "le la les et des est une un que pas pour dans ce il je vous du qui",
    "es": "el la los y de que en un una por con para es las no se su del",
    "pt": "o a os e de que em um uma para com não é as se do da no",
    "it": "il la e di che un una per con non è le in del della sono gli si",
    "fi": "ja on ei se että oli hän mutta ovat kun tai niin joka myös ole voi olen sen",
    "sw": "na ya wa kwa ni katika la za kuwa hii cha yake si kama lakini au hiyo pia",
    "vi": "và của là có cho một không được trong với các người này để những khi đã ở",
}


def count_sentences(text: str) -> int:
    """Count parts that end in . ! or ? before a space or the end; text after the last one counts as a sentence."""
    plain = _ABBREVIATIONS.sub(lambda found: found[0].replace(".", ""), text).strip()
    return sum(bool(part.strip()) for part in _END.split(plain))


def speaks(text: str, language: str) -> bool:
    """Return whether most letters are of the language's script, or, for Latin script, whether no other known language
    has more of its common words in the text. A language without a rule always passes."""
    code = language.split("-")[0]
    letters = [letter for letter in text if letter.isalpha()]
    if code in _SCRIPTS:
        own = sum(any(low <= ord(letter) <= high for low, high in _SCRIPTS[code]) for letter in letters)
        return 2 * own > len(letters)
    if code not in _COMMON_WORDS:
        return True
    latin = sum(ord(letter) < 0x250 or 0x1E00 <= ord(letter) < 0x1F00 for letter in letters)
    words = re.findall(r"\w+", text.lower())
    counts = {name: sum(word in common for word in words)
              for name, common in ((name, set(listed.split())) for name, listed in _COMMON_WORDS.items())}
    return 2 * latin >= len(letters) and counts[code] == max(counts.values())
