"""The runner for CUDA, with its kernels in Triton's interpreter, gives the tokens of the plain one, step by step."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is off where there is a GPU; tests/gpu runs this on it", allow_module_level=True)

from spillover import LLM, SamplingParams
from spillover.engine import assemble, cuda_runner, graphs, sampler
from spillover.engine.cuda_runner import CudaRunner, StepLimits
from spillover.engine.decode_form import DecodeForm
from spillover.engine.outputs import RequestOutput
from spillover.engine.step_inputs import StepInputs
from spillover.kernels.triton import block as on_device
from spillover.models import layers

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "eos_token_id": 3, "torch_dtype": "float32", "tie_word_embeddings": True,
    "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
}


def generate(folder: Path, prompts: list[list[int]], params: list[SamplingParams], **flags: Any) -> list[RequestOutput]:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    with LLM(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, block_size=8, watermark=0.0,
             **limits, **flags) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.finished for output in outputs)
        return outputs


class PaddedSteps:
    """As graphs, every step has the size of the largest of its kind; but it is run, not replayed. Its arrays lie where
    they lay in the step of that key before."""

    sizes = (1, 4)
    prompt_sizes = (8, 16)

    def __init__(self) -> None:
        self.keys: list[graphs.Key] = []
        self.places: dict[graphs.Key, list[Any]] = {}

    def size(self, rows: int) -> int:
        return 4

    def prompt_size(self, rows: int) -> int | None:
        return 16 if rows > 2 else None

    def run(self, key: graphs.Key, step: Any, at_once: bool = False) -> Any:
        self.keys.append(key)
        places, _ = step.args
        recorded = [value for name, value in vars(places).items() if name != "samples" or key.draws]
        assert self.places.setdefault(key, recorded) == recorded
        hidden = step()
        assert not hidden.isnan().any()
        return None if key.draws else hidden


def use_the_device(monkeypatch: pytest.MonkeyPatch, deterministic: bool = False) -> list[Any]:
    """From now on the engine has the other runner and its kernels; returns what each step was prepared as."""
    steps: list[Any] = []

    class Watched(CudaRunner):
        def __init__(self, model: Any, weights: Any, kv: Any, block_size: int, device: torch.device,
                     decode: Any, kv_dtype: str, stage: Any) -> None:
            super().__init__(model, weights, kv, block_size, device, StepLimits(4, 16, 64, 16), decode, kv_dtype, stage,
                             graphs=False, deterministic=deterministic)
            self._graphs = PaddedSteps()

        def _prepare(self, batch: Any) -> Any:
            work = super()._prepare(batch)
            steps.append(work)
            return work

    monkeypatch.setattr(assemble, "Runner", Watched)
    monkeypatch.setattr(layers, "attention_block", lambda *arguments: on_device.attention_block(*arguments[:9]))
    monkeypatch.setattr(layers.Decoder, "_stack", lambda *_: None)  # which only a CPU has
    return steps


def check_forms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on what a decode form sends is held against the same step written as any other; returns their rows."""
    rows: list[int] = []
    runners: list[CudaRunner] = []
    sent, made = DecodeForm.send, CudaRunner._form

    def form(runner: CudaRunner, shape: Any) -> DecodeForm:
        runners[:] = [runner]
        return made(runner, shape)

    def send(form: DecodeForm, items: Any, slots: Any, starts: Any, turn: int, updates: Any) -> int | None:
        place = sent(form, items, slots, starts, turn, updates)
        inputs, runner = runners[0]._inputs, runners[0]
        found = inputs._device.numpy().copy()
        if place is not None:
            assert found[place:place + updates.nbytes].tobytes() == updates.tobytes()
        inputs.begin()
        shape = cuda_runner._decode_shape(form.places.rows)
        places = runner._write(items, slots, np.ones_like(slots), starts, list(range(len(items))), shape, slots)
        assert places == form.places
        wanted, size = inputs._host[inputs.turn], places.rows
        inputs.begin()  # back to the buffer before

        def arrays(at: int, dtype: Any, count: int = size) -> tuple[Any, Any]:
            end = at + count * np.dtype(dtype).itemsize
            return found[at:end].view(dtype), wanted[at:end].view(dtype)

        for at, dtype in ((places.positions, np.int64), (places.sources, np.int32), (places.row_of, np.int32),
                          (places.query_start, np.int32), (places.seq_lens, np.int32), (places.slots, np.int32),
                          (places.temperature, np.float32)):
            np.testing.assert_array_equal(*arrays(at, dtype))
        np.testing.assert_array_equal(*arrays(places.sample_rows, np.int64, len(items)))
        assert arrays(places.turn, np.int32, 1)[0][0] == turn
        known = arrays(places.sources, np.int32)[1] < 0
        warm = arrays(places.temperature, np.float32)[1] > 0
        for (mine, theirs), read in ((arrays(places.token_ids, np.int64), known),
                                     (arrays(places.uniform, np.float64), warm)):
            np.testing.assert_array_equal(mine[read], theirs[read])
        np.testing.assert_array_equal(*arrays(places.tiles, np.int32, 2 * places.num_tiles))
        for at in places.items:
            count = arrays(at, np.int32, 1)[1][0]
            np.testing.assert_array_equal(*arrays(at, np.int32, 4 + 8 * count))
        rows.append(len(items))
        return place

    monkeypatch.setattr(DecodeForm, "send", send)
    monkeypatch.setattr(CudaRunner, "_form", form)
    return rows


