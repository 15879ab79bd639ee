"""Many `openai` clients at once; tests/server/test_openai_client.py tests a single one."""

from __future__ import annotations

import asyncio

import openai
from server_process import ServerProcess


def test_many_at_once_get_the_answers_they_would_get_alone(server: ServerProcess) -> None:
    address = {"base_url": f"{server.url}/v1", "api_key": "none"}
    prompts = [f"The number after {number} is" for number in range(12)]
    with openai.OpenAI(**address, max_retries=0) as client:
        alone = [client.completions.create(model="default", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
                 for prompt in prompts]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(model="default", prompt=prompt, max_tokens=6, temperature=0,
                                                 stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(**address, max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    assert asyncio.run(together()) == alone
