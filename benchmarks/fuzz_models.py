"""Opens mutated model files and counts the outcomes: the model loads, one sentence names the file, or there is a fault.

Faults are tracebacks, messages that name no file, attempts that take longer than a limit, and large allocations.
Mutations change bytes or structure, each by its own seed: `--only 1234` repeats a single one and shows what it was.

    python benchmarks/fuzz_models.py --count 4000 --json benchmarks/results/fuzz-models.json
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from fuzz_seeds import ARRAY, BOOL, FLOAT32, STRING, UINT32, UINT64, Gguf, folder_configs, gguf_models, write_folder

from spillover.engine.config import EngineConfig
from spillover.engine.planned import plan_model
from spillover.errors import RequestError, SpilloverError
from spillover.kernels.fields import FLOATING
from spillover.kernels.formats.base import WeightFormat
from spillover.kernels.formats.checkpoints.awq import AwqInt
from spillover.kernels.formats.checkpoints.gptq import GptqInt
from spillover.kernels.formats.dense import DENSE
from spillover.models.checkpoint import open_checkpoint
from spillover.models.fingerprint import weights_digest
from spillover.models.loader import load_parts
from spillover.models.registry import read_architecture
from spillover.models.safetensors_folder import TORCH_NAMES
from spillover.models.tokenizer import load_tokenizer

SECONDS = 10.0  # an attempt that takes longer counts as hung
ALLOWED_NBYTES = 1 << 30  # address space that the process may add after its start
WRONG: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1.0, 1e308, float("nan"), float("inf"), "",
                    "x", "\x00", "x" * 5000, "../../../etc/passwd", [], [[]], [0], ["x"], [None, 1], {}, {"x": 1},
                    {"x": {"y": []}}]


class Hung(BaseException):
    """The time limit has passed. Not an Exception, so that no other handler catches it."""


def main_case(seed: int, seeds: Path, folder: Path) -> tuple[str, Path]:
    """Write the mutation of a seed; return its description and the path to open."""
    draw = random.Random(seed)
    names = [*gguf_models(), *folder_configs()]
    name = names[seed % len(names)]
    if name.startswith("gguf"):
        path = folder / "model.gguf"
        what, content = mutate_gguf(draw, _GGUFS[name])
        path.write_bytes(content)
        return f"{name}: {what}", path
    path = folder / "model"
    shutil.copytree(seeds / name, path)
    return f"{name}: {mutate_folder(draw, path)}", path


_GGUFS = gguf_models()


def mutate_gguf(draw: random.Random, whole: Gguf) -> tuple[str, bytes]:
    if draw.random() < 0.35:
        content = bytearray(whole.encode())
        return mutate_bytes(draw, content, len(content) - len(whole.data)), bytes(content)
    model = copy.deepcopy(whole)
    mutations = (_gguf_field, _gguf_field, _gguf_field, _gguf_tensor, _gguf_tensor, _gguf_counts)
    changes = [draw.choice(mutations)(draw, model) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    return "; ".join(changes), model.encode()


def mutate_bytes(draw: random.Random, content: bytearray, head: int) -> str:
    """Mutate `content` in place, mostly within its first `head` bytes; return a description."""
    changes = []
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        at = draw.randrange(head if draw.random() < 0.9 else len(content)) if content else 0
        kind = draw.choice(["set", "set", "ones", "cut", "insert", "remove", "number"])
        if kind == "set":
            content[at:at + 1] = bytes([draw.randrange(256)])
        elif kind == "ones":
            content[at:at + 8] = b"\xff" * 8
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = draw.randbytes(draw.randrange(1, 32))
        elif kind == "remove":
            del content[at:at + draw.randrange(1, 32)]
        else:
            content[at:at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**32, 2**40, 2**63, len(content)]))
        changes.append(f"{kind} at {at}")
        head = max(1, min(head, len(content)))
        if not content:
            break
    return f"bytes: {', '.join(changes[:4])}"


def _gguf_value(draw: random.Random, depth: int = 0) -> tuple[int, Any]:
    kind = draw.choice([UINT32, UINT64, FLOAT32, BOOL, STRING, ARRAY, 11, 12])
    if kind == STRING:
        return kind, draw.choice([b"", b"x", b"\xff\xfe", b"llama", b"yarn", b"9" * 5000, "▁".encode() * 50])
    if kind == ARRAY:
        if depth < 2 and draw.random() < 0.05:
            return kind, nested(draw.choice([3, 100, 5000]))
        entries = [_gguf_value(draw, depth + 1) for _ in range(draw.choice([0, 1, 1]))]
        item = entries[0][0] if entries else draw.choice([UINT32, STRING, ARRAY, 99])
        return kind, (item, [value for _, value in entries] * draw.choice([1, 1, 7]))
    if kind in (FLOAT32, 12):
        return kind, draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
    if kind == BOOL:
        return kind, draw.random() < 0.5
    most = {UINT32: 2**32 - 1, UINT64: 2**64 - 1, 11: 2**63 - 1}[kind]
    return kind, draw.choice([0, 1, 2, 3, 31, 2**20, 2**31 - 1, most] + ([-1, -(2**63)] if kind == 11 else []))


def nested(depth: int) -> bytes:
    """Return the bytes of `depth` arrays, each inside the one before."""
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", UINT32, 0)


def _gguf_field(draw: random.Random, model: Gguf) -> str:
    at = draw.randrange(len(model.fields)) if model.fields else 0
    how = draw.choice(["value", "value", "value", "entry", "entry", "drop", "twice", "name", "type"])
    if not model.fields:
        return "no fields left"
    name, kind, value = model.fields[at]
    if how == "value":
        model.fields[at] = (name, *_gguf_value(draw))
    elif how == "entry" and kind == ARRAY and isinstance(value, tuple) and value[1]:
        item, entries = value
        entries = list(entries)
        place = draw.randrange(len(entries))
        if item == STRING:
            entries[place] = draw.choice([b"", b" ", b"\xff", entries[0], entries[-1], b"x" * 3000, b"<|im_end|>",
                                          b"a b c"])
        elif item in (FLOAT32, 12):
            entries[place] = draw.choice([float("nan"), float("inf"), 0.0])
        elif item in (UINT32, 5):
            entries[place] = draw.choice([0, 1, 2, 3, 4, 5, 6, 99, 2**31 - 1])
        entries = draw.choice([entries, entries, entries[:place], entries + entries[:place]])
        model.fields[at] = (name, kind, (item, entries))
    elif how == "drop":
        del model.fields[at]
    elif how == "twice":
        model.fields.append((name, *_gguf_value(draw)))
    elif how == "name":
        other = draw.choice([b"", b"\xff", b"general.architecture", b"split.count", name[:-1]])
        model.fields[at] = (other, kind, value)
    elif how == "type":
        model.fields[at] = (name, draw.choice([13, 99, 2**31]), 0)
    return f"field {name.decode()} {how}"


def _gguf_tensor(draw: random.Random, model: Gguf) -> str:
    if not model.tensors:
        return "no tensors left"
    at = draw.randrange(len(model.tensors))
    name, dimensions, kind, offset = model.tensors[at]
    how = draw.choice(["dimensions", "dimensions", "kind", "offset", "name", "drop", "twice"])
    if how == "dimensions":
        dimensions = list(dimensions)
        change = draw.choice(["swap", "one", "more", "fewer", "none", "split"])
        if change == "swap":
            dimensions.reverse()
        elif change == "one":
            dimensions[draw.randrange(len(dimensions))] = draw.choice([0, 1, 7, 33, 2**20, 2**40, 2**63, 2**64 - 1])
        elif change == "more":
            dimensions += [1] * draw.choice([1, 3, 1000])
        elif change == "fewer":
            dimensions.pop()
        elif change == "none":
            dimensions = [0] * len(dimensions)
        else:
            dimensions = [dimensions[0] // 2, 2, *dimensions[1:]]
    elif how == "kind":
        kind = draw.choice([0, 1, 2, 3, 6, 8, 10, 12, 16, 24, 25, 26, 27, 28, 30, 34, 39, 40, 99, 2**31])
    elif how == "offset":
        offset = draw.choice([1, 2**20, 2**63, 2**64 - 32, -32])
    elif how == "name":
        name = draw.choice([b"", b"\xff", b"blk." + b"9" * 5000 + b".attn_q.weight", "blk.١.attn_q.weight".encode(),
                            b"blk.4294967296.attn_q.weight", b"rope_freqs.weight", b"blk.0.ffn_down_exps.weight",
                            b"token_embd.weight", b"blk.0.weight"])
    elif how == "drop":
        del model.tensors[at]
        return f"tensor {name.decode()} dropped"
    else:
        model.tensors.append(model.tensors[draw.randrange(len(model.tensors))])
    model.tensors[at] = (name, dimensions, kind, offset)
    return f"tensor {at} {how}"


def _gguf_counts(draw: random.Random, model: Gguf) -> str:
    value = draw.choice([0, 1, 2**32, 2**63, 2**64 - 1])
    which = draw.choice(["tensor_count", "field_count", "version"])
    setattr(model, which, value & (2**32 - 1) if which == "version" else value)
    return f"{which} {value}"


def mutate_folder(draw: random.Random, folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir())
    name = draw.choice(files)
    file = folder / name
    content = bytearray(file.read_bytes())
    if draw.random() < 0.25:
        head = min(len(content), 2000) if name.endswith(".safetensors") else len(content)
        change = mutate_bytes(draw, content, max(1, head))
        file.write_bytes(content)
    elif name.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        change, header = mutate_json(draw, json.loads(content[8:8 + length]))
        file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length:])
    elif draw.random() < 0.03:
        file.unlink()
        change = "removed"
    else:
        change, changed = mutate_json(draw, json.loads(content))
        file.write_bytes(changed)
    return f"{name}: {change}"


def mutate_json(draw: random.Random, tree: Any) -> tuple[str, bytes]:
    if draw.random() < 0.04:
        depth, deep = draw.choice([200, 5000, 100_000]), draw.choice([("[", "]"), ('{"x":', "}")])
        return f"{depth} levels", (deep[0] * depth + "0" + deep[1] * depth).encode()
    changes = []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        holder, key = draw.choice(list(places(tree))) if isinstance(tree, dict | list) and tree else (None, None)
        if holder is None:
            break
        how = draw.choice(["wrong", "wrong", "wrong", "drop", "like"])
        if how == "drop":
            del holder[key]
        elif how == "like":
            holder[key] = like(draw, holder[key])
        else:
            holder[key] = copy.deepcopy(draw.choice(WRONG))
        changes.append(f"{key} {how}")
    text = json.dumps(tree)
    if draw.random() < 0.05:
        text = text.replace("128", "9" * 5000, 1)
    return ", ".join(changes), text.encode()


def like(draw: random.Random, value: Any) -> Any:
    """Return a different value, of the same type in most cases."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([0, 1, 2, -value, value + 1, value * 2, 2**20, 2**31, 2**62, 10**25])
    if isinstance(value, float):
        return draw.choice([0.0, -value, 1e-300, 1e300, float("nan")])
    if isinstance(value, str):
        return draw.choice(["", value * 2, value[:-1], value.upper(), "\ud800", "BF16", "I8", "F8_E4M3"])
    if isinstance(value, list):
        return draw.choice([[], value * 2, value[:1], [value], list(reversed(value))])
    return {} if draw.random() < 0.5 else list(value) if isinstance(value, dict) else value


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key), outer ones first."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def attempt(path: Path, plan: bool) -> None:
    """Do everything that a start does with a model's files, except computing."""
    failure: SpilloverError | None = None
    for stage in (_weights, _tokens, weights_digest, *([_plan] if plan else [])):
        try:
            stage(path)
        except RequestError:
            pass  # the template rejects messages: an error for the client that sends them
        except SpilloverError as error:
            if path.name not in str(error) or "\n" in str(error) or len(str(error)) > 2000:
                raise AssertionError(f"not one sentence that names the file: {error!r}") from error
            failure = error
    if failure is not None:
        raise failure


