"""Options have the same meaning in YAML and on the command line; none is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillover.bench.serving.served_model import ServedModel
from spillover.bench.workloads.make_workload import make_workload
from spillover.bench.workloads.workload_options import DATASETS, FILES, WorkloadOptions
from spillover.bench.workloads.workloads_recorded import custom
from spillover.errors import SpilloverError
from support.models.word_tokenizer import WordTokenizer

SERVED = ServedModel("m", 8192, WordTokenizer())


def made(**options: object) -> list[tuple[int, int]]:
    workload = make_workload(WorkloadOptions.from_mapping(options), SERVED)
    return [(request.prompt_len, request.output_len) for request in workload.requests(0)]


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in FILES])
def test_every_dataset_without_a_file_is_made_by_name_alone(name: str) -> None:
    options = WorkloadOptions.from_mapping({"dataset-name": name})
    workload = make_workload(options, SERVED)
    assert workload.name == name
    assert workload.stats().count == len(workload.requests(0))
    assert options.as_dict() == {"dataset-name": name}


def test_hyphens_underscores_and_the_ways_of_yaml() -> None:
    asked = WorkloadOptions.from_mapping({"dataset-name": "prefix_repetition", "prefix_repetition_num_prefixes": "4",
                                          "num-prompts": 8.0, "seed": None})
    assert (asked.dataset, asked.prefix_repetition_num_prefixes, asked.num_prompts, asked.seed) == (
        "prefix-repetition", 4, 8, 0)
    for lens in ("4,8", [4, 8], (4, "8")):
        assert WorkloadOptions.from_mapping({"dataset-name": "variable-output",
                                             "variable-output-lens": lens}).variable_output_lens == (4, 8)
    assert WorkloadOptions.from_mapping(asked.as_dict()) == asked


def test_short_names_mean_the_datasets_own() -> None:
    assert made(num_prompts=2, input_len=9, output_len=3) == [(9, 3)] * 2
    assert made(dataset_name="generated-shared-prefix", num_prompts=1, gsp_system_prompt_len=10, input_len=5,
                output_len=2) == [(15, 2)]
    with pytest.raises(SpilloverError, match="--output-len 3 and --random-output-len 4 contradict"):
        made(output_len=3, random_output_len=4)
    assert made(num_prompts=1, input_len=7, output_len=3, random_output_len=3) == [(7, 3)]


@pytest.mark.parametrize(("options", "said"), [
    ({"gsp-num-groups": 3}, "--gsp-num-groups is for --dataset-name generated-shared-prefix, not for random"),
    ({"dataset-name": "multi-turn", "num-prompts": 3}, "--multi-turn-num-sessions"),
    ({"dataset-name": "shargpt"}, "did you mean 'sharegpt'"),
    ({"random-inptu-len": 3}, "did you mean 'random-input-len'"),
    ({"dataset-name": "sharegpt"}, "needs --dataset-path"),
    ({"dataset-path": "some.csv"}, "azure or burstgpt"),
    ({"num-prompts": 0}, "at least 1"),
    ({"seed": -1}, "--seed is 0 or more"),
    ({"num-prompts": 2.5}, "a whole number"),
    ({"random-input-len": True}, "a whole number"),
    ({"random-range-ratio": "much"}, "a number"),
    ({"dataset-name": "prefix-repetition", "disable-shuffle": "maybe"}, "true or false"),
    ({"dataset-name": "mixed", "mixed-input-range": "9"}, "LOW,HIGH"),
    ({"dataset-name": "mixed", "mixed-input-range": "9,3"}, "LOW <= HIGH"),
    ({"dataset-name": "mixed", "mixed-input-range": "a,b"}, "16,512"),
    ({"dataset-name": "mooncake", "dataset-path": "x", "num-prompts": 3, "trace-limit": 4}, "contradict"),
    ({"random-range-ratio": 1.0}, "--random-range-ratio"),
    ({"random-input-len": 0}, "--random-input-len"),
    ({"random-input-len": 9000}, "9,128 tokens, but the model takes 8,192"),
    ({"dataset-name": "multi-turn", "multi-turn-num-turns": 80}, "but the model takes 8,192"),
    ({"dataset-name": "multi-turn", "multi-turn-think-time": -1}, "seconds"),
    ({"dataset-name": "prefill-mix", "prefill-mix-long-share": 2}, "from 0 to 1"),
    ({"dataset-name": "variable-output", "variable-output-lens": [0]}, "at least 1"),
])
def test_what_cannot_be_is_refused_in_one_sentence(options: dict[str, object], said: str) -> None:
    with pytest.raises(SpilloverError, match=said):
        made(**options)


def test_a_workloads_options_are_told_from_others() -> None:
    workload, others = WorkloadOptions.split({"dataset-name": "random", "request-rate": 4, "num_prompts": 9})
    assert workload.num_prompts == 9
    assert others == {"request-rate": 4}


def test_files_that_are_included_go_by_name() -> None:
    for name in ("chats", "repetitive-chats"):
        options = WorkloadOptions.from_mapping({"dataset-path": f"shipped:{name}"})
        assert options.dataset == "custom"
        assert len(custom(options.file, WordTokenizer()).requests(0)) >= 8
    with pytest.raises(SpilloverError, match="no included file 'chat'; did you mean 'chats'"):
        WorkloadOptions.from_mapping({"dataset-path": "shipped:chat"})


def test_the_files_name_says_what_it_is(tmp_path: Path) -> None:
    assert WorkloadOptions.from_mapping({"dataset-path": "a.json"}).dataset == "sharegpt"
    assert WorkloadOptions.from_mapping({"dataset-path": "a.jsonl"}).dataset == "custom"
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "a b", "output_tokens": 4}\n{"prompt": "c d", "output_tokens": 5}\n')
    assert sorted(made(dataset_path=str(file), skip_chat_template=True)) == [(3, 4), (3, 5)]
    assert made(dataset_path=str(file), num_prompts=1, output_len=-1, disable_shuffle=True) == [(4, 4)]