def test_tokens_and_logprobs_are_those_of_the_plain_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts beside decodes, two kinds of layers, preemption, and every way to sample."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rng = random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=2, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=5, max_tokens=8, ignore_eos=True),
    ]
    flags = {"num_gpu_blocks_override": 14}  # too few for all: some are preempted
    expected = generate(tmp_path, prompts, params, **flags)
    steps = use_the_device(monkeypatch)
    rows = check_forms(monkeypatch)
    found = generate(tmp_path, prompts, params, **flags)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert len(set(rows)) > 2
    assert sum(one.num_preemptions for one in found) == sum(one.num_preemptions for one in expected) > 0
    assert any(step.decodes for step in steps)
    assert any(step.key is not None and step.key.prompts for step in steps)
    assert any(step.key is None for step in steps)
    for mine, theirs in ((found[3].outputs[0].logprobs, expected[3].outputs[0].logprobs),
                         (found[3].prompt_logprobs[1:], expected[3].prompt_logprobs[1:])):
        assert len(mine) == len(theirs)
        for position, reference in zip(mine, theirs, strict=True):
            assert position.keys() == reference.keys()
            for token, logprob in position.items():
                assert logprob.logprob == pytest.approx(reference[token].logprob, abs=1e-4)


def test_the_deterministic_runner_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3]]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * 2
    expected = generate(tmp_path, prompts, params)
    steps = use_the_device(monkeypatch, deterministic=True)
    rows = check_forms(monkeypatch)
    found = generate(tmp_path, prompts, params)
    assert rows
    assert any(step.decodes for step in steps)
    assert any(step.key is not None and step.key.prompts for step in steps)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


def test_graphs_can_be_recorded_on_padding_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    use_the_device(monkeypatch)
    with LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, block_size=8, max_num_seqs=4,
             max_num_batched_tokens=16, max_model_len=64) as llm:
        llm.engine.runner.capture()
        keys = [(16, False, True), (8, False, True), (4, True), (1, True)]
        assert llm.engine.runner._graphs.keys == [graphs.Key(*key) for key in keys]


def test_slots_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more requests than slots, one after the other and some at once."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1, "use_sliding_window": False}))
    use_the_device(monkeypatch)
    prompts = [[token, 1, 2] for token in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)] * 12
    found = generate(tmp_path, prompts, params)
    assert all(len(one.outputs[0].token_ids) == 2 for one in found)


def test_inputs_put_in_the_same_order_lie_in_the_same_place() -> None:
    inputs = StepInputs(4096, torch.device("cpu"))
    places = []
    for values in ([1, 2, 3], [7]):
        inputs.begin()
        places.append((inputs.put(values, torch.int64, room=5), inputs.put([0.5], torch.float32)))
        inputs.send()
        assert inputs.view(places[-1][0], torch.int64, len(values)).tolist() == values
        assert inputs.view(places[-1][1], torch.float32, 1).tolist() == [0.5]
    assert places[0] == places[1]


def test_the_ladder_of_graphs_ends_at_the_largest_batch() -> None:
    assert graphs.ladder(1) == [1]
    assert graphs.ladder(6) == [1, 2, 4, 6]
    assert graphs.ladder(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graphs.ladder(300)[-3:] == [256, 288, 300]


def test_prompts_are_padded_by_an_eighth_at_most() -> None:
    sizes = graphs.prompt_ladder(1024)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 1024
    assert graphs.prompt_ladder(528)[-2:] == [512, 528]
    assert graphs.prompt_ladder(7) == [7]
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller - 1 <= max(15, size / 8)


def test_a_prompts_graph_is_recorded_the_second_time_its_size_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[graphs.Key] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.Graphs, "_record", lambda self, key, step: recorded.append(key))
    book = graphs.Graphs(torch.device("cpu"), 4, 1024)
    decode, prompt = graphs.Key(4, True), graphs.Key(32, False, True)
    book.run(decode, lambda: torch.zeros(1))
    book.run(prompt, lambda: torch.zeros(1))
    assert recorded == [decode]
    book.run(prompt, lambda: torch.zeros(1))
    assert recorded == [decode, prompt]
    moving = [graphs.Key(8, True, epoch=epoch) for epoch in (1, 2)]
    for key in (moving[0], moving[0], moving[1], moving[1]):
        book.run(key, lambda: torch.zeros(1))
    assert recorded == [decode, prompt, *moving]
    assert set(book._recorded) == {decode, prompt, moving[1]}  # where weights lay before is of no more use
    assert book.prompt_size(33) == 48
    assert book.prompt_size(1024) == 1024
    assert book.prompt_size(1025) is None


def test_random_numbers_of_streams_are_those_of_seeds() -> None:
    seeds, steps = [0, 7, -3, 2**63], [0, 1, 5, 1000]
    streams = np.array([sampler.seed_stream(seed) for seed in seeds], dtype=np.uint64)
    found = sampler.random_numbers(streams, np.array(steps, dtype=np.uint64))
    assert found.tolist() == [sampler.uniform(seed, step) for seed, step in zip(seeds, steps, strict=True)]
