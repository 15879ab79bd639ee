"""The text of one branch so far, as the tokens that the next request begins with.

Token ids are kept, not text: generated text is sent back as the very tokens that the model sampled, so their KV is
found again, and a fork has its parent's tokens by construction. Fixed text is encoded where a gen, a select, a fork or
the end of a message follows it. The tokens of a chat are those of the chat template for all messages; if a template
does not extend what it rendered before (it strips the thoughts or blanks of an earlier answer), the template wins: the
prompt is rebuilt, which is counted, and the cache is used as far as the tokens are the same.
"""

from __future__ import annotations

import copy

from spillover.programs.backend import Answer, Backend, Message, Prompt
from spillover.programs.expressions import Role
from spillover.programs.lifetime import ProgramError


class Context:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokenized = backend.tokenizes  # whether token ids are kept
        self._ids: list[int] = []
        self._pending = ""  # fixed text after these tokens
        self._text = ""  # text of a program without roles
        self._role: Role | None = None  # role of the open message
        self._content = ""  # text of the open message
        self._plain = False  # whether there is text outside of roles
        self.messages: list[Message] = []  # closed messages
        self.rebuilds = 0  # prompts whose template did not extend the one before

    def forked(self) -> Context:
        """Return an independent copy that continues from the same tokens."""
        if self._tokenized:
            self._commit()
        made = copy.copy(self)
        made._ids, made.messages = list(self._ids), list(self.messages)
        made.rebuilds = 0
        return made

    # What a program adds

    def add(self, text: str) -> None:
        if self._role is not None:
            self._content += text
            self._pending += text if self._role == "assistant" and self._tokenized else ""
            return
        if self.messages:
            raise ProgramError(f"text outside of a role, behind messages: {text[:40]!r}; put it in user(...) or "
                               "assistant(...)")
        self._plain = True
        self._text += text
        self._pending += text

    def open(self, role: Role) -> None:
        if self._role is not None:
            raise ProgramError(f"a message of {role} begins before that of {self._role} has ended")
        if self._plain:
            raise ProgramError(f"{role}(...) behind text outside of a role: {self._text[:40]!r}; put all text in "
                               "roles, or none")
        self._tokenized = self._tokenized and self._backend.renders
        if role == "assistant" and self._tokenized:
            self._ids = self._rendered()
        self._role, self._content = role, ""

    def close(self) -> None:
        assert self._role is not None
        if self._role == "assistant" and self._tokenized:
            self._commit()
        self.messages.append({"role": self._role, "content": self._content})
        self._role, self._content = None, ""

    def answer(self, answer: Answer) -> None:
        """Append the answer of a gen."""
        if self._tokenized:
            kept = self._kept(answer)
            self._ids += self._backend.encode(answer.text) if kept is None else kept
        self._wrote(answer.text)

    def chosen(self, text: str, ids: list[int]) -> None:
        """Append the choice of a select."""
        self._ids += ids
        self._wrote(text)

    # Prompts

    def prompt(self) -> Prompt:
        """Return the prompt that a gen or a select continues."""
        self._check_place()
        if not self._tokenized:
            return self._untokenized()
        self._commit()
        if not self._ids:
            raise ProgramError("gen or select at the very beginning: a prompt needs some text before it")
        return Prompt(list(self._ids))

    def ahead(self) -> list[int]:
        """Return the tokens that the next request is likely to begin with; changes nothing."""
        if self._role in ("system", "user") or not self._tokenized:
            return []
        if self._role is None and self.messages:
            return self._rendered(count=False) if self.messages[-1]["role"] != "assistant" else []
        # The last token may change when more text follows.
        return self._ids + self._encoded(self._pending)[:-1]

    def text(self) -> str:
        """Return the text; for a chat one paragraph per message."""
        spoken = [*self.messages, *([{"role": self._role, "content": self._content}] if self._role else [])]
        return "\n".join(f"{message['role']}: {message['content']}" for message in spoken) if spoken else self._text

    # Helpers

    def _wrote(self, text: str) -> None:
        if self._role is None:
            self._plain = True
            self._text += text
        else:
            self._content += text

    def _check_place(self) -> None:
        if self._role in ("system", "user"):
            raise ProgramError(f"gen or select in a message of {self._role}: the model writes in assistant(...) only")
        if self._role is None and self.messages:
            raise ProgramError("gen or select outside of a role, behind messages; put it in assistant(...)")

    def _commit(self) -> None:
        if self._pending:
            self._ids += self._encoded(self._pending)
            self._pending = ""

    def _encoded(self, text: str) -> list[int]:
        """Encode text that follows the tokens; with bos if it is the first text."""
        return self._backend.encode(text, special=not self._ids) if text else []

    def _untokenized(self) -> Prompt:
        if self._role is None:
            if not self._text:
                raise ProgramError("gen at the very beginning: a prompt needs some text before it")
            return Prompt(text=self._text)
        begun = ({"role": "assistant", "content": self._content},) if self._content else ()
        return Prompt(messages=(*self.messages, *begun))

    def _rendered(self, count: bool = True) -> list[int]:
        """Return the tokens of all messages up to the assistant's answer, extending the known tokens if possible."""
        rendered = self._backend.render(self.messages)
        known = self._ids
        if rendered[:len(known)] == known:
            return rendered
        # Generated tokens may differ from the encoding of their text; the texts decide.
        whole, before = self._backend.decode(rendered), self._backend.decode(known)
        if whole.startswith(before):
            return known + self._backend.encode(whole[len(before):])
        self.rebuilds += count
        return rendered

    def _kept(self, answer: Answer) -> list[int] | None:
        """Return the generated tokens that the text consists of, without a stop string or the token that ended it."""
        ids = answer.token_ids
        if ids is None or answer.finish_reason != "stop":
            return ids
        anchor = self._ids[-1:]  # decoders treat the first token of a text specially
        skipped = len(self._backend.decode(anchor))

        def text(count: int) -> str:
            return self._backend.decode([*anchor, *ids[:count]])[skipped:]

        if answer.stop_reason is None and text(len(ids) - 1) == answer.text:
            return ids[:-1]  # usual case: a single token ended it
        for count in range(len(ids), 0, -1):
            whole = text(count)
            if answer.text.startswith(whole):
                rest = answer.text[len(whole):]
                return ids[:count] + (self._backend.encode(rest) if rest else [])
        return None
