"""The runner for CUDA, with its kernels in Triton's interpreter, gives the plain runner's tokens, step by step."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is off where there is a GPU; tests/gpu runs this on it", allow_module_level=True)

from spillover import LLM, SamplingParams
from spillover.engine.batch import sampler, step_result
from spillover.engine.batch.step_layout import ARRAYS
from spillover.engine.cpu import cpu_backend
from spillover.engine.cuda import graphs
from spillover.engine.cuda.cuda_runner import CudaRunner
from spillover.engine.cuda.decode_inputs import DecodeInputs
from spillover.engine.cuda.step_inputs import HEADER, InputOffsets, StepInputs, StepShape
from spillover.engine.cuda.step_writer import StepWriter
from spillover.engine.output.outputs import RequestOutput
from spillover.engine.speculation.branch_items import BranchItems
from spillover.engine.step import NewRequest, StepItem
from spillover.kernels.triton.attention import ordered_splits
from spillover.kernels.triton.cuda_kernels import CudaKernels
from support.kernels import quick_interpreter
from support.models.tiny_configs import WINDOWED as MODEL

quick_interpreter.install()


def generate(folder: Path, prompts: list[list[int]], params: list[SamplingParams], **flags: Any) -> list[RequestOutput]:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    with LLM(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, block_size=8, watermark=0.0,
             **limits, **flags) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.finished for output in outputs)
        return outputs


class PaddedSteps:
    """A substitute for CUDA graphs: steps have the largest size of their kind, but are run, not replayed. The offsets
    of the arrays must be those of earlier steps with the same key."""

    sizes = (1, 4)
    prompt_sizes = (8, 16)

    def __init__(self) -> None:
        self.keys: list[graphs.Key] = []
        self.offsets: dict[graphs.Key, InputOffsets] = {}

    def size(self, rows: int) -> int:
        return 4

    def prompt_size(self, rows: int) -> int | None:
        return 16 if rows > 2 else None

    def run(self, key: graphs.Key, step: Any, at_once: bool = False) -> Any:
        self.keys.append(key)
        offsets, _ = step.args
        assert self.offsets.setdefault(key, offsets) == offsets
        hidden = step()
        assert not hidden.isnan().any()
        return None if key.draws else hidden


def use_the_device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make the engine use the CUDA runner and its kernels; return the list of prepared steps, which grows."""
    steps: list[Any] = []

    class Watched(CudaRunner):
        def __init__(self, model: Any, weights: Any, kv: Any, block_size: int, limits: Any, transfers: Any,
                     decode: Any = None, kv_dtype: str = "auto", stage: Any = None, shared_with: Any = None) -> None:
            model.kernels = CudaKernels(model.shape, model.cos, model.sin)
            super().__init__(model, weights, kv, block_size, torch.device("cpu"),
                             replace(limits, captured_rows=16), transfers, decode, kv_dtype, stage, graphs=False)
            self._graphs = PaddedSteps()

        def add_head(self, head: Any) -> None:
            head.head.kernels = CudaKernels(head.head.shape, head.head.cos, head.head.sin)
            super().add_head(head)

        def lay_out(self, step: Any) -> Any:
            work = super().lay_out(step)
            steps.append(work)
            return work

    monkeypatch.setattr(cpu_backend, "CpuRunner", Watched)
    return steps


