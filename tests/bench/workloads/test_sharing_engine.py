"""The simulated sharing equals what a real engine's prefix cache provides, to the token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spillover import LLM, SamplingParams
from spillover.bench.workloads import workloads_synthetic as synthetic
from spillover.bench.workloads.workload_stats import Shape
from spillover.bench.workloads.workloads import Vocabulary
from spillover.bench.workloads.workloads_synthetic import SyntheticWorkload
from support.models.hf_reference import VOCAB, save_checkpoint, tiny_model

WORKLOADS = {
    "generated-shared-prefix": synthetic.generated_shared_prefix_shapes(3, 3, 40, 20, 4, 0.5, seed=1),
    "prefix-repetition": synthetic.prefix_repetition_shapes(8, 33, 15, 2, 3, seed=1),
    "multi-turn": synthetic.multi_turn_shapes(3, 3, 18, 20, 12, 9, 0.5, seed=1),
    "multi-turn, whole blocks": synthetic.multi_turn_shapes(2, 4, 16, 16, 8, 8, seed=1),  # here the last token matters
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model, _ = tiny_model("llama", seed=3)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("llama"))
    with LLM(str(folder), skip_tokenizer_init=True, block_size=16, max_model_len=256,
             num_gpu_blocks_override=400) as loaded:
        yield loaded


@pytest.mark.parametrize("repeat", [0, 1])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_cold_cache_serves_just_that(llm: LLM, name: str, repeat: int) -> None:
    shapes: tuple[Shape, ...] = WORKLOADS[name]
    workload = SyntheticWorkload(name, shapes, Vocabulary(VOCAB), seed=1)
    said: dict[int, list[int]] = {}
    served = 0
    for request in workload.requests(repeat):
        before = [] if request.session is None else said.get(request.session, [])
        prompt = [*before, *map(int, request.prompt)]
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        served += output.sources.device
        if request.session is not None:
            said[request.session] = [*prompt, *output.outputs[0].token_ids]
    assert workload.stats().shared_tokens > 0
    assert served == workload.stats().shared_tokens
