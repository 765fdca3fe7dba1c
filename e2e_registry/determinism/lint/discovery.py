"""Which files to check."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e_registry.determinism.lint.finding import Skipped
from e2e_registry.errors import UsageError

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})


def discover(paths: Sequence[Path]) -> tuple[list[Path], list[Skipped]]:
    """Return the Python files among ``paths`` and below them, sorted, each once.

    A folder that is named is walked whatever it is called; inside, hidden folders, virtual environments
    (anything with a ``pyvenv.cfg``), ``site-packages`` and caches are left out. A file that is named is checked
    whatever its suffix, except notebooks.

    Raises:
        UsageError: A path does not exist.
    """
    found: dict[Path, Path] = {}
    skipped: list[Skipped] = []
    for path in paths:
        if path.is_dir():
            files: Iterator[Path] = _walk(path)
        elif path.suffix == ".ipynb":
            skipped.append(Skipped(path=path, reason="notebooks are not checked"))
            continue
        elif path.exists():
            files = iter([path])
        else:
            raise UsageError("no such file or folder", where=path, hint="give files or folders that exist")
        for file in files:
            found.setdefault(file.resolve(), file)
    return sorted(found.values(), key=lambda file: file.as_posix()), skipped


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        here = Path(folder)
        subfolders[:] = sorted(name for name in subfolders if not _is_left_out(here / name))
        yield from (here / name for name in sorted(names) if name.endswith(".py") and (here / name).is_file())


def _is_left_out(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _SKIPPED_FOLDERS or (folder / "pyvenv.cfg").exists()
