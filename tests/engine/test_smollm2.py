"""The real default model: its tokens are those of transformers, and all request parameters take effect."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spillover import LLM, SamplingParams, StructuredOutputs
from spillover.errors import RequestError
from spillover.eval.in_process import EngineTarget
from spillover.eval.tasks.choices import choose, encode, hellaswag
from spillover.models.hub.store import resolve

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The history of the steam engine begins",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "The three most important rules of good writing are",
    "Water boils at 100 degrees because",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, max_num_batched_tokens=96) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path: Path = resolve(None)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.no_grad()
def greedy_after(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the most likely token after the prompt and after each of the tokens but the last. If they equal the
    tokens, these are greedy decoding's; one pass over all is much cheaper than a step for each."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0]  # [T, V]
    return logits[len(prompt) - 1:].argmax(-1).tolist()


def test_paris(llm: LLM) -> None:
    output = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"


def test_greedy_tokens_equal_transformers_on_the_same_file(llm: LLM, reference: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 48
        assert tokens == greedy_after(reference, output.prompt_token_ids, tokens)


def test_logprobs_and_prompt_logprobs_equal_transformers(llm: LLM, reference: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(TEXTS[2], params, use_tqdm=False)[0]
    prompt, drawn = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([prompt + drawn])).logits[0].float(), -1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        row = output.prompt_logprobs[position]
        assert row is not None
        assert row[prompt[position]].logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=2e-3)
        assert set(expected[position - 1].topk(2).indices.tolist()) <= set(row)
    assert output.outputs[0].logprobs is not None
    for index, (token, row) in enumerate(zip(drawn, output.outputs[0].logprobs, strict=True)):
        assert next(iter(row)) == token
        assert row[token].rank == 1
        assert row[token].logprob == pytest.approx(expected[len(prompt) - 1 + index, token].item(), abs=2e-3)
    total = sum(row[token].logprob for token, row in zip(drawn, output.outputs[0].logprobs, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_same_seed_same_text_whatever_else_is_in_the_batch(llm: LLM) -> None:
    wanted = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24)
    alone = llm.generate(TEXTS[0], wanted, use_tqdm=False)[0].outputs[0].token_ids
    rng = random.Random(0)
    for size in (2, 5, 9):
        others = [SamplingParams(temperature=rng.choice([0, 0.7, 1.3]), top_k=rng.choice([0, 5]),
                                 repetition_penalty=rng.choice([1.0, 1.2]), max_tokens=rng.randint(1, 30))
                  for _ in range(size - 1)]
        prompts = [rng.choice(TEXTS) for _ in others]
        place = rng.randrange(size)
        prompts.insert(place, TEXTS[0])
        outputs = llm.generate(prompts, [*others[:place], wanted, *others[place:]], use_tqdm=False)
        assert outputs[place].outputs[0].token_ids == alone


def test_n_siblings_differ_and_share_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12)
    first = llm.generate(TEXTS[2], params, use_tqdm=False)[0]
    again = llm.generate(TEXTS[2], params, use_tqdm=False)[0]
    texts = [output.text for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts == [output.text for output in again.outputs]


def test_stop_strings_and_stop_tokens_end_the_text(llm: LLM) -> None:
    plain = llm.generate(TEXTS[4], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0]
    stop = plain.text[12:17]
    stopping = SamplingParams(temperature=0, max_tokens=40, stop=[stop])
    cut = llm.generate(TEXTS[4], stopping, use_tqdm=False)[0].outputs[0]
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert llm.generate(TEXTS[4], kept, use_tqdm=False)[0].outputs[0].text == cut.text + stop
    token = plain.token_ids[5]
    ended = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token])
    output = llm.generate(TEXTS[4], ended, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_min_tokens_keeps_the_end_away(llm: LLM) -> None:
    short = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)[0].outputs[0]
    longer = SamplingParams(temperature=0, max_tokens=60, min_tokens=len(short.token_ids) + 10)
    assert len(llm.chat(QUESTION, longer, use_tqdm=False)[0].outputs[0].token_ids) >= len(short.token_ids) + 10


def test_structured_output_is_what_the_grammar_says(llm: LLM) -> None:
    schema = {"type": "object", "required": ["city", "population"], "additionalProperties": False,
              "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}}}
    wanted = [
        StructuredOutputs(json=schema),
        StructuredOutputs(regex=r"[A-Z][a-z]{3,8} [0-9]{4}"),
        StructuredOutputs(choice=("yes", "no", "perhaps")),
    ]
    params = [SamplingParams(temperature=0.8, seed=index, max_tokens=80, structured_outputs=each)
              for index, each in enumerate(wanted)]
    outputs = [output.outputs[0] for output in llm.generate(["Paris:"] * 3, params, use_tqdm=False)]
    document = json.loads(outputs[0].text)
    assert set(document) == {"city", "population"}
    assert re.fullmatch(r"[A-Z][a-z]{3,8} [0-9]{4}", outputs[1].text)
    assert outputs[2].text in ("yes", "no", "perhaps")
    assert all(output.finish_reason == "stop" for output in outputs)


def test_streaming_grows_to_the_same_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = llm.generate(TEXTS[0], params, use_tqdm=False)[0].outputs[0].text
    seen = [output.outputs[0].text for output in llm.stream(TEXTS[0], params)]
    assert seen[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert len(seen) > 10


def test_an_abandoned_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.cache.free + stats.cache.evictable == stats.cache.total


def test_a_shared_prefix_is_counted_as_a_device_hit(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prefix = "In the beginning there was a very long sentence that many prompts share, word for word. " * 4
    params = SamplingParams(temperature=0, max_tokens=2)
    first, second = (llm.generate(prefix + tail, params, use_tqdm=False)[0] for tail in ("One", "Two"))
    assert first.sources.device == 0
    assert second.sources.device >= 64
    assert second.sources.total == len(second.prompt_token_ids)
    assert second.num_cached_tokens == second.sources.device
    timings = second.timings
    assert timings is not None
    assert math.isclose(timings.queue + timings.restore + timings.prefill + timings.decode,
                        timings.finished - timings.arrived)


def test_bad_requests_get_one_sentence_and_lose_nothing(llm: LLM) -> None:
    for prompt, words in (([], "empty"), ([1] * 2000, "2000 tokens, but .* at most 1024"),
                          ([49152], "out of range")):
        with pytest.raises(RequestError, match=words):
            llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(RequestError):
        StructuredOutputs(json={}, regex="a")
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(unclosed"))
    with pytest.raises(RequestError):
        llm.generate("hello", bad, use_tqdm=False)
    assert llm.stats().num_waiting == 0


def test_hellaswag_scores_equal_transformers(llm: LLM, reference: PreTrainedModel, shared_data: Path) -> None:
    target = EngineTarget(llm, "default")
    task = hellaswag("hellaswag", shared_data / "eval", None)
    for item in task.items(target)[:6]:
        sums = []
        for prompt in encode(target.encode, item.ask):
            with torch.no_grad():
                rows = torch.log_softmax(reference(torch.tensor([prompt.token_ids])).logits[0].float(), -1)
            sums.append(sum(rows[place - 1, prompt.token_ids[place]].item()
                            for place in range(prompt.start, len(prompt.token_ids))))
        detail = task.ask(target, item).detail
        assert detail["logprobs"] == pytest.approx(sums, abs=2e-2)
        assert (detail["choice"], detail["choice_norm"]) == choose(item.ask, sums)
