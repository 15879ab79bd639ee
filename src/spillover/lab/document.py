"""Parsing of experiment documents: strict YAML, sizes merged over it, and the files that ship with the package.

`off` and `on` are strings here, as in YAML 1.2: they are names of arms. A duplicate key is refused, not overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spillover.errors import SpilloverError, did_you_mean

SUFFIXES = (".yaml", ".yml")


def shipped() -> dict[str, Path]:
    """Return the experiments that ship with the package, by name."""
    folder = Path(str(resources.files("spillover.lab")))
    return {path.stem: path for room in ("seeds", "experiments") for path in sorted((folder / room).glob("*.yaml"))}


def read_document(name: str) -> dict[str, Any]:
    """Read the document of a file, or of an experiment that ships with the package, by its name."""
    path = Path(name)
    if path.suffix not in SUFFIXES and name in shipped():
        path = shipped()[name]
    if not path.is_file():
        raise SpilloverError(f"There is no experiment '{name}'{did_you_mean(name, shipped(), listed=True)} Give one of "
                             "these or a YAML file.")
    try:
        return parse_document(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpilloverError(f"{path} cannot be read as UTF-8 text: {error}") from error


def parse_document(text: str, name: str = "the experiment") -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise SpilloverError("Reading experiments needs the lab extra: pip install 'spillover[lab]'") from error
    try:
        document = yaml.load(text, Loader=_strict_loader())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise SpilloverError(f"{name} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise SpilloverError(f"{name} must hold names and values (name:, arms:, workloads: ...); see docs/lab.md")
    return document


def scaled(document: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """Return the document with its entry of `scales` for this size merged over it; null removes a value."""
    base = {key: value for key, value in document.items() if key != "scales"}
    scales = document.get("scales") or {}
    if not isinstance(scales, Mapping):
        raise SpilloverError(f"'{document.get('name')}': scales must hold sizes and what each changes; got {scales!r}")
    if scale is None or (scale == "cpu" and scale not in scales):  # the document without `scales` is the CPU size
        return base
    if scale not in scales:
        raise SpilloverError(f"'{document.get('name')}' has no size '{scale}'; "
                             f"there are {', '.join(dict.fromkeys(['cpu', *scales]))}")
    changes = scales[scale] or {}
    if not isinstance(changes, Mapping):
        raise SpilloverError(f"'{document.get('name')}': size '{scale}' of scales must hold names and values; got "
                             f"{changes!r}")
    merged: dict[str, Any] = _merged(base, changes)
    return merged


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    merged = {key: _merged(below[key], value) if key in below else value for key, value in above.items()}
    return {key: value for key, value in {**below, **merged}.items() if value is not None or key not in above}


def _strict_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *name`, whose keys may be given again
                    continue
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key_node, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a name",
                                                            key_node.start_mark)
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key}' is given twice", key_node.start_mark)
                seen.add(key)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    tag = "tag:yaml.org,2002:bool"
    Loader.yaml_implicit_resolvers = {
        first: [(kind, pattern) for kind, pattern in resolvers if kind != tag or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    return Loader