def _weights(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        arch, config = read_architecture(checkpoint.config, path)
        cpu = torch.device("cpu")
        dict(load_parts(checkpoint, config, arch.weight_specs(config), torch.float32, lambda *_: cpu))
        for name in list(checkpoint.config.get("codes", {}))[:3]:
            checkpoint.read_codes(name)


def _tokens(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("the thing\n")
    tokenizer.decode(ids)
    b"".join(tokenizer.token_bytes(index) for index in ids)
    tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "that"}]), add_special_tokens=False)


def _plan(path: Path) -> None:
    plan_model(EngineConfig(model=str(path), device="cpu", gpu_memory="2GB"))


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_one(seed: int, seeds: Path, report: Callable[[str], None], plan: bool) -> tuple[str, str, float]:
    """Run one mutation; return its outcome, its description and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        what, path = main_case(seed, seeds, Path(folder))
        start = time.monotonic()
        try:
            with deadline(SECONDS):
                attempt(path, plan)
            ending = "loads"
        except SpilloverError as error:
            ending = "sentence"
            report(f"{seed}: {what}: {error}")
        except Hung:
            ending = "hung"
            traceback.print_exc()
        except MemoryError:
            ending = "large allocation"
            traceback.print_exc()
        except BaseException as error:  # also panics of Rust libraries, which are no Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            ending = "traceback"
            print(f"--- seed {seed}: {what}", file=sys.stderr)
            traceback.print_exc()
        return ending, what, time.monotonic() - start


def write_seeds(folder: Path) -> None:
    for index, (name, config) in enumerate(folder_configs().items()):
        arch, parsed = read_architecture(config, folder)
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for listed in arch.weight_specs(parsed).values():
            for spec in listed:
                source = spec.sources[0]
                shape = spec.shape[1:] if source.per_expert else spec.shape
                for expert in range(spec.shape[0] if source.per_expert else 1):
                    for tensor, rows in zip(source.names, source.rows, strict=True):
                        one = shape if len(source.names) == 1 else (rows, *shape[1:])
                        one = (*one[:-2], one[-1], one[-2]) if source.transposed else one
                        tensors |= stored(spec.format, tensor.format(expert=expert), one)
        write_folder(folder / name, config, tensors, sharded=index % 2 == 0)


def stored(form: WeightFormat | None, name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors that a checkpoint stores for one matrix: types and shapes by name."""
    module = name.removesuffix(".weight")
    form = form and form.stored_as(module)
    if form is None or form == DENSE:
        return {name: ("F32", shape)}
    floating = "F16" if isinstance(form, AwqInt | GptqInt) else "F32"
    return {field.name: (floating if field.dtype == FLOATING else _KINDS[field.dtype], field.shape)
            for field in form.stored(name, *shape[-2:])}


