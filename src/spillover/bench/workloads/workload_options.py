"""All options of a workload: name, default, help and the datasets to which each applies.

The command line and the YAML of experiments both read this class, so both have the same names; they are vLLM's and
SGLang's where those have one. An option that the chosen dataset does not use is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from spillover.errors import SpilloverError, did_you_mean

RANDOM, MIXED, SHAREGPT, CUSTOM = "random", "mixed", "sharegpt", "custom"
GSP, PREFIX_REPETITION, MULTI_TURN = "generated-shared-prefix", "prefix-repetition", "multi-turn"
PREFILL_MIX, VARIABLE_OUTPUT = "prefill-mix", "variable-output"
TRACES = ("mooncake", "azure", "burstgpt")
FILES = (SHAREGPT, CUSTOM, *TRACES)  # datasets that need --dataset-path
COUNTED = (RANDOM, MIXED, SHAREGPT, CUSTOM, GSP, PREFIX_REPETITION, PREFILL_MIX, VARIABLE_OUTPUT, *TRACES)
DATASETS = (RANDOM, MIXED, SHAREGPT, CUSTOM, GSP, PREFIX_REPETITION, MULTI_TURN, PREFILL_MIX, VARIABLE_OUTPUT, *TRACES)

# vLLM's short names, and the option that they set for each dataset.
INPUT_LEN = {RANDOM: "random_input_len", GSP: "gsp_question_len", PREFIX_REPETITION: "prefix_repetition_suffix_len",
             MULTI_TURN: "multi_turn_input_len", VARIABLE_OUTPUT: "variable_output_input_len"}
OUTPUT_LEN = {RANDOM: "random_output_len", GSP: "gsp_output_len", PREFIX_REPETITION: "prefix_repetition_output_len",
              MULTI_TURN: "multi_turn_output_len", SHAREGPT: "sharegpt_output_len", CUSTOM: "custom_output_len"}

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


SHIPPED = "shipped:"  # before the name of a file of prompts that is part of the package


def shipped() -> dict[str, Path]:
    """Return the included files of prompts, by name."""
    folder = Path(str(resources.files("spillover.bench"))) / "workloads" / "texts"
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def _flag(default: Any, text: str, *datasets: str) -> Any:
    """Make a field with its help. `datasets`: the datasets it applies to; none for all."""
    return field(default=default, metadata={"help": text, "datasets": datasets})


@dataclass(frozen=True)
class WorkloadOptions:
    dataset_name: str | None = _flag(None, f"Where requests come from: {', '.join(DATASETS)}. [default: by the file of "
                                     "--dataset-path, .json sharegpt, .jsonl custom; without one random]")
    dataset_path: str | None = _flag(None, "File of conversations (ShareGPT JSON), prompts (JSONL) or a trace; "
                                     f"{' and '.join(SHIPPED + name for name in shipped())} are included.", *FILES)
    num_prompts: int = _flag(1000, "Number of requests; for conversations, lines and traces the maximum.", *COUNTED)
    seed: int = _flag(0, "Seed of lengths, tokens and arrivals.")
    tokenizer: str | None = _flag(None, "Model folder or GGUF file whose tokenizer to use. [default: the server's]")
    input_len: int | None = _flag(None, "Prompt tokens: short for the dataset's own option.", *INPUT_LEN)
    output_len: int | None = _flag(None, "Output tokens: short for the dataset's own option.", *OUTPUT_LEN)
    disable_shuffle: bool = _flag(False, "Keep the order of the file, or of the prefixes.",
                                  SHAREGPT, CUSTOM, PREFIX_REPETITION)

    random_input_len: int = _flag(1024, "Prompt tokens per request, the shared prefix not counted.", RANDOM)
    random_output_len: int = _flag(128, "Output tokens per request.", RANDOM)
    random_range_ratio: float = _flag(0.0, "Vary lengths uniformly by up to this fraction either way.", RANDOM)
    random_prefix_len: int = _flag(0, "Length of the prefix that all prompts (mixed: every second one) share.", RANDOM,
                                  MIXED)

    mixed_input_range: tuple[int, ...] = _flag((16, 512), "Prompt tokens LOW,HIGH, log-uniform.", MIXED)
    mixed_output_range: tuple[int, ...] = _flag((8, 128), "Output tokens LOW,HIGH, log-uniform.", MIXED)

    sharegpt_output_len: int | None = _flag(None, "Output tokens in place of the recorded answer's.", SHAREGPT)
    sharegpt_turns: int = _flag(1, "Maximum turns per conversation; above 1 it is a session.", SHAREGPT)

    custom_output_len: int | None = _flag(None, 'Output tokens in place of the file\'s; a line without "output_tokens" '
                                          "has 256.", CUSTOM)
    skip_chat_template: bool = _flag(False, "Send the text as it is, not as a message of a user.", CUSTOM)

    gsp_num_groups: int = _flag(64, "Number of system prompts.", GSP)
    gsp_prompts_per_group: int = _flag(16, "Questions per system prompt.", GSP)
    gsp_system_prompt_len: int = _flag(2048, "Tokens per system prompt.", GSP)
    gsp_question_len: int = _flag(128, "Tokens per question.", GSP)
    gsp_output_len: int = _flag(256, "Output tokens per request.", GSP)
    gsp_range_ratio: float = _flag(1.0, "Lengths are uniform from this share up to the whole, as in SGLang.", GSP)
    gsp_num_turns: int = _flag(1, "Turns; above 1 each question opens a session.", GSP)
    gsp_ordered: bool = _flag(False, "Send group after group, not mixed.", GSP)

    prefix_repetition_prefix_len: int = _flag(256, "Tokens per prefix.", PREFIX_REPETITION)
    prefix_repetition_suffix_len: int = _flag(256, "Prompt tokens after the prefix.", PREFIX_REPETITION)
    prefix_repetition_num_prefixes: int = _flag(10, "Number of prefixes, each used equally often.", PREFIX_REPETITION)
    prefix_repetition_output_len: int = _flag(128, "Output tokens per request.", PREFIX_REPETITION)

    multi_turn_num_sessions: int = _flag(32, "Sessions.", MULTI_TURN)
    multi_turn_num_turns: int = _flag(4, "Turns per session.", MULTI_TURN)
    multi_turn_shared_len: int = _flag(0, "Length of the prefix that all sessions share.", MULTI_TURN)
    multi_turn_prefix_len: int = _flag(512, "Length of each session's own prefix after it.", MULTI_TURN)
    multi_turn_input_len: int = _flag(64, "Tokens that each turn adds.", MULTI_TURN)
    multi_turn_output_len: int = _flag(64, "Output tokens per turn.", MULTI_TURN)
    multi_turn_range_ratio: float = _flag(0.0, "Vary turn lengths uniformly by up to this fraction either way.",
                                          MULTI_TURN)
    multi_turn_think_time: float = _flag(0.0, "Mean seconds between an answer and the next turn, exponential.",
                                         MULTI_TURN)

    prefill_mix_long_share: float = _flag(0.1, "Fraction of requests with a long prompt.", PREFILL_MIX)
    prefill_mix_long_input_len: int = _flag(2048, "Prompt tokens of the long requests.", PREFILL_MIX)
    prefill_mix_long_output_len: int = _flag(16, "Output tokens of the long requests.", PREFILL_MIX)
    prefill_mix_short_input_len: int = _flag(64, "Prompt tokens of the other requests.", PREFILL_MIX)
    prefill_mix_short_output_len: int = _flag(128, "Output tokens of the other requests.", PREFILL_MIX)

    variable_output_lens: tuple[int, ...] = _flag((16, 32, 64, 256, 512), "Output tokens, each equally often.",
                                                  VARIABLE_OUTPUT)
    variable_output_input_len: int = _flag(256, "Prompt tokens per request.", VARIABLE_OUTPUT)

    trace_limit: int | None = _flag(None, "Play at most this many requests, from the first; also --num-prompts.",
                                    *TRACES)
    trace_speedup: float = _flag(1.0, "Play the trace this many times as fast.", *TRACES)
    trace_length_scale: float = _flag(1.0, "Multiply prompt and output lengths, to fit a smaller model.", *TRACES)
    trace_model: str | None = _flag(None, "Only requests to this model, such as GPT-4.", "burstgpt")

    given: frozenset[str] = field(default=frozenset(), compare=False)  # names of options that were set explicitly

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> WorkloadOptions:
        """Make options from names with hyphens or underscores; None means "not given". `defaults` replace those of the
        class."""
        workload, others = cls.split(options, defaults)
        if others:
            name = next(iter(others))
            raise SpilloverError(f"a workload has no option '{name}'"
                                 + did_you_mean(_option(name), map(_option, names()), listed=True))
        return workload

    @classmethod
    def split(cls, options: Mapping[str, Any],
              defaults: Mapping[str, Any] | None = None) -> tuple[WorkloadOptions, dict[str, Any]]:
        """Return the options as `from_mapping` does, and the entries that are not options of a workload, unchanged."""
        hints, known = get_type_hints(cls), set(names())
        mine: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in options.items():
            plain = name.replace("-", "_")
            if plain not in known:
                others[name] = value
            elif value is not None:
                mine[plain] = _converted(plain, value, hints[plain])
        return cls(**{**(defaults or {}), **mine}, given=frozenset(mine))._checked(), others

    def as_dict(self) -> dict[str, Any]:
        """Return the options that were given or differ from the default, by name."""
        values = {item.name: getattr(self, item.name) for item in _fields()
                  if item.name in self.given or getattr(self, item.name) != item.default}
        return {"dataset-name": self.dataset, **{_option(name): list(value) if isinstance(value, tuple) else value
                                                 for name, value in values.items() if name != "dataset_name"}}

    @property
    def dataset(self) -> str:
        if self.dataset_name is not None:
            return self.dataset_name
        if self.dataset_path is None:
            return RANDOM
        return CUSTOM if self.dataset_path.endswith(".jsonl") or self.dataset_path.startswith(SHIPPED) else SHAREGPT

    @property
    def limit(self) -> int | None:
        """Return the maximum number of requests, for datasets that have a number of their own; None if not given."""
        if self.trace_limit is not None:
            return self.trace_limit
        return self.num_prompts if "num_prompts" in self.given else None

    @property
    def file(self) -> str:
        if self.dataset_path is None:
            raise SpilloverError(f"--dataset-name {self.dataset} needs --dataset-path")
        if self.dataset_path.startswith(SHIPPED):
            name = self.dataset_path.removeprefix(SHIPPED)
            if name not in shipped():
                raise SpilloverError(f"there is no included file '{name}'{did_you_mean(name, shipped(), listed=True)}")
            return str(shipped()[name])
        return str(Path(self.dataset_path).expanduser())

    def _checked(self) -> WorkloadOptions:
        dataset = self.dataset
        if self.dataset_name is None and str(self.dataset_path).endswith(".csv"):
            raise SpilloverError(f"'{self.dataset_path}' is a trace of unknown format: give --dataset-name azure or "
                                 "burstgpt")
        if dataset not in DATASETS:
            raise SpilloverError(f"there is no dataset '{dataset}'" + did_you_mean(dataset, DATASETS, listed=True))
        if dataset == MULTI_TURN and "num_prompts" in self.given:
            raise SpilloverError("--num-prompts does not apply to --dataset-name multi-turn; set the number of "
                                 "requests by --multi-turn-num-sessions and --multi-turn-num-turns")
        for item in _fields():
            datasets = item.metadata["datasets"]
            if item.name in self.given and datasets and dataset not in datasets:
                raise SpilloverError(f"--{_option(item.name)} is for --dataset-name {' or '.join(datasets)}, not for "
                                     f"{dataset}; leave it out")
        if {"num_prompts", "trace_limit"} <= self.given and self.num_prompts != self.trace_limit:
            raise SpilloverError(f"--num-prompts {self.num_prompts} and --trace-limit {self.trace_limit} contradict "
                                 "each other: give one")
        if self.num_prompts < 1:
            raise SpilloverError(f"--num-prompts must be at least 1; got {self.num_prompts}")
        if self.seed < 0:
            raise SpilloverError(f"--seed is 0 or more; got {self.seed}")
        if dataset in FILES:
            _ = self.file
        checked = self._lengthened("input_len", INPUT_LEN)
        return checked._lengthened("output_len", OUTPUT_LEN)

    def _lengthened(self, short: str, meanings: Mapping[str, str]) -> WorkloadOptions:
        """Return the options with the value of a short name moved to the dataset's own option."""
        value = getattr(self, short)
        if value is None:
            return self
        long = meanings[self.dataset]
        if long in self.given and getattr(self, long) != value:
            raise SpilloverError(f"--{_option(short)} {value} and --{_option(long)} {getattr(self, long)} contradict "
                                 "each other: give one")
        changes: dict[str, Any] = {short: None, long: value, "given": self.given - {short} | {long}}
        return dataclasses.replace(self, **changes)


