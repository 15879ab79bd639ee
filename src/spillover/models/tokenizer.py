"""The tokenizer: text to token ids and back, the exact bytes of every token, and the model's chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError

from spillover.errors import CheckpointError, RequestError, short_repr
from spillover.models.chat_template import ChatTemplates, TemplateLimit
from spillover.models.gguf.gguf_config import end_token_ids
from spillover.models.gguf.gguf_header import read_header
from spillover.models.gguf.gguf_tokenizer import gguf_tokenizer
from spillover.models.safetensors_folder import eos_ids, read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MOST_TOKENS = 1 << 24
_PROBE = "The 23rd of May,  1998: caf\u00e9 \u4f60\u597d \U0001f642\n\n\tdef f(x): return x**2 # 1,000,000"
_SHORT = 2048  # characters; shorter texts are encoded so fast that the GIL is not worth releasing


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer from a model folder's tokenizer.json or a GGUF file's metadata. `chat_template`: replaces the
    model's own; the name of a file, or the template itself."""
    tokenizer = _load(Path(path).expanduser())
    if chat_template is not None:
        tokenizer.set_chat_template(_given_template(chat_template))
    return tokenizer


def _load(path: Path) -> Tokenizer:
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    raise CheckpointError(f"{path} has no tokenizer; give a model folder with tokenizer.json, or a .gguf file")


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], eos_token_ids: Sequence[int],
                 chat_templates: Mapping[str, str], source: str) -> None:
        """Wrap `backend`. `special_tokens`: by role ("bos_token"); `chat_templates`: by name, such as "default"."""
        self.backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(chat_templates)
        self._source = source
        self._renderer = ChatTemplates()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MOST_TOKENS:
            raise CheckpointError(f"{source}: its tokenizer has token ids up to {self.vocab_size - 1:,}; "
                                  f"{MOST_TOKENS:,} tokens are supported at most")
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        own_eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if own_eos is None else [own_eos]), *eos_token_ids]))
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None

    def set_chat_template(self, text: str) -> None:
        """Replace all of the model's chat templates by this one. Raises CheckpointError if it cannot be compiled."""
        try:
            self._renderer.compile(text)
        except (TemplateError, TemplateLimit) as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from error
        self._templates = {"default": text}
        self.__dict__.pop("fingerprint", None)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Return the special tokens by role, such as "bos_token"."""
        return self._special_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Return the chat templates by name."""
        return self._templates

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return encode(self.backend, text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, index: int) -> bytes:
        """Return the exact bytes that this token adds to the text; empty for an unused id."""
        added = self._added.get(index)
        if added is not None:
            return added.content.encode()
        token = self.backend.id_to_token(index)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTE_OF.get(letter, letter.encode()) for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]],
                            tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
                            **variables: Any) -> str:
        """Return the prompt's text, to be encoded with add_special_tokens=False: the template writes them itself."""
        source = self._templates.get("tool_use") if tools else None
        source = source or self.chat_template
        if source is None:
            raise RequestError(f"{self._source} has no chat template; send a plain prompt, or use an instruct model")
        return self._renderer.render(source, {
            "messages": messages, "tools": tools, "documents": variables.pop("documents", None),
            "add_generation_prompt": add_generation_prompt, **self._special_tokens, **variables})

    def template_trouble(self) -> str | None:
        """Return the error of rendering a short test chat; None if it succeeds, or if there is no template."""
        if self.chat_template is None:
            return None
        try:
            self.apply_chat_template([{"role": "user", "content": "Hello"}])
        except RequestError as error:
            return f"{self._source}: {error}"
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest that is equal for tokenizers that encode texts and render conversations alike."""
        parts = (self.vocab_size, self.encode(_PROBE), sorted(self._special_tokens.items()),
                 sorted(self._templates.items()))
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self.backend.to_str()).get("decoder") or {}
        return any(step.get("type") == "ByteLevel" for step in [decoder, *decoder.get("decoders", [])])

    def _special_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        index: int | None = None if token is None else self.backend.token_to_id(token)
        return index


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the text's token ids. Raises RequestError if the text is not valid Unicode or cannot be encoded."""
    try:
        if len(text) <= _SHORT:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # releases the GIL, so that a server's streams continue
            ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError:
        raise RequestError("the text is not valid UTF-8, or has half of a surrogate pair") from None
    except Exception as error:  # tokenizers raises no specific exception
        raise RequestError(f"the model's tokenizer cannot encode this text ({short_repr(str(error))})") from error
    return ids


def _byte_of_letter() -> dict[str, bytes]:
    """Return GPT-2's table from letters to bytes: printable bytes stand for themselves, others use U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return ({chr(byte): bytes([byte]) for byte in printable}
            | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})


_BYTE_OF = _byte_of_letter()


def _given_template(given: str) -> str:
    """Return `given` if it is a template itself, otherwise the content of the file of that name."""
    return given if "{%" in given or "{{" in given else _template_text(Path(given).expanduser())


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata
    backend = gguf_tokenizer(metadata, path)
    special = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = None if index is None else backend.id_to_token(index)
        if token is not None:
            special[role] = token
    templates = {"default": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}
    names = metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: tokenizer.chat_templates is {short_repr(names)}, not a list of names")
    for name in names:
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}", "")
    for name, text in templates.items():
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: its chat template {short_repr(name)} is {short_repr(text)}, not a text")
    return Tokenizer(backend, special, end_token_ids(metadata, path), templates, str(path))


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; make one with transformers' "
                              "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or send token ids")
    read_json(file)  # checks the JSON first: the package below has no limit on nesting
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.encode("a b")
    except BaseException as error:  # tokenizers raises no specific exception; its panics are not Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise CheckpointError(f"{file} cannot be read as a tokenizer ({short_repr(str(error))})") from error
    # The file may contain padding and truncation settings that were used in training.
    backend.no_padding()
    backend.no_truncation()
    settings = _optional_json(folder / "special_tokens_map.json") | _optional_json(folder / "tokenizer_config.json")
    special = {}
    for role in SPECIAL_TOKENS:
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and _is_utf8(token):
            special[role] = token
    return Tokenizer(backend, special, _folder_eos(folder, "eos_token" in special), _folder_templates(folder, settings),
                     str(folder))


def _folder_eos(folder: Path, known: bool) -> list[int]:
    """Return the end-of-sequence ids of generation_config.json, or those of config.json if none is known otherwise."""
    for file in ("generation_config.json", *(() if known else ("config.json",))):
        eos = _optional_json(folder / file).get("eos_token_id")
        if eos is not None:
            return eos_ids(eos, folder / file)
    return []


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    template = (_template_text(file) if file.is_file()
                else _optional_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template")))
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    for name, text in templates.items():
        if not isinstance(name, str) or not isinstance(text, str) or not _is_utf8(text):
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: its chat template is {short_repr(text)}, not a "
                                  "text")
    extra = folder / "additional_chat_templates"
    return templates | {file.stem: _template_text(file) for file in extra.glob("*.jinja")}


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: JSON can contain half of a surrogate pair, which cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the chat template {str(file)[:256]} cannot be read ({error})") from error


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
