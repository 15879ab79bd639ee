"""A model whose chat template never ends: its chats are rejected, and the server keeps running."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.servers.running_server import running

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = "{% if messages[0].content == 'go' %}" + LOOP + "{% endif %}{{ messages[0].content }}"


def test_a_template_that_never_ends_does_not_hold_up_the_server(tmp_path: Path) -> None:
    template = tmp_path / "hostile.jinja"
    template.write_text(TEMPLATE)
    with (running("--load-format", "null", "--max-model-len", "512", "--chat-template", str(template)) as server,
          server.http() as http, ThreadPoolExecutor(1) as pool):

        def chat(content: str) -> int:
            answer = http.post("/v1/chat/completions", timeout=120, json={
                "messages": [{"role": "user", "content": content}], "max_tokens": 2})
            return answer.status_code

        assert chat("hello") == 200
        hostile, answered = pool.submit(chat, "go"), 0
        while not hostile.done():
            assert http.get("/health", timeout=60).status_code == 200
            answered += 1
        assert hostile.result() == 400
        assert answered > 3  # while the template ran; on the event loop it would be one at most
        assert chat("hello") == 200
        assert server.metrics()['spillover:requests_refused_total{reason="chat_template_limit"}'] == 1


def test_a_template_that_fails_is_told_at_the_start(tmp_path: Path) -> None:
    template = tmp_path / "failing.jinja"
    template.write_text("{{ 10**(10**8) }}")
    with running("--load-format", "null", "--max-model-len", "512", "--chat-template", str(template)) as server:
        assert "chat requests will be rejected" in server.log()