def names() -> list[str]:
    return [item.name for item in _fields()]


def _fields() -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(WorkloadOptions) if item.metadata]


def truth(name: str, value: Any) -> bool:
    """Parse a switch, also as a word: the YAML of experiments keeps yes, no, on and off as strings."""
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else None
    if word not in TRUTHS:
        raise SpilloverError(f"{_option(name)} is true or false; got {value!r}")
    return TRUTHS[word]


def _option(name: str) -> str:
    return name.replace("_", "-")


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the field's type: YAML and the command line write numbers and lists differently."""
    kind = next(part for part in get_args(hint) if part is not type(None)) if isinstance(hint, UnionType) else hint
    try:
        if get_origin(kind) is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(_whole(part) for part in parts)
        if kind is int:
            return _whole(value)
        if kind is float and not isinstance(value, bool):
            return float(value)
        if kind is str and isinstance(value, str):
            return value.replace("_", "-") if name == "dataset_name" else value
        if kind is bool:
            return truth(name, value)
    except (TypeError, ValueError):
        pass
    wanted = {int: "a whole number", float: "a number", str: "a text"}.get(
        kind, "whole numbers such as 16,512")
    raise SpilloverError(f"--{_option(name)} takes {wanted}; got {value!r}")


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise ValueError(value)
    return number
