"""An EAGLE-3 head drafts by its definition, from state stored in the KV blocks; the text stays the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spillover import LLM, SamplingParams
from spillover.engine.output.outputs import DraftCounts
from spillover.errors import SpilloverError
from support.mixed_requests import COUNT, facts, params_of, prompts_of
from support.models.eagle_heads import ReferenceHead, head_config, head_tensors, predictable, write_head
from support.models.hf_reference import save_checkpoint, tiny_model
from support.models.text_model import write_text_model
from support.watched_drafts import WatchedDrafts


@dataclass(frozen=True)
class Pair:
    """A model, a head for it, and the reference implementation of the head."""

    target: Path
    head: Path
    reference: ReferenceHead


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"norm_before_residual": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}},
    "mistral_sliding": {"norm_before_fc": True, "norm_output": True},
    "gpt_oss": {},  # experts, and two layer groups, each with its own blocks
}


def pair_of(folder: Path, target: PreTrainedModel, draft_vocab: int, **more: Any) -> Pair:
    tensors = head_tensors(target, draft_vocab)
    if more.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(3 * target.config.hidden_size) + 0.5
    config = head_config(target, tensors, **more)
    flat = {**config, **more.get("eagle_config", {})}
    return Pair(folder / "target", write_head(folder / "head", config, tensors), ReferenceHead(target, flat, tensors))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made = {}
    for name, more in VARIANTS.items():
        folder = tmp_path_factory.mktemp(name)
        target, _ = tiny_model(name)
        save_checkpoint(target, folder / "target")
        made[name] = pair_of(folder, target, 200, **more)
    return made


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a head that is mostly right because of what it finds in its KV."""
    folder = tmp_path_factory.mktemp("similar")
    target = write_text_model(folder / "target", layers=4)
    tensors = predictable(target, 0.05)
    target.save_pretrained(folder / "target")
    config = head_config(target, tensors, norm_before_residual=True)
    return Pair(folder / "target", write_head(folder / "head", config, tensors), ReferenceHead(target, config, tensors))


def load(pair: Pair, count: int | None = 4, **flags: Any) -> LLM:
    config = None if count is None else {"method": "eagle3", "model": str(pair.head), "num_speculative_tokens": count,
                                         "adaptive": flags.pop("adaptive", False)}
    # Other tests share the GPU: without a budget an engine would allocate all free memory.
    bounded = flags.get("device") != "cuda" or "num_gpu_blocks_override" in flags
    budget = {} if bounded else {"gpu_memory": "2GB"}
    return LLM(pair.target, **{"device": "cpu", "block_size": 8, "max_model_len": 96, "watermark": 0.0, "seed": 3,
                               "speculative_config": config, **budget, **flags})


def asked(rng: random.Random, count: int, shared: int = 0, vocab: int = 256) -> list[dict[str, list[int]]]:
    start = [rng.randrange(vocab) for _ in range(shared)]
    return [{"prompt_token_ids": start + [rng.randrange(vocab) for _ in range(rng.randint(1, 30))]}
            for _ in range(count)]


SCHEDULES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 1, {"max_num_batched_tokens": 16}),
    ("llama", 5, {"max_num_batched_tokens": 23, "num_gpu_blocks_override": 13, "enable_prefix_caching": False}),
    ("qwen3", 2, {"max_num_batched_tokens": 512}),
    ("qwen3", 4, {"max_num_batched_tokens": 17, "host_memory": "1MB", "num_gpu_blocks_override": 13}),
    ("mistral_sliding", 3, {"max_num_batched_tokens": 19}),
    ("gpt_oss", 3, {"max_num_batched_tokens": 21}),
)


@pytest.mark.parametrize(("name", "count", "flags"), SCHEDULES)
def test_drafts_are_those_of_the_definition(pairs: dict[str, Pair], name: str, count: int,
                                            flags: dict[str, Any]) -> None:
    """Drafts match the definition with chunks, preemptions, cached and restored prefixes; greedy and sampled."""
    watch(pairs[name], count, {**flags, "device": "cpu"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "count", "flags"), SCHEDULES)
@pytest.mark.parametrize("eager", [False, True])
def test_drafts_are_those_of_the_definition_on_a_gpu(pairs: dict[str, Pair], name: str, count: int,
                                                     flags: dict[str, Any], eager: bool) -> None:
    watch(pairs[name], count, {**flags, "device": "cuda", "enforce_eager": eager}, others=0.03)


