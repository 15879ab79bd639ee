"""`spill quantize`: other engines read its output, --quantization loads the same weights, and calibration pays off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fuzz_seeds import byte_level_fields
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from spillover import LLM, SamplingParams
from spillover.cli.main import main
from spillover.engine.config import EngineConfig
from spillover.engine.planned import plan_model
from spillover.errors import SpilloverError
from spillover.kernels.fields import LinearShape
from spillover.kernels.formats.base import Linear
from spillover.kernels.quantize import InputStats, round_to_fp8, round_to_int
from spillover.models.checkpoint import open_checkpoint
from spillover.models.export import export
from spillover.models.hub.store import list_models, verify
from spillover.models.loader import load_parts
from spillover.models.quantize import calibration
from spillover.models.quantize.calibration_text import read_tokens
from spillover.models.quantize.quantize import QuantizeOptions, quantize
from spillover.models.quantize.view import open_quantized
from spillover.models.registry import read_architecture
from spillover.models.tokenizer import load_tokenizer
from support import starved
from support.models.gguf_cases import CASES, FIELDS, random_model
from support.models.gguf_writing import write_like_llama_cpp
from support.models.paged_model import CPU, PagedModel, one_thread

__all__ = ["one_thread"]
KINDS = ("int4", "int8", "fp8")
TEXT = "the that a the\nthat the a a that\n"
GROUP = 32  # divides all rows of the tiny models


def tiny_gguf(folder: Path, case: str = "llama", kind: Kind = Kind.F32) -> Path:
    arch, config, fields = CASES[case]
    model = random_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    fields = FIELDS | fields | byte_level_fields()
    matrices = None if kind is Kind.F32 else (lambda _name, dims: kind if dims == 2 else Kind.F32)
    return write_like_llama_cpp(folder / f"{case}.gguf", model, arch, fields, kind_of=matrices)


def tiny(folder: Path, case: str = "llama") -> Path:
    """Write a bfloat16 folder, as models are published."""
    return export(tiny_gguf(folder, case), folder / "bf16", "bfloat16")


def linears(folder: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of the layers' linears, by name."""
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in sorted(checkpoint.names())
                if name.endswith("proj.weight") and ".layers." in name}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_dequantises_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    source = tiny(tmp_path)
    folder = quantize(source, tmp_path / "out", QuantizeOptions(kind)).folder
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = torch.tensor([[1, 5, 9]])
    theirs(ids)  # dequantises the weights
    found = theirs.state_dict()
    for name, weight in linears(source).items():
        made = (round_to_fp8(weight, torch.bfloat16) if kind == "fp8"
                else round_to_int(weight, int(kind[3:]), GROUP, torch.bfloat16))
        assert torch.equal(found[name], made.dequantize(torch.bfloat16)), name
    assert torch.equal(found["model.embed_tokens.weight"], open_checkpoint(source).read("model.embed_tokens.weight"))


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_loading_quantises_to_what_the_folder_holds(kind: str, case: str, tmp_path: Path) -> None:
    source = tiny(tmp_path, case)
    written = quantize(source, tmp_path / "out", QuantizeOptions(kind))
    folder = open_checkpoint(written.folder)
    with folder, open_quantized(source, written.scheme, CPU) as view:
        assert view.names() == folder.names()
        for name in folder.names():
            assert torch.equal(view.read(name), folder.read(name)), name
            assert (view.shape(name), view.dtype(name)) == (folder.shape(name), folder.dtype(name))
        assert view.config["quantization_config"] == folder.config["quantization_config"]
    tokens = []
    for model, flags in ((source, {"quantization": kind}), (written.folder, {})):
        with LLM(model, device="cpu", gpu_memory="64MB", max_model_len=64, **flags) as llm:
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            tokens.append(llm.generate({"prompt_token_ids": [1, 5, 9]}, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_the_plan_counts_the_codes(tmp_path: Path) -> None:
    source = str(tiny(tmp_path))
    sizes = {kind: plan_model(EngineConfig(model=source, device="cpu", quantization=kind)).plan.weight_bytes
             for kind in (None, "int8", "int4")}
    assert sizes["int4"] < sizes["int8"] < sizes[None]  # type: ignore[operator]


def test_weights_that_would_stay_on_disk_are_refused(tmp_path: Path) -> None:
    """Weights that would stay on disk are rejected, because each read would quantise them again."""
    source = starved.write_config(tmp_path, "llama")
    flags: dict[str, Any] = {"quantization": "int8", "weights": "sequential"}
    budget = starved.least(source, **flags)
    with pytest.raises(SpilloverError, match=r"--quantization int8 quantises weights while they load, and host memory"):
        starved.answer(source, [], load_format="auto", gpu_memory=str(budget), host_memory="1MB", **flags)


def kl(source: Path, quantized: Path, sequences: list[list[int]]) -> float:
    logits = []
    for path in (source, quantized):
        with open_checkpoint(path) as checkpoint:
            model = PagedModel(checkpoint)
            logits.append(torch.cat([model.step({str(index): ids})[str(index)] for index, ids in enumerate(sequences)]))
    wanted, found = (each.log_softmax(-1) for each in logits)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
def test_calibration_halves_the_divergence(case: str, tmp_path: Path) -> None:
    source, text = tiny(tmp_path, case), tmp_path / "text.txt"
    text.write_text(TEXT * 60)
    plain = quantize(source, tmp_path / "plain", QuantizeOptions("int4"))
    calibrated = quantize(source, tmp_path / "calibrated", QuantizeOptions("int4", calibration=text))
    assert calibrated.tokens >= 512
    random = torch.Generator().manual_seed(0)
    words = load_tokenizer(source).encode(TEXT)
    sequences = [[words[int(index)] for index in torch.randint(len(words), (40,), generator=random)] for _ in range(4)]
    before, after = (kl(source, each.folder, sequences) for each in (plain, calibrated))
    assert before > 1e-4
    assert after <= before / 2, (before, after)
    with open_checkpoint(plain.folder) as one, open_checkpoint(calibrated.folder) as other:
        assert one.names() == other.names()
        assert one.config == other.config


def test_an_engine_calibrates_once_and_keeps_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with --calibrate has the weights of `spill quantize --calibrate`; other texts make other copies."""
    monkeypatch.setenv("SPILLOVER_CACHE", str(tmp_path / "cache"))
    source, text = tiny(tmp_path), tmp_path / "text.txt"
    text.write_text(TEXT * 60)
    written = quantize(source, tmp_path / "out", QuantizeOptions("int4", calibration=text)).folder
    prompt, params = {"prompt_token_ids": [1, 5, 9, 3]}, SamplingParams(temperature=0, max_tokens=12, logprobs=0)

    def answer(**flags: Any) -> Any:
        with LLM(max_model_len=64, num_gpu_blocks_override=8, **flags) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob

    wanted = answer(model=str(written))
    assert answer(model=str(source), quantization="int4", calibrate=str(text)) == wanted
    assert wanted != answer(model=str(source), quantization="int4")
    (copy,) = list_models()
    assert verify(copy.name).nbytes == copy.nbytes
    made = copy.path.stat().st_mtime_ns
    assert answer(model=str(source), quantization="int4", calibrate=str(text)) == wanted
    assert [each.path.stat().st_mtime_ns for each in list_models()] == [made]
    text.write_text(TEXT * 61)
    answer(model=str(source), quantization="int4", calibrate=str(text))
    assert len(list_models()) == 2


@pytest.mark.parametrize(("flags", "said"), [
    ({"calibrate": "text.txt"}, "--calibrate needs the weights of a model and --quantization int4 or int8"),
    ({"calibrate": "text.txt", "quantization": "fp8"}, "--calibrate needs"),
    ({"calibrate": "text.txt", "quantization": "int4", "load_format": "dummy"}, "--calibrate needs"),
    ({"calibrate": "there-is-none.txt", "quantization": "int4"}, "cannot read --calibrate 'there-is-none.txt'"),
])
def test_calibrations_of_an_engine_that_are_none(flags: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SpilloverError) as refused:
        LLM(str(tiny(tmp_path)), **flags)
    assert said in str(refused.value)


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
def test_no_codes_depend_on_the_products_that_calibration_leaves_out(case: str, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = tiny(tmp_path, case), tmp_path / "text.txt"
    text.write_text(TEXT * 60)
    quick = quantize(source, tmp_path / "quick", QuantizeOptions("int4", calibration=text)).folder
    monkeypatch.setattr(calibration, "LAST", ())
    whole = quantize(source, tmp_path / "whole", QuantizeOptions("int4", calibration=text)).folder
    with open_checkpoint(quick) as one, open_checkpoint(whole) as other:
        for name in sorted(one.names()):
            assert torch.equal(one.read(name), other.read(name)), name


def test_sums_of_inputs_are_those_of_all_steps() -> None:
    observed, random = calibration.Observed(), torch.Generator().manual_seed(0)
    weight = Linear(observed, LinearShape((8,), 600), (torch.randn(8, 600, generator=random),))  # three pieces of rows
    steps = [torch.randn(40, 600, generator=random) for _ in range(2)]
    for x in steps:
        assert torch.equal(observed.linear(x, weight), x @ weight.tensors[0].T)
    x = torch.cat(steps)
    (total,) = observed.sums.values()
    assert torch.allclose(total.triu(), (x.T @ x).triu(), atol=1e-4)
    found, expected = InputStats.of(total), InputStats.of(total.triu() + total.triu(1).T)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.importance, expected.importance)
    assert torch.equal(found.factor, expected.factor)


def test_a_gguf_file_in_codes_is_dequantised_and_said_to_be(tmp_path: Path) -> None:
    source, out = tiny_gguf(tmp_path, kind=Kind.Q8_0), tmp_path / "out"
    run = CliRunner().invoke(main, ["quantize", str(source), "--to", "int8", "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert "was already quantised" in run.stderr
    assert "int8 in groups of 32" in run.stderr
    assert run.stdout.strip() == str(out)
    with open_checkpoint(source) as stored, open_checkpoint(out) as written:
        arch, config = read_architecture(written.config, out)
        parts = dict(load_parts(written, config, arch.weight_specs(config), torch.float32, lambda *_: CPU))
        down = parts["layers.1"]["down"]
        assert isinstance(down, Linear)
        wanted = stored.read("model.layers.1.mlp.down_proj.weight")
        found = down.format.dequantize(down, torch.float32)
        assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()
    assert load_tokenizer(out).encode("the that") == load_tokenizer(source).encode("the that")


def test_shards_are_indexed_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path)
    folder = quantize(source, tmp_path / "out", QuantizeOptions("int4"), shard_nbytes=20_000).folder
    assert len(list(folder.glob("*.safetensors"))) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert "model.layers.0.self_attn.q_proj.weight_packed" in index["weight_map"]
    with monkeypatch.context() as patched:
        patched.setattr("spillover.models.quantize.scheme.Scheme.stored", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize(source, tmp_path / "broken", QuantizeOptions("int4"))
    assert not list(tmp_path.glob("*broken*"))


def test_what_is_ignored_stays_as_it_is(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    ignored = ("model.layers.0.mlp.down_proj", r"re:.*layers\.1\.self_attn.*")
    folder = quantize(source, tmp_path / "out", QuantizeOptions("int4", ignored=ignored)).folder
    kept = set(linears(folder))
    assert kept == {name for name in linears(source) if name.startswith("model.layers.1.self_attn")} | {
        "model.layers.0.mlp.down_proj.weight"}
    for name in kept:
        assert torch.equal(linears(folder)[name], linears(source)[name])


@pytest.mark.parametrize(("options", "said"), [
    ({"group": 64}, r"groups of 64 do not divide the 96 columns of model\.layers\.0\.mlp\.down_proj\.weight; "
                    r"--group-size 32 would fit"),
    ({"group": 5}, "--group-size is a multiple of 8"),
    ({"kind": "fp8", "group": 32}, "--group-size is for int4 and int8"),
    ({"ignored": ("re:(",)}, r"--ignore re:\( is not a regular expression"),
    ({"ignored": ("re:.*",)}, "--ignore leaves nothing to quantise"),
    ({"kind": "fp8", "calibration": Path("x")}, "--calibrate is for int4 and int8"),
])
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = tiny(tmp_path)
    with pytest.raises(SpilloverError, match=said):
        quantize(source, tmp_path / "out", QuantizeOptions(**{"kind": "int4", **options}))
    assert not (tmp_path / "out").exists()


def test_quantised_models_are_refused(tmp_path: Path) -> None:
    folder = quantize(tiny(tmp_path), tmp_path / "out", QuantizeOptions("int4")).folder
    said = "holds weights quantised with compressed-tensors already"
    with pytest.raises(SpilloverError, match=said):
        quantize(folder, tmp_path / "again", QuantizeOptions("int4"))
    with pytest.raises(SpilloverError, match=said):
        plan_model(EngineConfig(model=str(folder), device="cpu", quantization="int8"))
    with pytest.raises(SpilloverError, match="stored as one tensor"):
        quantize(tiny_gguf(tmp_path, "gpt-oss"), tmp_path / "again", QuantizeOptions("int4"))


def test_memory_stays_within_the_budget_or_it_is_said(tmp_path: Path) -> None:
    source, text = tiny(tmp_path), tmp_path / "text.txt"
    text.write_text(TEXT * 200)
    options = QuantizeOptions("int4", calibration=text)
    with pytest.raises(SpilloverError, match=r"quantising needs .* of host memory at least"):
        quantize(source, tmp_path / "out", options, budget=10_000)
    with pytest.raises(SpilloverError, match=r"calibration needs .* of host memory at least"):
        quantize(source, tmp_path / "out", options, budget=100_000)
    most = quantize(source, tmp_path / "out", options, budget=1 << 30).tokens
    assert 0 < quantize(source, tmp_path / "less", options, budget=8_000_000).tokens < most


@pytest.mark.parametrize(("name", "content", "said"), [
    ("no.txt", None, "cannot be read"),
    ("binary.txt", b"\xff\xfe\x00", "not text in UTF-8"),
    ("short.txt", b"the that", "has only .* tokens; calibration needs 128 at least"),
    ("bad.jsonl", b'{"text": "the"}\n{"text"', "line 2 is not JSON"),
    ("other.jsonl", b'{"texts": "the"}', r"line 1: .* is no text"),
    ("number.jsonl", b'{"text": 3}', r"line 1: .* is no text"),
    ("turns.jsonl", b'{"messages": [{"role": "user"}]}', r"line 1: .* is no text"),
    ("object.json", b'{"text": "the"}', "does not hold a JSON list"),
    ("deep.json", b"[" * 100_000, "is not JSON"),
])
def test_calibrations_that_are_none(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    source, file = tiny_gguf(tmp_path), tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpilloverError, match=said) as refusal:
        quantize(source, tmp_path / "out", QuantizeOptions("int4", calibration=file))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_texts_and_conversations_are_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_gguf(tmp_path))
    chat = [{"role": "user", "content": TEXT * 20}, {"role": "assistant", "content": TEXT * 20}]
    shared = [{"from": "human", "value": TEXT * 20}, {"from": "gpt", "value": TEXT * 20}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n\n" + json.dumps(TEXT * 9))
    (tmp_path / "b.json").write_text(json.dumps([{"conversations": shared}, {"text": TEXT * 9}]))
    one, other = (read_tokens(tmp_path / name, tokenizer, 10_000, 64) for name in ("a.jsonl", "b.json"))
    assert torch.equal(one, other)
    assert one.shape[1] == 64
    assert read_tokens(tmp_path / "a.jsonl", tokenizer, 128, 64).shape == (2, 64)
