"""KV events of an engine in a separate process that is killed: subscribers learn at once which blocks remain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from spillover import SamplingParams
from spillover.server.engine.async_llm import AsyncLLM
from support.events.kv_mirror import Subscriber

MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5, "torch_dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


async def ask(client: AsyncLLM, prompt: list[int]) -> None:
    async for _ in client.answers(client.factory.make(None, prompt, PARAMS), None):
        pass


def test_a_killed_engine_holds_what_its_disk_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    addresses: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    flags: dict[str, Any] = {
        "skip_tokenizer_init": True, "load_format": "dummy", "device": "cpu",
        "block_size": 8, "max_model_len": 192, "num_gpu_blocks_override": 60,
        "disk": (f"{tmp_path}/kv:8MB",), "spill": "eager",
        "kv_events_config": {"enable_kv_cache_events": True, **addresses}}

    async def killed_and_started_again() -> None:
        client = AsyncLLM(str(tmp_path), **flags)
        subscriber = None
        try:
            await client.start()
            subscriber = Subscriber(**addresses)
            await ask(client, list(range(60)))
            deadline = time.monotonic() + 20
            while not any(medium == "STORAGE" for medium, _, _ in subscriber.mirror.held):
                assert time.monotonic() < deadline
                subscriber.heal()
            stored = {each for medium, _, each in subscriber.mirror.held if medium == "STORAGE"}
            first, before = client.info.pid, subscriber.mirror.sequence
            os.kill(first, signal.SIGKILL)
            while client.info.pid == first or not client.ready:
                assert time.monotonic() < deadline + 40
                await asyncio.sleep(0.01)
            subscriber.receive()
            subscriber.heal()
            assert {medium for medium, _, _ in subscriber.mirror.held} == {"STORAGE"}
            assert stored <= {each for _, _, each in subscriber.mirror.held}
            assert before is not None
            assert subscriber.mirror.sequence is not None
            assert subscriber.mirror.sequence > before + 1
        finally:
            if subscriber is not None:
                subscriber.close()
            await client.close()

    asyncio.run(killed_and_started_again())