def watch(pair: Pair, count: int, flags: dict[str, Any], others: float = 0.0) -> None:
    rng = random.Random(count)
    prompts = asked(rng, 5) + asked(rng, 3, shared=24)
    params = [SamplingParams(temperature=index % 2 * 0.7, seed=index, max_tokens=14, ignore_eos=True)
              for index in range(8)]
    with load(pair, count, async_scheduling=False, skip_tokenizer_init=True, max_num_seqs=4, **flags) as llm:
        watched = WatchedDrafts.of(llm.engine.runner)
        outputs = [output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check()
        sources = [output.sources for output in outputs]
    assert watched.check(pair.reference, others) > len(watched.drafts) / 2 > 40
    assert {len(found) for _, found, _ in watched.drafts} == set(range(1, count + 1))
    if "num_gpu_blocks_override" in flags:
        assert sum(output.num_preemptions for output in outputs) > 0
    if flags.get("enable_prefix_caching", True):
        assert any(True in flag for tokens, flag in watched.zeros.items() if len(tokens) > 8), "no prefix was found"
    if "host_memory" in flags:
        assert any(source is not None and source.host for source in sources)


CONDITIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (5, {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 33, "max_num_seqs": 10, "host_memory": "1MB",
         "spill": "eager"}),
    (2, {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "async_scheduling": False,
         "enable_prefix_caching": False}),
    (3, {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8", "adaptive": True}),
)


@pytest.mark.parametrize(("count", "conditions"), CONDITIONS)
def test_64_mixed_requests_are_the_same_with_and_without(similar: Pair, count: int, conditions: dict[str, Any]) -> None:
    compare(similar, count, conditions, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("count", "conditions"), CONDITIONS)
def test_64_mixed_requests_are_the_same_on_a_gpu(similar: Pair, count: int, conditions: dict[str, Any]) -> None:
    compare(similar, count, conditions, "cuda")


def compare(pair: Pair, count: int, conditions: dict[str, Any], device: str) -> None:
    rng = random.Random(count)
    prompts, params = prompts_of(rng), [params_of(rng) for _ in range(COUNT)]
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
    kept = {name: value for name, value in conditions.items() if name == "kv_cache_dtype"}
    with load(pair, None, num_gpu_blocks_override=400, device=device, **kept) as llm:
        plain = llm.generate(wanted, params, use_tqdm=False)
    with load(pair, count, device=device, **conditions) as llm:
        found = llm.generate(wanted, params, use_tqdm=False)
        for mine, theirs in zip(found, plain, strict=True):
            assert facts(mine) == facts(theirs)
        stats = llm.stats()
        assert stats.speculation is not None
        counts = stats.speculation.counts
        assert counts == sum((output.drafts for output in found), DraftCounts())
        if not conditions.get("adaptive"):
            assert 0.2 < counts.by_position[0] / counts.drafts < 1  # random drafts would be accepted far less often
        assert llm.engine.runner.weight_bytes == llm.plan.device_weight_bytes
        llm.engine.scheduler.check()
        assert stats.cache.free + stats.cache.evictable == stats.cache.total


def restored_acceptance(pair: Pair, folder: Path, device: str) -> None:
    """Send the same prompts before and after a restart, with KV kept on a disk and in host memory only."""
    prompts = [{"prompt_token_ids": [start, 65 + start % 7, 66, *range(100, 140)]} for start in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    flags: dict[str, Any] = {"disk": [f"{folder}:8MB"], "host_memory": "1MB", "spill": "eager", "device": device,
                             "num_gpu_blocks_override": 24, "max_num_seqs": 2}
    share, texts = [], []
    for _ in range(2):
        with load(pair, 4, **flags) as llm:
            for _ in range(2):
                found = llm.generate(prompts, params, use_tqdm=False)
                texts.append([output.outputs[0].token_ids for output in found])
                counts = sum((output.drafts for output in found), DraftCounts())
                share.append(counts.accepted / counts.tokens)
            sources = [output.sources for output in found if output.sources is not None]
            assert sum(source.host + source.disk for source in sources) > 0, "nothing was restored"
    assert all(text == texts[0] for text in texts)
    assert share[0] > 0.5
    assert min(share[1:]) > share[0] - 0.03


def test_acceptance_behind_a_restored_prefix_is_that_before(similar: Pair, tmp_path: Path) -> None:
    restored_acceptance(similar, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_acceptance_behind_a_restored_prefix_is_that_before_on_a_gpu(similar: Pair, tmp_path: Path) -> None:
    restored_acceptance(similar, tmp_path, "cuda")


def test_kv_of_one_head_is_not_taken_for_that_of_another(similar: Pair, tmp_path: Path) -> None:
    """Blocks of the same tokens are distinct without a head, or with another one."""
    tensors = head_tensors(similar.reference.target, 300, seed=5)
    other = write_head(tmp_path / "other", head_config(similar.reference.target, tensors), tensors)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    asked = {"prompt_token_ids": list(range(100, 150))}
    for pair, count, hits in ((similar, 4, False), (similar, 4, True), (similar, None, False),
                              (Pair(similar.target, other, similar.reference), 4, False)):
        with load(pair, count, disk=[f"{tmp_path / 'kv'}:8MB"], spill="eager") as llm:
            output = llm.generate(asked, params, use_tqdm=False)[0]
            assert output.sources is not None
            assert (output.sources.disk > 0) == hits


def test_acceptance_can_be_simulated_with_drafts_that_are_made(similar: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with load(similar, 4, load_format="dummy", speculative_simulate="0.9,0.6,0.3") as llm:
        llm.generate([{"prompt_token_ids": [index, 2]} for index in range(8)], params, use_tqdm=False)
        stats = llm.stats().speculation
        assert stats is not None
        assert stats.simulated
        counts = stats.counts
        assert 0.8 < counts.by_position[0] / counts.drafts < 1
        assert len(counts.by_position) == 3


def test_requests_that_are_left_early_harm_nobody(similar: Pair) -> None:
    prompts = [[65 + index, 66] * 5 for index in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with load(similar, None) as llm:
        plain = [llm.generate({"prompt_token_ids": each}, params, use_tqdm=False)[0].outputs[0] for each in prompts]
    with load(similar, 4) as llm:
        for index, prompt in enumerate(prompts):
            seen = []
            for output in llm.stream({"prompt_token_ids": prompt}, params):
                seen.append(list(output.outputs[0].token_ids))
                if index % 2 and len(seen) == 2:
                    break
            assert all(tokens == list(plain[index].token_ids[:len(tokens)]) for tokens in seen)
        llm.engine.scheduler.check()


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"hidden_size": 32}, {}, "for hidden states of size 32, and those of the model have 64"),
    ({"num_key_value_heads": 4}, {}, "4 key/value heads of 16, and the model 2 of 16"),
    ({"num_hidden_layers": 2}, {}, "has 2 layers, and an EAGLE-3 head has one"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "before layer 9, and the model has the layers 0 to 3"),
    ({"num_aux_hidden_states": 5}, {}, "hidden states of 5 layers, and does not say of which"),
    ({"fc_norm": True}, {}, "fc_norm True is not supported"),
    ({"draft_vocab_size": 250}, {}, "'lm_head.weight' has shape"),
    ({}, {"d2t": None}, "no tensor 'd2t' maps them to the model's 320"),
    ({}, {"d2t": torch.full((300,), 100)}, "names tokens from 100 to 399, and the model has 0 to 319"),
    ({}, {"fc.weight": None}, "has no tensor 'fc.weight'"),
    ({}, {"midlayer.self_attn.k_proj.weight": None}, "'midlayer.self_attn.k_proj.weight'"),
)


@pytest.mark.parametrize(("config", "tensors", "words"), REFUSED)
def test_a_head_that_does_not_fit_is_refused_before_anything_is_loaded(
    similar: Pair, tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = {**similar.reference.w, **tensors}
    write_head(tmp_path, {**similar.reference.config, **config},
               {name: tensor for name, tensor in changed.items() if tensor is not None})
    monkeypatch.setattr("spillover.engine.assemble.load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(SpilloverError, match=words.replace("(", "\\(")) as refused:
        load(Pair(similar.target, tmp_path, similar.reference))
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(("flags", "words"), [
    ({"method": "eagle3"}, "needs the folder of a head"),
    ({"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 65}, "from 1 to 64"),
    ({"method": "ngram", "model": "HEAD"}, "needs no model"),
    ({"method": "eagle3", "model": "TARGET"}, "4 layers, and an EAGLE-3 head has one"),
    ({"method": "draft_model", "model": "HEAD"}, "'LlamaForCausalLMEagle3' is not supported.*method eagle3"),
])
def test_methods_and_models_that_do_not_go_together_are_refused(similar: Pair, flags: dict[str, Any],
                                                                words: str) -> None:
    names = {"HEAD": str(similar.head), "TARGET": str(similar.target)}
    config = {name: names.get(value, value) for name, value in flags.items()}
    with pytest.raises(SpilloverError, match=words):
        load(similar, None, speculative_config=config)


def test_without_weights_there_is_nothing_to_read(similar: Pair) -> None:
    with pytest.raises(SpilloverError, match="--load-format null has no"):
        load(similar, 4, load_format="null")


def test_other_names_of_the_same_head_are_read(similar: Pair, tmp_path: Path) -> None:
    """A head as the speculators library writes it is read: nested config, tensors of layer 0, own embeddings."""
    config = dict(similar.reference.config)
    outer = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": config.pop("draft_vocab_size"),
             "norm_before_residual": config.pop("norm_before_residual"),
             "eagle_aux_hidden_state_layer_ids": [2, 2, 1], "transformer_layer_config": config}
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in similar.reference.w.items()}
    renamed["embed_tokens.weight"] = similar.reference.target.get_input_embeddings().weight
    write_head(tmp_path, outer, renamed)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for pair in (similar, Pair(similar.target, tmp_path, similar.reference)):
        with load(pair, 3) as llm:
            found.append(llm.generate({"prompt_token_ids": [3, 68, 66]}, params, use_tqdm=False)[0].drafts)
    assert found[0] == found[1]
    assert found[0].accepted > 5
