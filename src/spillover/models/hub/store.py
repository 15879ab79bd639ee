"""Resolution of model names to paths: the default model, pulled models in the cache, local paths, hub models.

The cache holds only complete models: each is assembled in a temporary folder, which is then renamed.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spillover.cache import cache_root
from spillover.errors import CheckpointError, SpilloverError
from spillover.models.checkpoint import open_checkpoint
from spillover.models.hub import default_model
from spillover.models.hub.default_model import Progress

DEFAULT_MODEL = default_model.MODEL.name
MANIFEST = ".manifest.json"  # maps each file to its size and sha256
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
COPY_NBYTES = 4 << 20


@dataclass(frozen=True)
class StoredModel:
    name: str
    path: Path  # argument for open_checkpoint
    nbytes: int
    format: str  # "safetensors" | "gguf"


def models_folder() -> Path:
    return cache_root() / "models"


def resolve(name: str | None = None, progress: Progress | None = None) -> Path:
    """Return the folder or file of a model. It is downloaded on first use; later uses need no network."""
    if not name:
        return _default(progress)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise SpilloverError(f"{name} is not a model; give a folder with config.json and safetensors, or a .gguf file")
    if name.lower() in default_model.MODEL.aliases:
        return _default(progress)
    if (stored := _find(name)) is not None:
        _check_sizes(stored)
        return stored.path
    if _is_hub_name(name):
        return _from_hub(name)
    raise _unknown(name)


def pull(source: str, name: str | None = None, progress: Progress | None = None) -> StoredModel:
    """Store a model in the cache under `name`. `source`: a known name, a hub name, a folder or a .gguf file."""
    if not Path(source).expanduser().exists() and source.lower() in default_model.MODEL.aliases and name is None:
        _default(progress)
        return _stored(models_folder() / DEFAULT_MODEL)
    path = resolve(source, progress)
    name = name or (source.rsplit("/", 1)[-1] if _is_hub_name(source) else path.resolve().name.removesuffix(".gguf"))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpilloverError(f"'{name}' cannot be a model's name; use letters, digits, '.', '_' and '-'")
    if name.lower() in default_model.MODEL.aliases:
        raise SpilloverError(f"'{name}' is the default model's name; choose another one with --name")
    if path.resolve().is_relative_to((models_folder() / name).resolve()):
        return _stored(models_folder() / name)
    open_checkpoint(path).close()
    with _locked(name, progress), _assembling(name) as folder:
        _copy(path, folder, name, progress)
        open_checkpoint(_entry(folder)).close()
    return _stored(models_folder() / name)


def make(name: str, write: Callable[[Path], None], progress: Progress | None = None) -> Path:
    """Return the stored model `name`. If there is none, `write` writes its files to an empty folder first."""
    with _locked(name, progress):
        if not (models_folder() / name).is_dir():
            with _assembling(name) as folder:
                write(folder)
                _write_manifest(folder, {file.name: (file.stat().st_size, _sha256(file))
                                         for file in sorted(folder.iterdir())})
    return resolve(name)


def list_models() -> list[StoredModel]:
    root = models_folder()
    folders = sorted(root.iterdir(), key=lambda folder: folder.name.lower()) if root.is_dir() else []
    return [_stored(folder) for folder in folders if folder.is_dir() and not folder.name.startswith(".")]


def remove(name: str) -> StoredModel:
    stored = _require(name)
    folder = models_folder() / stored.name
    with _locked(stored.name):
        # Renamed first, so that an interrupted removal does not leave an incomplete model under its name.
        leaving = folder.with_name(f".{stored.name}.leaving")
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(folder, leaving)
        shutil.rmtree(leaving)
    return stored


def verify(name: str, progress: Progress | None = None) -> StoredModel:
    """Verify the sha256 of all files of a model against its manifest."""
    stored = _require(name)
    _check_sizes(stored)
    folder = models_folder() / stored.name
    for file, (_, sha256) in _manifest(folder).items():
        found = _sha256(folder / file, progress)
        if found != sha256:
            raise SpilloverError(f"{folder / file} is damaged: its sha256 is {found}, expected {sha256}; "
                                 f"remove {stored.name} and pull it again")
    return stored


def _sha256(file: Path, progress: Progress | None = None) -> str:
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as source:
        while chunk := source.read(COPY_NBYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"Verifying {file.name}", done, total)
    return digest.hexdigest()


def _default(progress: Progress | None) -> Path:
    model = default_model.MODEL
    file = models_folder() / model.name / model.file
    if _has_size(file, model.nbytes):
        return file
    with _locked(model.name, progress):
        if not _has_size(file, model.nbytes):  # another process may have pulled it in the meantime
            with _assembling(model.name) as folder:
                default_model.fetch(model, folder, progress)
                _write_manifest(folder, {model.file: (model.nbytes, model.sha256)})
    return file


def _has_size(file: Path, nbytes: int) -> bool:
    return file.is_file() and file.stat().st_size == nbytes


@contextlib.contextmanager
def _locked(name: str, progress: Progress | None = None) -> Iterator[None]:
    root = models_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise SpilloverError(f"the model cache {root} cannot be written ({error}); point SPILLOVER_CACHE at a folder "
                             "that can") from error
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress is not None:
                    progress(f"Waiting for another process that pulls {name}", 0, 0)
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def _assembling(name: str) -> Iterator[Path]:
    """Yield a folder that becomes models/<name> if the block succeeds and is deleted otherwise. Needs the lock."""
    final = models_folder() / name
    folder, old = final.with_name(f".{name}.partial"), final.with_name(f".{name}.leaving")
    for leftover in (folder, old):  # left by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
        if final.exists():
            os.replace(final, old)
        os.replace(folder, final)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SpilloverError(f"the disk is full: {name} does not fit under {models_folder()}; free some, or point "
                                 "SPILLOVER_CACHE elsewhere") from error
        raise SpilloverError(f"cannot store {name} under {models_folder()}: {error}") from error
    finally:
        for leftover in (folder, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _copy(path: Path, folder: Path, name: str, progress: Progress | None) -> None:
    """Hard-link files if the file system allows it, otherwise copy them; write a manifest of sizes and digests."""
    files = _model_files(path)
    total, done, manifest = sum(file.stat().st_size for file in files), 0, {}
    for file in files:
        target, digest, size = folder / file.name, hashlib.sha256(), 0
        linked = True
        try:
            os.link(file.resolve(), target)
        except OSError:
            linked = False
        with file.open("rb") as source, open(os.devnull if linked else target, "wb") as sink:
            while chunk := source.read(COPY_NBYTES):
                sink.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if progress is not None:
                    progress(f"Pulling {name}", done + size, total)
        done += size
        manifest[file.name] = (size, digest.hexdigest())
    _write_manifest(folder, manifest)


def _model_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = {file for pattern in HUB_FILES for file in path.glob(pattern)}
        return sorted(file for file in files if file.is_file() and not file.name.startswith("."))
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    return [path] if split is None else sorted(path.parent.glob(f"{glob.escape(split[1])}-*-of-{split[2]}.gguf"))


def _write_manifest(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    content = {file: {"size": size, "sha256": sha256} for file, (size, sha256) in files.items()}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _manifest(folder: Path) -> dict[str, tuple[int, str]]:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {file: (int(entry["size"]), str(entry["sha256"])) for file, entry in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpilloverError(f"{folder} has no readable {MANIFEST}; remove {folder.name} and pull it again") from error


def _check_sizes(stored: StoredModel) -> None:
    folder = models_folder() / stored.name
    for file, (size, _) in _manifest(folder).items():
        found = (folder / file).stat().st_size if (folder / file).is_file() else 0
        if found != size:
            raise SpilloverError(f"{folder / file} has {found:,} bytes, not the {size:,} that were pulled; remove "
                                 f"{stored.name} and pull it again")


def _entry(folder: Path) -> Path:
    """Return the argument for open_checkpoint: the folder itself, or its (first) GGUF file."""
    ggufs = sorted(folder.glob("*.gguf"))
    return ggufs[0] if ggufs and not (folder / "config.json").is_file() else folder


def _stored(folder: Path) -> StoredModel:
    entry = _entry(folder)
    nbytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return StoredModel(folder.name, entry, nbytes, "gguf" if entry.is_file() else "safetensors")


def _find(name: str) -> StoredModel | None:
    if name.lower() in default_model.MODEL.aliases:
        name = DEFAULT_MODEL
    return next((stored for stored in list_models() if stored.name.lower() == name.lower()), None)


def _require(name: str) -> StoredModel:
    stored = _find(name)
    if stored is None:
        raise _unknown(name)
    return stored


def _unknown(name: str) -> SpilloverError:
    """Return the error for an unknown model name, with similar names and the available ones."""
    known = sorted({DEFAULT_MODEL, *(stored.name for stored in list_models())})
    by_lower = {candidate.lower(): candidate for candidate in (*known, *default_model.MODEL.aliases)}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)]
    parent = Path(name).expanduser().parent
    if ("/" in name or os.sep in name) and parent.is_dir():
        near = difflib.get_close_matches(Path(name).name, [entry.name for entry in parent.iterdir()], n=3, cutoff=0.5)
        close = [str(parent / match) for match in near]
    hint = f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else "."
    return SpilloverError(f"there is no model '{name}'{hint} Available: {', '.join(known)}; a model folder or .gguf "
                          "file by its path, or org/name from the Hugging Face hub")


def _is_hub_name(name: str) -> bool:
    """Return whether a name is org/name; if org is a local folder, it is taken for a mistyped path instead."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/([\w.-]+)", name)
    return match is not None and not match[2].endswith((".gguf", ".safetensors")) and not Path(match[1]).is_dir()


