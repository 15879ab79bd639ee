"""A server with a config file, TLS, a chat template, JSON logs and literal special tokens in messages."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cli.main import main
from spillover.cli.serve import serve
from spillover.errors import CheckpointError, SpilloverError
from spillover.models.hub.store import resolve
from spillover.models.literal_text import LiteralText
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from support.servers.running_server import Server, running, until

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content | trim }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(None), TEMPLATE)


@pytest.fixture(scope="module")
def literal(tokenizer: Tokenizer) -> LiteralText:
    return LiteralText(tokenizer)


# The file


def parsed(*arguments: str) -> dict[str, Any]:
    """Return the parameters of `spill serve ARGUMENTS`."""
    with main.make_context("spill", ["serve", *arguments]) as outer:
        return serve.make_context("serve", list(arguments), parent=outer).params


@pytest.mark.parametrize(("suffix", "text"), [
    ("json", '{"port": 9001, "cors_origin": ["http://a", "http://b"], "enforce-eager": true, "log-requests": false,'
             ' "block-size": 32, "model": "some/model", "client-timeout": 2.5}'),
    ("toml", 'port = 9001\ncors-origin = ["http://a", "http://b"]\nenforce_eager = true\nlog-requests = false\n'
             'block-size = 32\nmodel = "some/model"\nclient-timeout = 2.5\n'),
    ("yaml", "port: 9001\ncors-origin: [http://a, http://b]\nenforce-eager: true\nlog_requests: false\n"
             "block_size: 32\nmodel: some/model\nclient-timeout: 2.5\n"),
])
def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path, suffix: str, text: str) -> None:
    file = tmp_path / f"serve.{suffix}"
    file.write_text(text)
    read = parsed("--config", str(file))
    assert (read["port"], read["cors_origins"], read["log_requests"]) == (9001, ("http://a", "http://b"), False)
    assert (read["block_size"], read["enforce_eager"], read["model"]) == (32, (True,), "some/model")
    assert read["client_timeout"] == 2.5
    over = parsed("--port", "9002", "--cors-origin", "http://c", "--config", str(file), "--no-enforce-eager")
    assert (over["port"], over["cors_origins"], over["enforce_eager"]) == (9002, ("http://c",), (False,))
    assert over["block_size"] == 32


@pytest.mark.parametrize(("text", "words"), [
    ('{"prot": 1}', "did you mean 'port'?"), ('{"port": [1]}', "one value"), ('{"port": true}', "not true or false"),
    ('{"enforce-eager": 1}', "true or false"), ("[1]", "flags and their values"), ("{", "cannot be read"),
    ('{"disk": [{"a": 1}]}', "a list of them"), ('{"config": "other.json"}', "not a flag"),
])
def test_a_file_that_is_wrong_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.json"
    file.write_text(text)
    with pytest.raises(SpilloverError, match=words.replace("?", r"\?")):
        parsed("--config", str(file))
    with pytest.raises(SpilloverError, match="cannot be read"):
        parsed("--config", str(tmp_path / "missing.json"))
    with pytest.raises(SpilloverError, match=r"\.json, \.toml or \.yaml"):
        parsed("--config", __file__)
    file.write_text('{"port": "many"}')
    with pytest.raises(click.BadParameter):
        parsed("--config", str(file))


# Text that looks like tokens

PIECES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "a", " b", "é", "\n", "<|", "|>", "im_end", "🙂", "  ", "12"]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(texts, min_size=1, max_size=4))
def test_what_messages_hold_is_text_and_all_else_is_as_always(tokenizer: Tokenizer, literal: LiteralText,
                                                              contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    rendered = tokenizer.apply_chat_template(literal.mark(messages))
    ids = literal.encode(rendered, False)
    assert sum(token in tokenizer.special_ids for token in ids) == 2 * len(contents)
    assert tokenizer.decode(ids, False) == tokenizer.apply_chat_template(messages)
    plain = "".join(contents).replace("<|", "").replace("|>", "")  # without any, the tokens are the usual ones
    rendered = tokenizer.apply_chat_template(literal.mark([{"role": "user", "content": plain}]))
    assert literal.encode(rendered, False) == tokenizer.encode(rendered, False)


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("from a file: {{ messages[0].content }}")
    message = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(resolve(None), str(file)).apply_chat_template(message) == "from a file: hi"
    assert load_tokenizer(resolve(None), "{{ messages | length }}").apply_chat_template(message) == "1"
    for wrong in ("{% for %}", str(tmp_path / "missing"), "no template at all\0"):
        with pytest.raises(CheckpointError, match="chat template"):
            load_tokenizer(resolve(None), wrong)


# A server with all of it


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", folder / "key.pem",
                    "-out", folder / "cert.pem"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def set_up(certificate: Path) -> Iterator[Server]:
    flags = {"load-format": "null", "ssl-certfile": str(certificate / "cert.pem"), "chat-template": TEMPLATE,
             "ssl-keyfile": str(certificate / "key.pem"), "log-format": "json", "max-model-len": 512,
             "special-tokens-in-user-text": False}
    (certificate / "serve.json").write_text(json.dumps(flags))
    with running("--config", str(certificate / "serve.json")) as started:
        yield started


def test_it_serves_https_logs_json_and_counts_text_as_text(set_up: Server, certificate: Path) -> None:
    assert set_up.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=certificate / "cert.pem")
    with httpx.Client(base_url=set_up.url, verify=trusted, timeout=60) as http:
        message = {"role": "user", "content": "a <|im_end|> b"}
        answer = http.post("/tokenize", json={"messages": [message], "return_token_strs": True}).json()
        assert answer["token_strs"].count("<|im_end|>") == 1
        assert http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 3}).status_code == 200
        page = http.get("/docs")
        assert page.status_code == http.get("/page/docs.js").status_code == 200
        assert "//" not in page.text.replace("<!doctype", "")  # nothing from other sites
        with pytest.raises(httpx.HTTPError):
            httpx.get(set_up.url.replace("https", "http") + "/health", timeout=10).raise_for_status()

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in set_up.log().splitlines() if line.startswith("{")]

    until(lambda: any(line.get("path") == "/v1/chat/completions" for line in lines()))
    line = next(line for line in lines() if line.get("path") == "/v1/chat/completions")
    assert (line["method"], line["status"], line["output"], line["level"]) == ("POST", 200, 3, "info")
    assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_a_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    odd = tmp_path / "odd.pem"
    odd.write_text("nothing")
    for flags in (["--ssl-certfile", str(odd)], ["--ssl-certfile", str(tmp_path / "missing.pem")],
                  ["--ssl-keyfile", str(odd)]):
        with pytest.raises(SpilloverError, match="--ssl-certfile"):
            serve.main(["--port", "0", *flags], standalone_mode=False)


def test_text_log_lines_have_a_date(null_server: Server) -> None:
    httpx.get(f"{null_server.url}/v1/models")
    until(lambda: "GET /v1/models 200" in null_server.log())
    line = next(line for line in null_server.log().splitlines() if "GET /v1/models 200" in line)
    assert abs((datetime.fromisoformat(line.split()[0]) - datetime.now().astimezone()).total_seconds()) < 3600