def check_templates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each step sent by a template with the same step written as usual; return the list of their rows."""
    rows: list[int] = []
    writers: list[StepWriter] = []
    sent, made = DecodeInputs.send, StepWriter._template

    def template(writer: StepWriter, shape: Any) -> DecodeInputs:
        writers[:] = [writer]
        return made(writer, shape)

    def send(template: DecodeInputs, items: Any, result_row: int, updates: Any) -> int | None:
        place = sent(template, items, result_row, updates)
        inputs, writer = writers[0].inputs, writers[0]
        found = inputs._device.numpy().copy()
        if place is not None:
            assert found[place:place + updates.nbytes].tobytes() == updates.tobytes()
        inputs.begin()
        offsets, _ = writer.write(items, template.offsets.shape, result_row)
        assert offsets == template.offsets
        pinned, buffer = inputs.pinned, inputs.buffer
        inputs.begin()  # returns to the previous buffer

        def both(at: int, count: int, dtype: Any = np.int32) -> tuple[Any, Any]:
            return found[at:at + count * np.dtype(dtype).itemsize].view(dtype), pinned.array(buffer, at, count, dtype)

        known = both(offsets.arrays["sources"], offsets.shape.rows)[1] < 0
        warm = both(offsets.arrays["temperature"], offsets.shape.rows, np.float32)[1] > 0
        for name, at in offsets.arrays.items():
            mine, theirs = both(at, offsets.size(name), ARRAYS[name][0])
            if name == "sample_rows":
                mine, theirs = mine[:len(items.items)], theirs[:len(items.items)]
            read = {"token_ids": known, "uniform": warm}.get(name, slice(None))
            np.testing.assert_array_equal(mine[read], theirs[read], name)
        assert both(offsets.result_row, 1)[0][0] == result_row
        np.testing.assert_array_equal(*both(offsets.tiles, 2 * offsets.shape.tiles))
        for at in offsets.work:
            count = both(at, 1)[1][0]
            np.testing.assert_array_equal(*both(at, HEADER + 8 * count))
        rows.append(len(items.items))
        return place

    monkeypatch.setattr(DecodeInputs, "send", send)
    monkeypatch.setattr(StepWriter, "_template", template)
    return rows


def test_tokens_and_logprobs_are_those_of_the_plain_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal for chunked prompts batched with decodes, two layer groups, preemption, all sampling."""
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
    flags = {"num_gpu_blocks_override": 14}  # too few blocks for all, so some requests are preempted
    expected = generate(tmp_path, prompts, params, **flags)
    steps = use_the_device(monkeypatch)
    rows = check_templates(monkeypatch)
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


def test_verified_drafts_are_those_of_the_plain_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified drafts are equal in batches with decodes and prompts, in graphs with sampling and without."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    prompts = [[5, 6] * 6, [7, 8, 9] * 5, [1, 2, 3], [4] * 9, [9, 9, 8] * 3]
    params = [
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.4, seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.1, ignore_eos=True),
    ]
    expected = generate(tmp_path, prompts, params)
    steps = use_the_device(monkeypatch)
    found = generate(tmp_path, prompts, params, speculative_adaptive=False,
                     speculative_config={"method": "suffix", "num_speculative_tokens": 3})
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert sum(one.drafts.accepted for one in found) > 10
    keys = {(step.key.draws, step.key.prompts) for step in steps if step.key is not None}
    assert keys >= {(True, True), (False, True)}
    assert any(step.num_samples > 4 for step in steps)


