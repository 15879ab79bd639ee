"""Quantises a checkpoint and writes it as a compressed-tensors folder that vLLM and transformers can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spillover.errors import SpilloverError
from spillover.models.checkpoint import open_checkpoint
from spillover.models.export import SHARD_NBYTES, check_target, tensor_names, write_folder
from spillover.models.hub.default_model import Progress
from spillover.models.quantize.calibration import Calibration, fit_tokens
from spillover.models.quantize.calibration_text import read_tokens
from spillover.models.quantize.scheme import Scheme
from spillover.models.quantize.view import QuantizedView, choose_scheme, matrices
from spillover.models.registry import read_architecture
from spillover.models.tokenizer import load_tokenizer
from spillover.models.weight_specs import WeightSpecs
from spillover.units import format_bytes

CALIBRATION_TOKENS = 32_768


@dataclass(frozen=True)
class QuantizeOptions:
    kind: str
    group: int | None = None  # columns that share a scale; None: chosen automatically
    ignored: tuple[str, ...] = ()
    dtype: str = "auto"
    calibration: Path | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    device: str = "cpu"


@dataclass(frozen=True)
class Written:
    folder: Path
    scheme: Scheme
    tokens: int  # number of tokens used for calibration; 0: no calibration
    dequantized: bool  # whether the source was a quantised GGUF file


def quantize(source: Path, target: Path, options: QuantizeOptions, shard_nbytes: int = SHARD_NBYTES,
             force: bool = False, budget: int | None = None, progress: Progress | None = None) -> Written:
    """Quantise `source` into the folder `target`, which appears when complete. `budget`: bytes of host memory."""
    check_target(source, target, force)
    with open_checkpoint(source) as checkpoint:
        arch, config = read_architecture(checkpoint.config, source)
        specs = arch.weight_specs(config)
        scheme = choose_scheme(options.kind, checkpoint.config, source, specs, options.group, options.ignored,
                               options.dtype)
        if not any(matrices(specs, scheme)):
            raise SpilloverError("--ignore leaves nothing to quantise")
        device, calibration, count = torch.device(options.device), None, 0
        if budget is not None:
            _check_budget(specs, budget)
        if options.calibration is not None:
            if scheme.kind == "fp8":
                raise SpilloverError("--calibrate is for int4 and int8: fp8 rounds each weight to its nearest value")
            tokens = read_tokens(options.calibration, load_tokenizer(source), options.calibration_tokens,
                                 config.max_position)
            if int(tokens.max()) >= config.vocab_size:
                raise SpilloverError(f"{options.calibration} has token {int(tokens.max())}, and the model knows "
                                     f"{config.vocab_size}; its tokenizer is another model's")
            if budget is not None:
                tokens = fit_tokens(tokens, specs, config, budget)
            calibration, count = Calibration(checkpoint, arch, config, specs, scheme, tokens, device), tokens.numel()
        view = QuantizedView(checkpoint, scheme, specs, calibration.quantized if calibration else None, device)
        write_folder(view, view.stored(tensor_names(checkpoint)), target, None, shard_nbytes,
                     f"Quantising {source.name}", progress)
        return Written(target, scheme, count, bool(checkpoint.config.get("codes")))


def _check_budget(specs: WeightSpecs, budget: int) -> None:
    """Refuse a budget that does not hold two copies of the largest tensor in float32."""
    largest = max(spec.nbytes("float32") // max(1, spec.experts) for listed in specs.values() for spec in listed)
    if 2 * largest > budget:
        raise SpilloverError(f"quantising needs {format_bytes(2 * largest)} of host memory at least, and there are "
                             f"{format_bytes(budget)}; raise --host-memory")
