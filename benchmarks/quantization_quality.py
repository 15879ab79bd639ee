"""What quantising costs: perplexity, KL divergence and top-1 agreement of models against one that is not quantised.

    python benchmarks/quantization_quality.py MODEL QUANTISED... --text FILE [--tokens 8192] [--skip 500]

All models see the same tokens of FILE (text, .json or .jsonl as `spill quantize --calibrate` takes it), computed by
this engine's layers on the CPU in float32. --skip leaves out entries of the file that a calibration may have used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from spillover.models.checkpoint import open_checkpoint
from spillover.models.hub.store import resolve
from spillover.models.layers import KVViews, ModelStep
from spillover.models.loader import load_parts
from spillover.models.quantize.calibration import BLOCK_SIZE, whole_sequences
from spillover.models.quantize.calibration_text import read_tokens
from spillover.models.registry import read_architecture
from spillover.models.tokenizer import load_tokenizer
from spillover.models.weight_specs import kept_on
from spillover.models.weights import ResidentWeights

CPU = torch.device("cpu")


def log_probabilities(path: Path, tokens: Tensor) -> Tensor:
    """Return [sequences, length, vocabulary] in float32, which the caller must have room for."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="the unquantised model, then the quantised ones")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=0)
    given = parser.parse_args()
    paths, text = [resolve(model) for model in given.models], given.text
    with tempfile.TemporaryDirectory() as folder:
        if given.skip:
            entries = json.loads(text.read_text(encoding="utf-8"))[given.skip :]
            text = Path(folder) / "rest.json"
            text.write_text(json.dumps(entries), encoding="utf-8")
        tokens = read_tokens(text, load_tokenizer(paths[0]), given.tokens, 512)
    following = tokens[:, 1:, None]
    wanted = log_probabilities(paths[0], tokens)
    print(f"{tokens.numel():,} tokens\n| model | perplexity | KL | top-1 |\n|---|---|---|---|")
    for path in paths:
        found = wanted if path == paths[0] else log_probabilities(path, tokens)
        perplexity = (-found[:, :-1].gather(-1, following)).mean().exp().item()
        divergence = torch.stack([(one.exp() * (one - other)).sum(-1).mean()
                                  for one, other in zip(wanted, found, strict=True)]).mean().item()
        same = (wanted.argmax(-1) == found.argmax(-1)).float().mean().item()
        print(f"| {path.name} | {perplexity:.3f} | {divergence:.5f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
