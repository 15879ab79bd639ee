"""A workload's flags as command-line options, made from `WorkloadOptions` so that no flag is defined twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import click

from spillover.bench.workloads.workload_options import DATASETS, WorkloadOptions, names

if TYPE_CHECKING:
    from spillover.bench.serving.served_model import ServedModel, TextTokenizer
    from spillover.bench.workloads.workloads import Vocabulary

Command = TypeVar("Command", bound=Callable[..., Any])

_TYPES: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


# vLLM's other names for the same flags.
_ALIASES = {"dataset_path": ("--dataset",), "random_prefix_len": ("--prefix-len",)}


def workload_options(of_engine: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Add all workload flags to a command, which receives them as `workload: WorkloadOptions`. `of_engine`: flags that
    the command already has for the engine, whose values apply to the workload too."""
    own = [name for name in names() if name not in of_engine]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_workload(**given: Any) -> Any:
            # On the command line None means "not given", which differs from "given as its default".
            flags = {name: given.pop(name) for name in own} | {name: given[name] for name in of_engine}
            return command(workload=WorkloadOptions.from_mapping(flags, defaults), **given)

        wrapped: Any = with_workload
        for name in reversed(own):
            wrapped = _option(name, defaults)(wrapped)
        decorated: Command = wrapped
        return decorated

    return decorate


def ask_server(workload: WorkloadOptions, base_url: str, model: str | None = None, api_key: str | None = None,
               headers: Mapping[str, str] | None = None, insecure: bool = False) -> ServedModel:
    """Return the model behind the server, with the tokenizer of --tokenizer if that is given."""
    from spillover.bench.serving.served_model import ServedModel

    return ServedModel.connect(base_url, model, api_key, open_tokenizer(workload.tokenizer), headers, insecure)


def open_tokenizer(path: str | None) -> TextTokenizer | None:
    return None if path is None else LocalTokenizer(path)


class LocalTokenizer:
    """The tokenizer of a model folder or GGUF file, as the benchmarks use it."""

    def __init__(self, path: str) -> None:
        from spillover.models.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(Path(path))

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        from spillover.bench.workloads.workloads import Vocabulary

        return Vocabulary(self._tokenizer.vocab_size, self._tokenizer.special_ids)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def chat(self, text: str) -> list[int]:
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return self._tokenizer.encode(prompt, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _option(name: str, defaults: Mapping[str, Any]) -> Callable[[Any], Any]:
    item = next(item for item in dataclasses.fields(WorkloadOptions) if item.name == name)
    default: Any = defaults.get(name, item.default)
    option, text, datasets = "--" + name.replace("_", "-"), item.metadata["help"], item.metadata["datasets"]
    if datasets and len(datasets) <= 2 and not name.startswith(datasets[0].replace("-", "_")):
        text = f"({', '.join(datasets)}) {text}"
    kind = _plain(get_type_hints(WorkloadOptions)[name])
    if kind is bool:
        return click.option(option, name, is_flag=True, default=None, help=text)
    if name == "dataset_name":
        return click.option(option, name, type=click.Choice(DATASETS), metavar="NAME", default=None, help=text)
    if get_origin(kind) is tuple:
        shown = ",".join(map(str, default))
        return click.option(option, name, default=None, metavar="INT,...", help=f"{text} [default: {shown}]")
    if default is not None:
        text += f" [default: {default}]"
    return click.option(option, *_ALIASES.get(name, ()), name, type=_TYPES[kind], default=None, help=text)


def _plain(hint: Any) -> Any:
    """Return the type without None: int | None -> int."""
    return next(part for part in get_args(hint) if part is not type(None)) if isinstance(hint, UnionType) else hint
