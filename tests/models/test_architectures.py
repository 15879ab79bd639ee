"""Every architecture computes what Hugging Face computes, however its prompt is cut up and whoever shares the step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.batch import AttentionBatch
from spillover.kernels.formats.mxfp4 import MXFP4, dequantize, quantize
from spillover.models.checkpoint import Checkpoint
from spillover.models.layers import KVViews, ModelStep
from spillover.models.registry import architecture
from support.hf_reference import VOCAB, all_architectures, config_dict, greedy, reference_logits, tiny_model
from support.loading import load_weights

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class StateDict:
    """A checkpoint whose file is a dictionary."""

    path = Path("memory")

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def file(self, name: str) -> Path:
        return self.path

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().clone()

    def close(self) -> None: ...

    def __enter__(self) -> StateDict:
        return self

    def __exit__(self, *error: object) -> None: ...


class PagedModel:
    """A model with its pool; sequences grow by chunks, blocks lie anywhere, those behind a window are given up."""

    def __init__(self, checkpoint: Checkpoint, block_size: int = 8, num_blocks: int = 256) -> None:
        arch = architecture(checkpoint.config)
        config = arch.config(checkpoint.config)
        self.model = arch.build(config, CPU, torch.float32)
        self.weights = load_weights(checkpoint, config, arch.weight_specs(config), torch.float32, CPU)
        self.block_size = block_size
        groups = self.model.groups
        shape = (num_blocks, len(groups[0].layers), 2, config.num_kv_heads, block_size * config.head_dim)
        # What an earlier request left behind must not show.
        self.kv = KVViews(torch.full(shape, 50.0), groups)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)
        self.lengths: dict[str, int] = {}
        self.tables: dict[tuple[str, int], list[int]] = {}

    def step(self, chunks: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Logits [len(chunk), vocab] of each sequence's new tokens."""
        starts = {name: self.lengths.get(name, 0) for name in chunks}
        ends = {name: starts[name] + len(chunk) for name, chunk in chunks.items()}
        self.lengths.update(ends)
        rows = torch.tensor([row for row, chunk in enumerate(chunks.values()) for _ in chunk], dtype=torch.int32)
        positions = torch.cat([torch.arange(starts[name], ends[name]) for name in chunks])
        query_start = torch.tensor([0, *(len(chunk) for chunk in chunks.values())]).cumsum(0).int()
        batches = tuple(
            AttentionBatch(
                query_start,
                torch.tensor(list(ends.values()), dtype=torch.int32),
                self._block_table(chunks, starts, group, members.window),
                positions,
                rows,
                self.block_size,
                max(len(chunk) for chunk in chunks.values()),
                max(ends.values()),
            )
            for group, members in enumerate(self.model.groups)
        )
        token_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        hidden = self.model.forward(ModelStep(token_ids, positions, batches), self.weights, self.kv)
        logits = self.model.logits(hidden, self.weights)
        assert logits.dtype == hidden.dtype
        logits = logits.float()
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))

    def _block_table(
        self, chunks: Mapping[str, list[int]], starts: Mapping[str, int], group: int, window: int | None
    ) -> Tensor:
        tables = []
        for name in chunks:
            table = self.tables.setdefault((name, group), [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
            if window is not None:
                for behind in range(max(0, starts[name] - window + 1) // self.block_size):
                    table[behind] = 0
            tables.append(table)
        width = max(len(table) for table in tables)
        return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways the CPU can compute."""
    if request.param == "reference":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no native kernels here")
    return str(request.param)


@lru_cache
def reference(name: str) -> tuple[Any, StateDict]:
    model, config = tiny_model(name)
    return model, StateDict(config, model.state_dict())


@lru_cache
def prompts_and_logits(name: str) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    rng = random.Random(7)
    prompts = {str(length): [rng.randrange(1, VOCAB) for _ in range(length)] for length in (1, 37, 16, 53)}
    return prompts, {key: reference_logits(reference(name)[0], prompt) for key, prompt in prompts.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5  # a flat answer would match anything
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("name", all_architectures())
def test_logits_match_for_several_sequences_in_one_step(name: str, kernels: str) -> None:
    prompts, expected = prompts_and_logits(name)
    found = PagedModel(reference(name)[1]).step(prompts)
    for key in prompts:
        assert_close(found[key], expected[key])


@pytest.mark.parametrize("name", all_architectures())
def test_logits_match_when_prefill_is_chunked_and_mixed_with_decode(name: str, kernels: str) -> None:
    """Each step takes a different, odd number of tokens of each sequence, one of them a token at a time."""
    prompts, expected = prompts_and_logits(name)
    paged = PagedModel(reference(name)[1])
    rng = random.Random(11)
    left = {key: list(prompt) for key, prompt in prompts.items()}
    found: dict[str, list[Tensor]] = {key: [] for key in prompts}
    while any(left.values()):
        chunks = {}
        for key, rest in left.items():
            size = 1 if key == "16" else rng.choice((0, 1, 3, 7, 11))
            if rest and size:
                chunks[key], left[key] = rest[:size], rest[size:]
        for key, logits in paged.step(chunks).items() if chunks else ():
            found[key].append(logits)
    for key in prompts:
        assert_close(torch.cat(found[key]), expected[key])


@lru_cache
def greedy_reference(name: str) -> tuple[list[int], list[int]]:
    prompt = prompts_and_logits(name)[0]["37"]
    return prompt, greedy(reference(name)[0], prompt, 64)


@pytest.mark.parametrize("name", all_architectures())
def test_64_greedy_tokens_are_those_of_generate(name: str, kernels: str) -> None:
    prompt, expected = greedy_reference(name)
    paged = PagedModel(reference(name)[1])
    logits = paged.step({"a": prompt})["a"]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(paged.step({"a": tokens[-1:]})["a"][-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "mixtral", "gpt_oss"])
def test_native_logits_do_not_depend_on_the_batch_or_the_chunks(name: str) -> None:
    """Bit for bit: what lets greedy tokens be the same however the scheduler cut the prompt."""
    if native.library() is None:
        pytest.skip("no native kernels here")
    prompts, _ = prompts_and_logits(name)
    together = PagedModel(reference(name)[1]).step(prompts)["37"]
    paged = PagedModel(reference(name)[1])
    prompt = prompts["37"]
    pieces = [paged.step({"37": prompt[start : start + 5]})["37"] for start in range(0, len(prompt), 5)]
    assert torch.equal(torch.cat(pieces), together)


def test_mxfp4_experts_stay_as_stored_and_compute_what_their_values_say(kernels: str) -> None:
    model, config = tiny_model("gpt_oss", seed=3)
    tensors = dict(model.state_dict())
    for layer in range(config["num_hidden_layers"]):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            dense = tensors.pop(name)  # [experts, in, out]
            blocks, scales = quantize(dense.transpose(1, 2).contiguous())
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            dense.copy_(dequantize(blocks, scales, torch.float32).transpose(1, 2))
    checkpoint = StateDict({**config_dict(model), "quantization_config": {"quant_method": "mxfp4"}}, tensors)
    paged = PagedModel(checkpoint)
    layer_weights = paged.weights.parts["layers.0"]
    assert layer_weights["experts.gate_up"].format == MXFP4
    assert {tensor.dtype for tensor in layer_weights["experts.gate_up"].tensors} == {torch.uint8}
    prompt = prompts_and_logits("gpt_oss")[0]["37"]
    assert_close(paged.step({"a": prompt})["a"], reference_logits(model, prompt))
