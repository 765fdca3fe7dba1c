"""What code a run was made from: the commit, and a hash of the working tree that outlives it.

A commit id does not survive a squash or a merge, although no byte of code changed; and it says nothing of edits that
were never committed. So a run also records the hash of the working tree itself, computed from what lies on disk:
neither HEAD nor the index enters it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_READ_SIZE = 1 << 20
# Compiled files are derived from the sources beside them and differ by the clock; running a recipe makes them, and a
# run must not change the source tree that it records.
_DERIVED = b"__pycache__"


def source_facts(root: Path, exclude: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the facts of the group ``source``.

    The whole git work tree that holds ``root`` is covered, not the folder alone: in a repository of several projects
    a recipe imports from its neighbours.

    Args:
        root: A folder in the work tree.
        exclude: Files and folders that do not count as source, absolute or relative to ``root``: the standards folder
            and the run folder.

    Returns:
        ``head``, the commit id; ``dirty``, whether anything but ``exclude`` differs from it; ``source_tree``, the
        SHA-256 over path, mode and content hash of every tracked or untracked, unignored file. Deleted files are no
        part of it, of a symbolic link the target's text counts, of a submodule its files. Each is None where there is
        no git, no repository or no commit; ``source_tree`` also where a file cannot be read.
    """
    top = _top_level(root)
    if top is None:
        return {"head": None, "dirty": None, "source_tree": None}
    excluded = _Excluded(top, [root / path for path in exclude])
    return {"head": _head(top), "dirty": _is_dirty(top, excluded), "source_tree": _source_tree(top, excluded)}


def source_paths(root: Path, exclude: Sequence[Path] = ()) -> tuple[Path, list[Path]] | None:
    """Return the top of the git work tree that holds ``root``, and the paths that its source tree is hashed from.

    Args:
        root: A folder in the work tree.
        exclude: As for :func:`source_facts`.

    Returns:
        The top, absolute, and the paths that exist, relative to it and sorted; None without git or a repository.

    Raises:
        OSError: Git cannot list a folder.
    """
    top = _top_level(root)
    if top is None:
        return None
    paths = _source_paths(top, _Excluded(top, [root / path for path in exclude]))
    return Path(os.fsdecode(top)), [Path(os.fsdecode(p)) for p in paths if os.path.lexists(os.path.join(top, p))]


class _Excluded:
    """Tells which paths, relative to the top of the work tree, do not count as source."""

    def __init__(self, top: bytes, paths: Sequence[Path]) -> None:
        relative = [os.path.relpath(os.path.realpath(os.fsencode(path)), top) for path in paths]
        self._prefixes = tuple(path + b"/" for path in relative if path.split(b"/")[0] not in (b"..", b"."))

    def __contains__(self, path: bytes) -> bool:
        return (path + b"/").startswith(self._prefixes) or _DERIVED in path.split(b"/")


def _git(folder: bytes, *arguments: str) -> bytes | None:
    """Return what git prints; None if it fails or is not installed."""
    # Inherited from a hook or a CI step, GIT_DIR, GIT_INDEX_FILE and others would answer for another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Reading must not take the index lock from a commit that runs at the same time.
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    # In containers the checkout often belongs to another user. Git would refuse, to keep the repository's settings
    # from running programs, but this package is about to run the repository's code anyway.
    options = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    command = ["git", "-C", os.fsdecode(folder), *options, *arguments]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def _top_level(root: Path) -> bytes | None:
    top = _git(os.fsencode(root), "rev-parse", "--show-toplevel")
    return os.path.realpath(top.removesuffix(b"\n")) if top else None


def _head(top: bytes) -> str | None:
    head = _git(top, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return head.decode().strip() if head else None


def _is_dirty(top: bytes, excluded: _Excluded) -> bool | None:
    status = _git(
        *(top, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=none")
    )
    if status is None:
        return None
    # "XY path", and no second path without renames.
    return any(entry[3:].rstrip(b"/") not in excluded for entry in status.split(b"\0") if entry)


def _source_tree(top: bytes, excluded: _Excluded) -> str | None:
    total = hashlib.sha256()
    try:
        paths = _source_paths(top, excluded)
        # Hashing releases the interpreter lock, and reading waits for the disk.
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for path, entry in zip(paths, pool.map(lambda path: _entry(top, path), paths), strict=True):
                if entry is not None:
                    total.update(b"%b %b\0" % (entry, path))
    except OSError:
        return None
    return total.hexdigest()


def _source_paths(top: bytes, excluded: _Excluded) -> list[bytes]:
    return sorted(_without_followed_links(top, set(_listed(top, b"", excluded))))


def _listed(top: bytes, folder: bytes, excluded: _Excluded) -> Iterator[bytes]:
    """Yield the paths of tracked and untracked, unignored files below ``folder``, relative to ``top``."""
    listing = _git(os.path.join(top, folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listing is None:
        raise OSError(f"git cannot list {os.fsdecode(folder)!r}")
    for name in listing.split(b"\0"):
        path = os.path.join(folder, name.rstrip(b"/"))
        if not name or path in excluded:
            continue
        if _is_repository(os.path.join(top, path)):
            yield from _listed(top, path, excluded)
        else:
            yield path


def _without_followed_links(top: bytes, paths: Iterable[bytes]) -> Iterator[bytes]:
    """Leave out tracked files of a folder that is a link by now: the link is listed, and what it leads to is not."""
    is_real = {
        folder: os.path.realpath(folder) == folder for folder in {os.path.dirname(top + b"/" + p) for p in paths}
    }
    return (path for path in paths if is_real[os.path.dirname(top + b"/" + path)])


def _is_repository(path: bytes) -> bool:
    """Whether a listed path is a submodule that is checked out, or a repository inside this one."""
    return os.path.isdir(path) and not os.path.islink(path) and os.path.lexists(os.path.join(path, b".git"))


def _entry(top: bytes, path: bytes) -> bytes | None:
    """Return mode and content hash of a file; None if there is none (deleted, or a submodule not checked out)."""
    full = os.path.join(top, path)
    try:
        mode = os.lstat(full).st_mode
        if stat.S_ISLNK(mode):
            return b"120000 " + hashlib.sha256(os.readlink(full)).hexdigest().encode()
        if stat.S_ISREG(mode):
            return (b"100755 " if mode & stat.S_IXUSR else b"100644 ") + _content_hash(full)
    except (FileNotFoundError, NotADirectoryError):
        pass  # tracked, and gone from the working tree
    return None


def _content_hash(path: bytes) -> bytes:
    content = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_READ_SIZE):
            content.update(block)
    return content.hexdigest().encode()
