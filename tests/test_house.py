"""The size of files and folders stays within CONTRIBUTING's rules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import spillover

MOST_FILES = 20  # Python files in one folder, besides its __init__.py
MOST_LINES = 500
SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh"}


def too_large(root: Path) -> list[str]:
    """Return the sources that are too long, and the folders with too many Python files."""
    sources = [path for path in root.rglob("*") if path.suffix in SOURCES]
    folders = Counter(path.parent for path in sources if path.suffix == ".py" and path.name != "__init__.py")
    lines = {path: path.read_bytes().count(b"\n") for path in sources}
    return sorted([f"{path.relative_to(root)}: {count} lines" for path, count in lines.items() if count > MOST_LINES]
                  + [f"{folder.relative_to(root)}: {count} files" for folder, count in folders.items()
                     if count > MOST_FILES])


def test_files_and_folders_are_small() -> None:
    assert too_large(Path(spillover.__file__).parent) == []


def test_what_is_too_large_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for index in range(MOST_FILES):
        (folder / f"file{index:02}.py").write_text("\n" * MOST_LINES)
    (folder / "__init__.py").touch()
    assert too_large(tmp_path) == []
    (folder / "kernel.cu").write_text("\n" * (MOST_LINES + 1))
    (folder / "one_more.py").touch()
    assert too_large(tmp_path) == ["folder/kernel.cu: 501 lines", "folder: 21 files"]