@pytest.mark.parametrize("branches", [0, 2])
def test_drafts_of_a_second_runner_are_those_of_the_plain_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 branches: int) -> None:
    """A copy of the layers drafts in the requests' blocks, several steps ahead of the host, with equal results."""
    config = {**MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = random.Random(6)
    prompts = [[rng.randrange(97) for _ in range(4)] for _ in range(2)]
    params = [SamplingParams(temperature=index * 0.8, max_tokens=5, ignore_eos=True, seed=index) for index in range(2)]
    plain = generate(tmp_path, prompts, params)
    steps, branched, add = use_the_device(monkeypatch), [], BranchItems.add

    def adding(self: BranchItems, *arguments: Any) -> list[NewRequest]:
        new = add(self, *arguments)
        branched.extend(new)
        return new

    monkeypatch.setattr(BranchItems, "add", adding)
    found = generate(tmp_path, prompts, params, speculative_adaptive=False,
                     speculative_config={"method": "substitute", "num_speculative_tokens": 2,
                                         "max_branches": branches})
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert sum(one.drafts.tokens for one in found) >= 3
    assert bool(branched) == (branches > 0)
    if not branches:  # otherwise log probabilities are computed outside of graphs
        drafted = [step for step in steps if step.decodes]
        assert len(drafted) >= 3
        assert all(step.key is not None and step.key.draws for step in drafted)


def test_drafts_of_a_draft_model_are_those_of_the_plain_runner(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model with its own blocks gives equal results: it first computes the prompt, and two tokens in one step
    after a fully accepted draft."""
    config = {**MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [3, 4]]
    params = [SamplingParams(temperature=index * 0.8, max_tokens=7, ignore_eos=True, seed=index) for index in range(2)]
    plain = generate(tmp_path, prompts, params)
    steps = use_the_device(monkeypatch)
    found = generate(tmp_path, prompts, params, speculative_adaptive=False, num_speculative_tokens=2,
                     speculative_model=str(tmp_path))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert all(one.drafts.accepted == one.drafts.tokens > 2 for one in found), "it is the same model"
    assert any(step.decodes for step in steps)


def test_drafts_of_a_head_are_those_of_the_plain_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that drafts in a layer of the model's blocks gives equal results after a chunked prompt and a prefix hit,
    with drafts of different lengths. Drafts stay on the device unless a request's penalties need them."""
    head = {**MODEL, "num_hidden_layers": 1, "use_sliding_window": False, "draft_vocab_size": 61, "num_attention_heads":
            4, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    for name, config in (("model", MODEL), ("head", head)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    rng = random.Random(4)
    prompts = [[rng.randrange(97) for _ in range(count)] for count in (17, 2)]
    prompts.append(prompts[0])
    params = [SamplingParams(temperature=index % 2 * 0.8, max_tokens=(4, 4, 7)[index], ignore_eos=True, seed=index,
                             repetition_penalty=(1.3, 1.0, 1.0)[index]) for index in range(3)]
    drafts: list[tuple[int, ...]] = []
    accepted = step_result.accepted

    def noted(item: StepItem, drawn: Any, request: Any, simulated: Any, draft: Any) -> Any:
        if item.draft:
            assert item.draft_on_device == (draft is not None)
            on_device.append(item.draft_on_device)
            drafts.append(tuple((draft or item.draft)[:len(item.draft)]))
        return accepted(item, drawn, request, simulated, draft)

    on_device: list[bool] = []
    monkeypatch.setattr(step_result, "accepted", noted)
    flags: dict[str, Any] = {"speculative_adaptive": False, "async_scheduling": False,
                             "speculative_config": {"method": "eagle3", "model": str(tmp_path / "head"),
                                                    "num_speculative_tokens": 2}}
    plain = generate(tmp_path / "model", prompts, params, **flags)
    expected, drafts[:] = list(drafts), []
    assert not any(on_device)
    steps = use_the_device(monkeypatch)
    rows = check_templates(monkeypatch)
    on_device.clear()
    found = generate(tmp_path / "model", prompts, params, **flags)
    assert set(on_device) == {True, False}
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert drafts == expected
    assert {len(draft) for draft in drafts} >= {1, 2}
    assert len(set(drafts)) > 3
    assert rows
    assert any(step.key is not None and step.key.prompts for step in steps)


def test_a_few_new_tokens_are_attended_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3]]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * 2
    expected = generate(tmp_path, prompts, params)
    steps = use_the_device(monkeypatch)
    short = attended_by_pieces(monkeypatch)
    rows = check_templates(monkeypatch)
    found = generate(tmp_path, prompts, params)
    assert rows
    assert any(step.decodes for step in steps)
    assert any(step.key is not None and step.key.prompts for step in steps)
    assert 7 in short
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


def attended_by_pieces(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Process short sequences in pieces, as long ones are; return a set that collects their numbers of new tokens."""
    seen: set[int] = set()
    cut = ordered_splits.short_chunk_splits

    def noted(rows: Any, slots: Any, seq_lens: Any, counts: Any, window: int | None, whole: bool) -> Any:
        seen.update(counts.tolist())
        return cut(rows, slots, seq_lens, counts, window, whole)

    monkeypatch.setattr(ordered_splits, "LONG", 2)
    monkeypatch.setattr(ordered_splits, "short_chunk_splits", noted)
    return seen


def test_graphs_can_be_captured_on_padding_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    use_the_device(monkeypatch)
    with LLM(str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, block_size=8, max_num_seqs=4,
             max_num_batched_tokens=16, max_model_len=64) as llm:
        llm.engine.runner.capture()
        keys = [(16, False, True), (8, False, True), (4, True), (1, True)]
        assert llm.engine.runner._graphs.keys == [graphs.Key(*key) for key in keys]


def test_slots_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are freed: many more requests than slots run, one after another and some at once."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1, "use_sliding_window": False}))
    use_the_device(monkeypatch)
    prompts = [[token, 1, 2] for token in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)] * 12
    found = generate(tmp_path, prompts, params)
    assert all(len(one.outputs[0].token_ids) == 2 for one in found)


def test_arrays_of_one_shape_lie_in_the_same_places_and_do_not_overlap() -> None:
    inputs = StepInputs(1 << 16, torch.device("cpu"))
    shape = StepShape(rows=7, requests=3, samples=2, tiles=2)
    offsets = InputOffsets.of(shape, groups=2, longest=64, kv_heads=1)
    assert offsets == InputOffsets.of(shape, groups=2, longest=64, kv_heads=1)
    inputs.begin()
    for value, array in enumerate(vars(inputs.pinned.arrays(inputs.buffer, offsets)).values(), 1):
        array[:] = value
    inputs.pinned.array(inputs.buffer, offsets.result_row, 1)[:] = 77
    inputs.pinned.array(inputs.buffer, offsets.tiles, 4)[:] = 88
    for group, place in enumerate(offsets.work):
        inputs.pinned.array(inputs.buffer, place, offsets.work_size)[:] = 90 + group
    inputs.send(inputs.pinned, offsets.end)
    fields = list(vars(inputs.pinned.arrays(inputs.buffer, offsets)))
    for name in offsets.arrays:
        assert inputs.array(offsets, name).tolist() == [fields.index(name) + 1] * offsets.size(name)
    assert inputs.view(offsets.result_row, torch.int32, 1).tolist() == [77]
    assert inputs.view(offsets.tiles, torch.int32, 4).tolist() == [88] * 4
    assert [inputs.view(place, torch.int32, 1).item() for place in offsets.work] == [90, 91]


def test_the_ladder_of_graphs_ends_at_the_largest_batch() -> None:
    assert graphs.ladder(1) == [1]
    assert graphs.ladder(6) == [1, 2, 4, 6]
    assert graphs.ladder(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graphs.ladder(300)[-3:] == [256, 288, 300]


def test_small_steps_have_graphs_of_their_own_where_drafts_are_verified() -> None:
    sizes = graphs.prompt_ladder(64, drafts=True)
    assert sizes == sorted(set(sizes))
    assert sizes[:4] == [2, 3, 4, 5]
    assert sizes[-4:] == graphs.prompt_ladder(64)
    assert graphs.prompt_ladder(0, drafts=True) == []


def test_prompts_are_padded_by_an_eighth_at_most() -> None:
    sizes = graphs.prompt_ladder(1024)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 1024
    assert graphs.prompt_ladder(528)[-2:] == [512, 528]
    assert graphs.prompt_ladder(7) == [7]
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller - 1 <= max(15, size / 8)


def test_a_prompts_graph_is_captured_the_second_time_its_size_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[graphs.Key] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.Graphs, "_capture", lambda self, key, step: captured.append(key))
    book = graphs.Graphs(torch.device("cpu"), 4, 1024)
    decode, prompt = graphs.Key(4, True), graphs.Key(32, False, True)
    book.run(decode, lambda: torch.zeros(1))
    book.run(prompt, lambda: torch.zeros(1))
    assert captured == [decode]
    book.run(prompt, lambda: torch.zeros(1))
    assert captured == [decode, prompt]
    moving = [graphs.Key(8, True, graph_version=graph_version) for graph_version in (1, 2)]
    for key in (moving[0], moving[0], moving[1], moving[1]):
        book.run(key, lambda: torch.zeros(1))
    assert captured == [decode, prompt, *moving]
    assert set(book._captured) == {decode, prompt, moving[1]}  # graphs for earlier addresses of weights are discarded
    assert book.prompt_size(33) == 48
    assert book.prompt_size(1024) == 1024
    assert book.prompt_size(1025) is None


def test_random_numbers_of_streams_are_those_of_seeds() -> None:
    seeds, steps = [0, 7, -3, 2**63], [0, 1, 5, 1000]
    streams = np.array([sampler.seed_stream(seed) for seed in seeds], dtype=np.uint64)
    found = sampler.random_numbers(streams, np.array(steps, dtype=np.uint64))
    assert found.tolist() == [sampler.uniform(seed, step) for seed, step in zip(seeds, steps, strict=True)]
