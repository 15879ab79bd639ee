"""A model's files behind one face: HF's config keys, tensor names and conventions, whatever the format on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from spillover.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spillover.kernels.formats.gguf_codes import Codes


class Checkpoint(Protocol):
    """A model on disk. Tensors are read one at a time and own their memory: nothing stays mapped after a read."""

    path: Path
    # As in config.json, plus "generation_eos_token_id", every id that ends a generation, and "codes", the GGUF types of
    # the tensors that `read_codes` reads, by their names.
    config: dict[str, Any]

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...  # the type that `read` gives

    def file(self, name: str) -> Path: ...  # the file that holds the tensor

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return the tensor, or one entry of its first dimension."""

    def read_part(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Return a part of the tensor, and read little else where that can be."""

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> Codes:
        """Return a matrix as it is stored, or [start, stop) of its rows."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint after checking that every file is whole; reads no tensor."""
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
    """Return the checkpoint's config alone; a folder needs no weights for it, which is all that random weights ask."""
    from spillover.models.safetensors_folder import read_config as read_folder_config

    path = Path(path).expanduser()
    if path.is_dir():
        return read_folder_config(path)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config
