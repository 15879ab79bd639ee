"""GSM8K: grade-school problems whose answer is a number that is extracted from the text.

`gsm8k` is lm_eval's gsm8k_cot: eight worked examples, then the question, continued up to the next "Q:". `gsm8k-chat`
sends only the question, through the chat template. Both are scored by the same two rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spillover.eval.metrics import Metric
from spillover.eval.target import Target
from spillover.eval.tasks.base import Answer, DataFile, Item, json_lines, read_data

FORM = "JSON lines with question and answer, whose last line is #### and the number"
STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")  # the first match counts
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")  # the last match counts
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # patterns removed before an answer is compared, in this order
STOP = ("Q:", "</s>", "<|im_end|>")
MAX_TOKENS = 256  # lm_eval's limit
CHAT_TOKENS = 512
INSTRUCTION = 'Think step by step, and end with "The answer is N." where N is the number.'
EXAMPLES = (  # from Wei et al. 2022, "Chain-of-Thought Prompting"
    ("There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, "
     "there will be 21 trees. How many trees did the grove workers plant today?",
     "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have "
     "been 21 - 15 = 6. The answer is 6."),
    ("If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
     "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5."),
    ("Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
     "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating 35, "
     "they had 74 - 35 = 39. The answer is 39."),
    ("Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did "
     "Jason give to Denny?",
     "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = 8. "
     "The answer is 8."),
    ("Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have "
     "now?",
     "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9."
     " The answer is 9."),
    ("There were nine computers in the server room. Five more computers were installed each day, from monday to "
     "thursday. How many computers are now in the server room?",
     "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 computers"
     " were added. 9 + 20 is 29. The answer is 29."),
    ("Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many golf "
     "balls did he have at the end of wednesday?",
     "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 more, "
     "he had 35 - 2 = 33 golf balls. The answer is 33."),
    ("Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
     "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 dollars "
     "left. 23 - 15 is 8. The answer is 8."),
)


class Gsm8k:
    metrics = (Metric("exact_match_strict", "strict"), Metric("exact_match_flexible", "flexible"))

    def __init__(self, name: str, file: DataFile, chat: bool) -> None:
        self.name = name
        self.settings: Mapping[str, Any] = {**file.settings, "max_tokens": CHAT_TOKENS if chat else MAX_TOKENS}
        self._rows = json_lines(file, ("question", "answer"), FORM)
        self._chat = chat

    def items(self, target: Target) -> list[Item]:
        return [Item(str(index), row) for index, row in enumerate(self._rows)]

    def ask(self, target: Target, item: Item) -> Answer:
        question, right = item.ask["question"], item.ask["answer"].split("####")[-1].strip()
        text = (target.chat(f"{question}\n{INSTRUCTION}", CHAT_TOKENS) if self._chat
                else target.complete(few_shot(question), MAX_TOKENS, STOP))
        strict, flexible = extract(text)
        return Answer({"strict": float(same(strict, right)), "flexible": float(same(flexible, right))},
                      {"text": text, "strict": strict, "flexible": flexible, "right": right})


def gsm8k(name: str, folder: Path, given: str | None) -> Gsm8k:
    return Gsm8k(name, read_data(name, folder, given, ("gsm8k_test.jsonl",), FORM), name == "gsm8k-chat")


def few_shot(question: str) -> str:
    return "".join(f"Q: {asked}\nA: {answer}\n\n" for asked, answer in EXAMPLES) + f"Q: {question}\nA:"


def extract(text: str) -> tuple[str, str]:
    """Return the number after the first "The answer is", and the last number of all; [invalid] if there is none."""
    strict = STRICT.search(text)
    numbers = FLEXIBLE.findall(text)
    last = next((part for part in numbers[-1] if part), "") if numbers else "[invalid]"
    return strict[1] if strict else "[invalid]", last.strip()


def same(found: str, right: str) -> bool:
    for ignored in IGNORED:
        found, right = re.sub(ignored, "", found), re.sub(ignored, "", right)
    return found.lower() == right.lower()
