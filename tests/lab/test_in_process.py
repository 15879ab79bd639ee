"""An engine without a server is an arm like others: the same requests, with the engine's own times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spillover import LLM
from spillover.bench.serving.batch_load import check_batch
from spillover.bench.serving.load import LoadOptions
from spillover.bench.serving.serve_request import ServeRequest
from spillover.bench.serving.speculation_counters import speculation_metrics
from spillover.bench.workloads.arrivals import Arrivals
from spillover.cli.bench.batch_server import generate
from spillover.errors import SpilloverError
from spillover.lab.analysis import analysis_of
from spillover.lab.engines import EngineSpec, make_engine
from spillover.lab.engines.shapes import model_path, shapes
from spillover.lab.experiment import parse_experiment
from spillover.lab.run import Bench, run_experiment
from spillover.lab.traffic import ServedLoad
from spillover.models.eagle3 import read_head
from spillover.models.registry import architecture

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu", "torch_dtype": "float32",
          "eos_token_id": 0, "tie_word_embeddings": True}
LOAD = {"dataset-name": "random", "random-input-len": 20, "random-output-len": 6, "return-token-ids": True}
FLAGS = {"load-format": "dummy", "skip-tokenizer-init": True, "device": "cpu", "max-num-seqs": 4, "max-model-len": 64,
         "num-gpu-blocks-override": 64}


def test_a_batch_in_process_and_the_same_requests_over_http(tmp_path: Path) -> None:
    """The same requests are measured in process and over HTTP, with a model without weights or tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    made = parse_experiment({
        "name": "both", "model": str(tmp_path / "model"), "max-blocks": 1, "order": "alternate", "restart": "never",
        "arms": {"in": {"engine": "in-process", "args": FLAGS}, "served": {"engine": "spillover", "args": FLAGS}},
        "gates": dict.fromkeys(("client-saturated", "cold-start", "rate", "samples"), False),
        "workloads": {"all": {**LOAD, "num-prompts": 6, "temperature": 0.6},
                      "each": {**LOAD, "num-prompts": 3, "max-concurrency": 1}}})
    results = run_experiment(made, tmp_path / "r", Bench(ServedLoad(made), settle_seconds=0.0))
    cells = analysis_of(results)["cells"]
    assert [(cell["workload"], cell["arm"], cell["valid"]) for cell in cells] == [
        ("all", "in", True), ("all", "served", True), ("each", "in", True), ("each", "served", True)], cells
    for cell in cells:
        count = 6 if cell["workload"] == "all" else 3
        assert cell["metrics"]["total_input_tokens"]["median"] == 20 * count
        assert cell["metrics"]["total_output_tokens"]["median"] == 6 * count
    for visit in results.visits:
        run = results.run(visit)
        assert run is not None
        sent = [record.sent for record in run.records]
        done = [record.done for record in run.records]
        if visit["workload"] == "each":
            assert all(later >= earlier for later, earlier in zip(sent[1:], done, strict=False))  # one after another
        if visit["arm"] == "in":
            assert min(sent) >= 0
            assert max(done) <= run.duration
            assert all(record.sources == {**dict.fromkeys(record.sources or {}, 0), "computed": 20}
                       for record in run.records)


@pytest.mark.parametrize(("arrivals", "session", "words"), [
    (Arrivals(rate=3.0), None, "all requests at once"), (Arrivals(static_batch_size=2), None, "static-batch-size"),
    (Arrivals(max_concurrency=2), None, "max-concurrency 2 for 3"),
    (Arrivals(), 0, "need a server"),
])
def test_a_load_that_is_no_batch_is_refused(arrivals: Arrivals, session: int | None, words: str) -> None:
    requests = [ServeRequest((1, 2), 2, 4, session=session)] * 3
    with pytest.raises(SpilloverError, match=words):
        check_batch(replace(LoadOptions("http://127.0.0.1:1"), arrivals=arrivals), requests)


@pytest.mark.parametrize(("at_once", "found"), [(None, None), (1, 1), (3, None), (math.inf, None)])
def test_a_batch_is_all_at_once_or_one_after_another(at_once: int | None, found: int | None) -> None:
    requests = [ServeRequest((1, 2), 2, 4)] * 3
    assert check_batch(replace(LoadOptions("http://127.0.0.1:1"), arrivals=Arrivals(max_concurrency=at_once)),
                       requests) == found


def test_a_batch_reports_its_drafts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    flags = {name.replace("-", "_"): value for name, value in FLAGS.items()}
    with LLM(str(tmp_path), speculative_simulate="1,1", speculative_adaptive=False, **flags) as llm:
        body = {"prompts": [[1, 2, 3], [4, 5]], "output_lens": [8, 8], "one_by_one": False, "sampling": {},
                "ignore_eos": True}
        first, second = generate(llm, body), generate(llm, body)
    for reply in (first, second):  # of one batch, not of all since the start
        metrics = speculation_metrics(reply["counters"])
        assert 2 * 2 <= metrics["spec_drafts"] <= 2 * 4
        assert metrics["spec_acceptance_rate"] == 1
        assert metrics["spec_simulated"] == 1
        assert metrics["spec_verify_ms"] > 0
        assert metrics["spec_acceptance_at_1"] == 1
    with LLM(str(tmp_path), **flags) as llm:
        assert generate(llm, body)["counters"] == {}


@pytest.mark.parametrize("name", shapes())
def test_a_shape_is_a_model_that_can_be_built(name: str) -> None:
    folder = model_path(f"shape:{name}")
    assert folder is not None
    config = json.loads((Path(folder) / "config.json").read_text())
    if name.endswith("-eagle3"):
        target = json.loads((shapes()[name.removesuffix("-eagle3")] / "config.json").read_text())
        read_head(config, Path(folder), architecture(target).config(target), None)
    else:
        built = architecture(config)
        assert built.weight_specs(built.config(config))
    assert folder in make_engine(EngineSpec("in-process", f"shape:{name}")).command(0)


def test_a_shape_can_draft_for_another() -> None:
    drafting = {"method": "eagle3", "model": "shape:llama-3.1-8b-eagle3"}
    spec = EngineSpec("in-process", "shape:llama-3.1-8b", {"speculative-config": drafting})
    flag = json.loads(make_engine(spec).command(0)[-1])
    assert flag == {"method": "eagle3", "model": str(shapes()["llama-3.1-8b-eagle3"])}


def test_a_shape_that_there_is_not_is_refused() -> None:
    with pytest.raises(SpilloverError, match="there is no shape 'qwen3-8c'; did you mean 'qwen3-8b'"):
        model_path("shape:qwen3-8c")
