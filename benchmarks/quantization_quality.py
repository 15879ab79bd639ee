"""Quality of quantised models in one table: perplexity, KL divergence, top-1 agreement and HellaSwag of a model as it
is, and in int8, FP8 and int4, plain and calibrated.

    python benchmarks/quantization_quality.py MODEL --text chats.json --hellaswag hellaswag_val_full.txt.bz2 \\
        --folder quantised --output-json results.json
    python benchmarks/quantization_quality.py MODEL QUANTISED... --text chats.json  # measures these, makes none

All models process the same tokens of the text (a .json list of conversations, as for `spill quantize --calibrate`),
from entry --skip on, computed by this engine's layers on the CPU in float32; calibration uses the entries from the
first on. HellaSwag is that of `spill eval`, in process. Rows of results.json that this command does not measure stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from made_by import made_by
from torch import Tensor

from spillover import LLM
from spillover.eval.in_process import EngineTarget
from spillover.eval.results import Results
from spillover.eval.run import run, summary
from spillover.eval.tasks.named import open_task
from spillover.models.checkpoint import open_checkpoint
from spillover.models.hub.store import resolve
from spillover.models.layers import KVViews, ModelStep
from spillover.models.loader import load_parts
from spillover.models.quantize.calibration import BLOCK_SIZE, whole_sequences
from spillover.models.quantize.calibration_text import read_tokens
from spillover.models.quantize.quantize import QuantizeOptions, quantize
from spillover.models.registry import read_architecture
from spillover.models.tokenizer import load_tokenizer
from spillover.models.weight_specs import kept_on
from spillover.models.weights import ResidentWeights
from spillover.units import format_bytes

UNQUANTISED = "unquantised"
MADE = {"int8": ("int8", False), "fp8": ("fp8", False), "int4 calibrated": ("int4", True), "int4": ("int4", False)}
CONCURRENCY = 8  # HellaSwag tasks in progress at the same time
CPU = torch.device("cpu")


def log_probabilities(path: Path, tokens: Tensor) -> Tensor:
    """Return log probabilities [sequences, length, vocabulary] in float32; they must fit into memory."""
    with open_checkpoint(path) as checkpoint, torch.no_grad():
        arch, config = read_architecture(checkpoint.config, path)
        specs = kept_on(arch.weight_specs(config), "cpu", "float32")
        weights = ResidentWeights(dict(load_parts(checkpoint, config, specs, torch.float32, lambda *_: CPU)))
        length = tokens.shape[1]
        model = arch.build(config, CPU, torch.float32, length)
        blocks, groups = -(-length // BLOCK_SIZE) + 1, model.groups
        pool = torch.empty(blocks, len(groups[0].layers), 2, config.num_kv_heads, BLOCK_SIZE * config.head_dim)
        batch, kv, found = whole_sequences(1, length, CPU), KVViews(pool, groups), []
        for ids in tokens:
            kv.pool.zero_()
            step = ModelStep(ids, batch.positions, (batch,) * len(groups))
            found.append(model.logits(model.forward(step, weights, kv), weights).float().log_softmax(-1))
        return torch.stack(found)


def make(source: Path, folder: Path, text: Path, calibration_tokens: int) -> dict[str, Path]:
    """Return the quantised models by the name of their row; quantise those that are not in the folder yet."""
    made = {}
    for name, (kind, calibrated) in MADE.items():
        made[name] = folder / name.replace(" ", "-")
        if not made[name].exists():
            quantize(source, made[name], QuantizeOptions(kind, calibration=text if calibrated else None,
                                                         calibration_tokens=calibration_tokens))
    return made


def hellaswag(path: Path, file: Path, tasks: int) -> dict[str, dict[str, Any]]:
    """Return acc and acc_norm of the first tasks, with their 95% intervals."""
    task, results = open_task(f"hellaswag={file}", Path(), 1, 1, None), Results()
    # If a GGUF file kept its codes, activations would be quantised too: the baseline is its dequantised weights.
    target = EngineTarget(LLM(path, device="cpu", dtype="float32", weight_codes="widen", max_model_len=1024), path.name)
    try:
        items = list(task.items(target))[:tasks]
        run(task, target, items, results, CONCURRENCY)
    finally:
        target.close()
    return {name: {"value": found.value, "low": found.low, "high": found.high, "items": found.items}
            for name, found in summary(task, items, results)}


def measured(path: Path, wanted: Tensor, tokens: Tensor) -> dict[str, Any]:
    found = log_probabilities(path, tokens)
    divergence = torch.stack([(one.exp() * (one - other)).sum(-1).mean()
                              for one, other in zip(wanted, found, strict=True)]).mean().item()
    return {"perplexity": (-found[:, :-1].gather(-1, tokens[:, 1:, None])).mean().exp().item(), "kl": divergence,
            "top1_agreement": (wanted.argmax(-1) == found.argmax(-1)).float().mean().item()}


def stored_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))


def read_text(text: Path, skip: int, model: Path, count: int) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        if skip:
            entries = json.loads(text.read_text(encoding="utf-8"))[skip:]
            text = Path(folder) / "rest.json"
            text.write_text(json.dumps(entries), encoding="utf-8")
        return read_tokens(text, load_tokenizer(model), count, 512)


def write(file: Path, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write the rows, replacing those with the same names; keep all other rows."""
    there = json.loads(file.read_text())["rows"] if file.exists() else []
    names = {row["name"] for row in rows}
    content = {**settings, "rows": rows + [row for row in there if row["name"] not in names]}
    file.write_text(json.dumps(content, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    accuracy = [f"{row[name]['value']:.3f} ({row[name]['low']:.3f} to {row[name]['high']:.3f})" if name in row else ""
                for name in ("acc", "acc_norm")]
    print(f"| {row['name']} | {format_bytes(row['weight_bytes'])} | {row['perplexity']:.3f} | {row['kl']:.5f} | "
          f"{row['top1_agreement']:.1%} | {' | '.join(accuracy)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the unquantised model")
    parser.add_argument("others", nargs="*", help="quantised models to measure; default: make them in --folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=500, help="entries of the text that are skipped, not measured")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--hellaswag", type=Path, help="file with the tasks; default: do not measure accuracy")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("quantised"), help="folder of the quantised models")
    parser.add_argument("--output-json", type=Path)
    given = parser.parse_args()
    source = resolve(given.model)
    tokens = read_text(given.text, given.skip, source, given.tokens)
    others = ({path.name: path for path in map(resolve, given.others)} if given.others else
              make(source, given.folder, given.text, given.calibration_tokens))
    settings = {"model": source.name, "tokens": tokens.numel(), "tasks": given.tasks if given.hellaswag else None,
                "calibration_tokens": given.calibration_tokens, **made_by()}
    paths = {UNQUANTISED: source, **others}
    wanted = log_probabilities(source, tokens)
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        if given.output_json is not None:
            write(given.output_json, rows, settings)

    for name, path in paths.items():
        rows.append({"name": name, "weight_bytes": stored_bytes(path), **measured(path, wanted, tokens)})
        keep()
    # Last, because it takes longest: all earlier results have been written by then.
    for row, path in zip(rows, paths.values(), strict=True) if given.hellaswag is not None else ():
        row |= hellaswag(path, given.hellaswag, given.tasks)
        keep()
    print(f"{tokens.numel():,} tokens\n| | weights on disk | perplexity | KL | top-1 | acc | acc_norm |\n"
          "|---|---|---|---|---|---|---|")
    for row in rows:
        show(row)


if __name__ == "__main__":
    main()