_KINDS = {name: kind for kind, name in TORCH_NAMES.items()}


@click.command()
@click.option("--count", default=4000, show_default=True, help="Number of mutations.")
@click.option("--first", default=0, show_default=True, help="Seed of the first mutation.")
@click.option("--only", type=int, default=None, help="Run only this seed and show its message.")
@click.option("--json", "output", type=click.Path(path_type=Path), default=None, help="Write the counts here.")
@click.option("--verbose", is_flag=True, help="Show every message.")
def main(count: int, first: int, only: int | None, output: Path | None, verbose: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    endings: Counter[str] = Counter()
    faults, slowest, longest = [], 0.0, ""
    say = print if verbose or only is not None else (lambda text: None)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"SPILLOVER_CACHE": str(Path(scratch, "cache")), "SPILLOVER_NATIVE": "0"}
        seeds = Path(scratch, "seeds")
        write_seeds(seeds)
        for name, whole in gguf_models().items():  # without mutations all of them load
            (seeds / f"{name}.gguf").write_bytes(whole.encode())
            attempt(seeds / f"{name}.gguf", plan=True)
        for name in folder_configs():
            attempt(seeds / name, plan=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ALLOWED_NBYTES, resource.RLIM_INFINITY))
        started = time.monotonic()
        for seed in [only] if only is not None else range(first, first + count):
            ending, what, seconds = run_one(seed, seeds, say, plan=seed % 4 == 0)
            endings[ending] += 1
            if seconds > slowest:
                slowest, longest = seconds, f"{seed}: {what}"
            if ending not in ("loads", "sentence"):
                faults.append({"seed": seed, "ending": ending, "mutation": what})
        took = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    result = {"mutations": sum(endings.values()), "endings": dict(sorted(endings.items())), "faults": faults,
              "seconds": round(took, 1), "slowest_seconds": round(slowest, 3), "slowest": longest,
              "peak_memory_growth_bytes": grown, "machine": platform.machine(),
              "command": f"python benchmarks/fuzz_models.py --count {count} --first {first}"}
    print(json.dumps(result, indent=1))
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
