"""One interface for checkpoints of all file formats: HF's config keys, tensor names and conventions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from spillover.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spillover.kernels.formats.gguf_codes import Codes


class Checkpoint(Protocol):
    """A model on disk. Tensors are read one at a time and own their memory; no file stays mapped after a read."""

    path: Path
    # The keys of config.json, "generation_eos_token_id" (all ids that end a generation), and "codes" (the GGUF types of
    # the tensors that `read_codes` can read, by their names).
    config: dict[str, Any]

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...  # the type that `read` returns

    def file(self, name: str) -> Path: ...  # the file that holds the tensor

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return the tensor, or one entry of its first dimension."""

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Return a part of the tensor; reads only that part where the format allows it."""

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        """Return a matrix as codes, as it is stored, or its rows [start, stop)."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint after checking that every file is complete; reads no tensor."""
    from spillover.models.gguf.gguf_file import GGUFCheckpoint
    from spillover.models.safetensors_folder import SafetensorsCheckpoint

    path = Path(path).expanduser()
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a folder with config.json and safetensors, or a .gguf file")
    if path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path} is not a model; give a folder with config.json and safetensors, or a .gguf file")


def read_config(path: str | Path) -> dict[str, Any]:
    """Return only the checkpoint's config. A folder needs no weights for it, so dummy weights work without any."""
    from spillover.models.safetensors_folder import read_config as read_folder_config

    path = Path(path).expanduser()
    if path.is_dir():
        return read_folder_config(path)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config
