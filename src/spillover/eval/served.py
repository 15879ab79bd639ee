"""A target for a model behind an OpenAI-compatible server: spillover, vLLM, SGLang; llama.cpp for generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spillover.bench.serving.served_model import JsonServer, ServedModel, ServerTokenizer
from spillover.errors import SpilloverError
from spillover.eval.target import Prompt
from spillover.models.tokenizer import Tokenizer

TIMEOUT = 600.0  # timeout of one answer in seconds, including its time in the queue
GREEDY: dict[str, Any] = {"temperature": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # overrides a server's defaults
BY_ID = "token_id:"  # prefix of token names for servers that name tokens by id


class ServedTarget:
    def __init__(self, url: str, tokenizer: Tokenizer | None = None, api_key: str | None = None) -> None:
        """Query a server for its model. `tokenizer` replaces the server's own."""
        self._server = JsonServer(url, {} if api_key is None else {"Authorization": f"Bearer {api_key}"}, TIMEOUT)
        served = ServedModel.connect(url, api_key=api_key)
        self._url = url
        self._tokenizer = tokenizer
        self._remote = served.tokenizer if isinstance(served.tokenizer, ServerTokenizer) else None
        self._model = served.name
        self.name = f"{served.name} at {url}"
        self.max_len = served.max_model_len
        self.prefix = self._prefix()

    def encode(self, text: str, special: bool = True) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.encode(text, special)
        if self._remote is None:
            raise SpilloverError(f"the server at {self._url} has no /tokenize; give --tokenizer, a model folder or "
                                 "GGUF file")
        return self._remote.encode(text, special)

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        return [self._echoed(prompt, 1)["token_logprobs"][prompt.start:len(prompt.token_ids)] for prompt in prompts]

    def top(self, prompt: Prompt, count: int) -> list[dict[int, float]]:
        found = self._echoed(prompt, count, return_tokens_as_token_ids=True)
        rows = zip(prompt.token_ids[prompt.start:], found["token_logprobs"][prompt.start:],
                   found["top_logprobs"][prompt.start:], strict=False)  # the sampled token follows the prompt's
        named: list[dict[int, float]] = []
        for token, logprob, likeliest in rows:
            if not all(name.startswith(BY_ID) for name in likeliest):
                raise SpilloverError(f"the server at {self._url} does not name tokens by id "
                                     "(return_tokens_as_token_ids), which --reference needs; spillover and vLLM do")
            named.append({int(name.removeprefix(BY_ID)): value for name, value in likeliest.items()} | {token: logprob})
        return named

    def complete(self, text: str, max_tokens: int, stop: Sequence[str]) -> str:
        body = {"prompt": text, "max_tokens": max_tokens, "stop": list(stop), **GREEDY}
        return str(self._choice("/v1/completions", body)["text"])

    def chat(self, text: str, max_tokens: int) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **GREEDY}
        return str(self._choice("/v1/chat/completions", body)["message"]["content"] or "")

    def close(self) -> None:
        """Abort pending requests; the server itself keeps running."""
        self._server.close()

    def _echoed(self, prompt: Prompt, count: int, **more: Any) -> dict[str, Any]:
        """Return log probabilities of all the prompt's tokens, and of one sampled after them."""
        body = {"prompt": prompt.token_ids, "max_tokens": 1, "echo": True, "logprobs": count, **GREEDY, **more}
        try:
            found: dict[str, Any] = self._choice("/v1/completions", body).get("logprobs") or {}
        except SpilloverError as error:
            if "echo" not in str(error).lower():
                raise
            found = {}
        if len(found.get("token_logprobs") or ()) < len(prompt.token_ids):
            raise SpilloverError(f"the server at {self._url} gives no log probabilities of a prompt's tokens (echo "
                                 "with logprobs in /v1/completions); spillover, vLLM and SGLang do. gsm8k, gsm8k-chat "
                                 "and ifeval do not need them")
        return found

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = self._server.post(path, {"model": self._model, **body})["choices"][0]
        return choice

    def _prefix(self) -> int | None:
        if self._tokenizer is not None:
            first = self._tokenizer.bos_token_id
            return first if first is not None else self._tokenizer.eos_token_id
        if self._remote is None:
            return None
        plain, whole = self._remote.encode("a", False), self._remote.encode("a")
        return whole[0] if whole[1:len(plain) + 1] == plain else None