def _from_hub(name: str) -> Path:
    # Imported here, as it takes half a second and most models are local.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def snapshot(local: bool) -> Path:
        # Subfolders are left out: some models have copies in other formats there.
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], local_files_only=local))

    with contextlib.suppress(OSError, CheckpointError):
        path = snapshot(local=True)
        open_checkpoint(path).close()  # raises after an interrupted download, which is resumed below
        return path
    if constants.HF_HUB_OFFLINE:
        raise SpilloverError(f"{name} is not in the local Hugging Face cache and HF_HUB_OFFLINE is set; unset it, or "
                             "pass the path of a model folder")
    try:
        return snapshot(local=False)
    except GatedRepoError as error:
        raise SpilloverError(f"{name} is gated: accept its licence on its hub page and log in with "
                             "'hf auth login'") from error
    except RepositoryNotFoundError as error:
        raise SpilloverError(f"the Hugging Face hub has no model {name}, or it is private and needs "
                             "'hf auth login'") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SpilloverError(f"the disk is full: {name} does not fit into the Hugging Face cache") from error
        raise _hub_refused(name, error) from error
    except Exception as error:  # the hub's client does not wrap its HTTP library's errors
        raise _hub_refused(name, error) from error


def _hub_refused(name: str, error: Exception) -> SpilloverError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SpilloverError(f"cannot fetch {name} from the Hugging Face hub ({reason}); check the network, or pass the "
                          "path of a model folder")
