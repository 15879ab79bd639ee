"""One tiny model with a chat template that has roles, in this process and served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spillover import LLM
from spillover.programs import backend_of
from spillover.programs.recording import RecordingBackend
from support.models.text_model import write_text_model
from support.servers.running_server import Server, running

TEMPLATE = ("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "model"
    write_text_model(folder)
    return folder


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=2048, max_num_seqs=16, num_gpu_blocks_override=1200, chat_template=TEMPLATE) as made:
        yield made


@pytest.fixture
def backend(llm: LLM) -> RecordingBackend:
    """Return a backend with a cold cache that records its requests."""
    llm.reset_prefix_cache()
    inner = backend_of(llm)
    inner.gate.forget()
    return RecordingBackend(inner)


@pytest.fixture(scope="session")
def served(model: Path) -> Iterator[Server]:
    with running(str(model), "--max-model-len", "2048", "--num-gpu-blocks-override", "1200", "--chat-template",
                 TEMPLATE) as started:
        yield started
