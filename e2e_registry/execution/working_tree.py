"""The working tree as an archive, for machines that have no checkout: what git would commit, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.environment import source_paths
from e2e_registry.errors import StorageError, UsageError

#: Greatest size of the files of a tree, in bytes: what Ray's store takes, with room to spare.
SIZE_LIMIT = 256 * 2**20

#: Folders that are no source where no git says so.
_NOT_SOURCE = frozenset({"__pycache__", ".git", ".venv", "node_modules"})

# The least that a zip file can hold: its bytes, which name it in the cluster, must not depend on the clock.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class WorkingTree:
    """Files to ship.

    Attributes:
        top: The folder that paths are relative to: the git work tree, or the root without git.
        files: Regular files, sorted.
        links: Symbolic links and what they lead to, as text.
    """

    top: Path
    files: tuple[Path, ...]
    links: tuple[tuple[Path, str], ...]

    def write_zip(self, path: Path) -> None:
        """Write the files; equal trees give equal bytes, so that a cluster which has the tree is sent nothing.

        Trees that differ in their links alone differ in the archive's comment: the bytes name the folder on a node.

        Raises:
            UsageError: The files are larger than :data:`SIZE_LIMIT` together.
            StorageError: A file cannot be read, or the archive not be written.
        """
        self._check_size()
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for file in self.files:
                    entry = zipfile.ZipInfo(file.as_posix(), _EPOCH)
                    is_executable = os.stat(self.top / file).st_mode & stat.S_IXUSR
                    entry.external_attr = (stat.S_IFREG | (0o755 if is_executable else 0o644)) << 16
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, (self.top / file).read_bytes())
                links = [[link.as_posix(), target] for link, target in self.links]
                archive.comment = hashlib.sha256(json.dumps(links).encode()).hexdigest().encode()
        except OSError as error:
            raise StorageError(f"cannot archive the working tree: {error.strerror}", where=error.filename) from error

    def _check_size(self) -> None:
        sizes = {file: os.stat(self.top / file).st_size for file in self.files}
        total = sum(sizes.values())
        if total > SIZE_LIMIT:
            largest = sorted(sizes, key=lambda file: -sizes[file])[:3]
            shown = ", ".join(f"{file.as_posix()} ({_mib(sizes[file])})" for file in largest)
            raise UsageError(
                f"the working tree holds {_mib(total)}, and {_mib(SIZE_LIMIT)} at most are sent to a cluster",
                where=self.top,
                hint=f"git-ignore what recipes do not read, and give large data by path; the largest files are {shown}",
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def read_working_tree(root: Path, exclude: Sequence[Path]) -> WorkingTree:
    """Return what git would commit below the work tree of ``root``; without git, what lies below ``root``.

    Args:
        root: A folder in the work tree.
        exclude: Files and folders that are left out: the standards folder and the run folder.

    Raises:
        StorageError: A folder cannot be read.
    """
    try:
        found = source_paths(root, exclude) or (root, sorted(_walk(root, [root / path for path in exclude])))
    except OSError as error:
        raise StorageError(f"cannot read the working tree: {error}", where=root) from error
    top, paths = found
    links = tuple((path, os.readlink(top / path)) for path in paths if (top / path).is_symlink())
    files = tuple(path for path in paths if (top / path).is_file() and not (top / path).is_symlink())
    return WorkingTree(top, files, links)


def _walk(root: Path, excluded: Sequence[Path]) -> Iterator[Path]:
    for parent, folders, files in os.walk(root):
        here = Path(parent)
        linked = [name for name in folders if (here / name).is_symlink()]
        folders[:] = [name for name in folders if name not in linked and not _is_left_out(here / name, excluded)]
        yield from ((here / name).relative_to(root) for name in (*files, *linked) if here / name not in excluded)


def _is_left_out(folder: Path, excluded: Sequence[Path]) -> bool:
    return folder.name in _NOT_SOURCE or folder in excluded or (folder / "pyvenv.cfg").exists()
