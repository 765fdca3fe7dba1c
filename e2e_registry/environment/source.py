"""What code a run was made from: the commit, and a hash of the working tree that outlives it.

A commit id does not survive a squash or a merge, although no byte of code changed; and it says nothing of edits that
were never committed. So a run also records the hash of the working tree itself, computed from what lies on disk:
neither HEAD nor the index enters it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e_registry.errors import UsageError

#: Set by CI, which checks out a merge commit: the source tree of the pull request's own head.
HEAD_SOURCE_TREE_VARIABLE = "E2E_REGISTRY_HEAD_SOURCE_TREE"

_NO_VARIABLES: Mapping[str, str] = {}
_READ_SIZE = 1 << 20
_SUBMODULE_MODE = b"160000"
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
        no git, no repository or no commit; ``source_tree`` also where a file cannot be read. ``head_source_tree`` is
        what the variable ``E2E_REGISTRY_HEAD_SOURCE_TREE`` holds, None if it is not set.

    Raises:
        UsageError: The variable holds no hash of a source tree.
    """
    facts: dict[str, Any] = {"head": None, "dirty": None, "source_tree": None, "head_source_tree": _head_source_tree()}
    top = _top_level(root)
    if top is None:
        return facts
    excluded = _Excluded(top, [root / path for path in exclude])
    return facts | {
        "head": _head(top),
        "dirty": _is_dirty(top, excluded),
        "source_tree": _source_tree(top, excluded),
    }


def source_tree_of_revision(root: Path, revision: str, exclude: Sequence[Path] = ()) -> str | None:
    """Return the ``source_tree`` that :func:`source_facts` would find in a clean checkout of a revision.

    Git itself writes the revision's files into a temporary folder, through an index of its own: so the attributes of
    that revision decide line ends and filters, as they would in a checkout, and nothing of the repository changes.
    Files of a submodule count if it is checked out here, since a clean checkout leaves the others empty.

    Args:
        root: A folder in the work tree.
        revision: A commit, or what names one.
        exclude: See :func:`source_facts`; they are looked up in the work tree as it is.

    Returns:
        The hash; None where there is no git, no repository, no such commit, or the commit of a submodule is missing.
    """
    top = _top_level(root)
    commit = None if top is None else _commit(top, revision)
    if top is None or commit is None:
        return None
    excluded = _Excluded(top, [root / path for path in exclude])
    with tempfile.TemporaryDirectory(prefix="e2e-source-") as folder:
        base = os.fsencode(folder)
        try:
            paths = sorted(set(_checked_out(top, commit, b"", base, excluded)))
            return _hashed(base + b"/tree", paths)
        except OSError:
            return None


def _head_source_tree() -> str | None:
    tree = os.environ.get(HEAD_SOURCE_TREE_VARIABLE)
    if not tree:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", tree):
        raise UsageError(
            f"{tree[:80]!r} is no hash of a source tree",
            where=HEAD_SOURCE_TREE_VARIABLE,
            hint="take head_source_tree of `e2e-registry plan --head-rev COMMIT`, or unset it",
        )
    return tree


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


def _git(folder: bytes, *arguments: str, variables: Mapping[str, str] = _NO_VARIABLES) -> bytes | None:
    """Return what git prints; None if it fails or is not installed."""
    # Inherited from a hook or a CI step, GIT_DIR, GIT_INDEX_FILE and others would answer for another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Reading must not take the index lock from a commit that runs at the same time.
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    environment.update(variables)
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
    return _commit(top, "HEAD")


def _commit(top: bytes, revision: str) -> str | None:
    if "\0" in revision:
        return None
    commit = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    return commit.decode().strip() if commit else None


def _is_dirty(top: bytes, excluded: _Excluded) -> bool | None:
    status = _git(
        *(top, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=none")
    )
    if status is None:
        return None
    # "XY path", and no second path without renames.
    return any(entry[3:].rstrip(b"/") not in excluded for entry in status.split(b"\0") if entry)


def _source_tree(top: bytes, excluded: _Excluded) -> str | None:
    try:
        return _hashed(top, _source_paths(top, excluded))
    except OSError:
        return None


def _hashed(top: bytes, paths: Sequence[bytes]) -> str:
    total = hashlib.sha256()
    # Hashing releases the interpreter lock, and reading waits for the disk.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for path, entry in zip(paths, pool.map(lambda path: _entry(top, path), paths), strict=True):
            if entry is not None:
                total.update(b"%b %b\0" % (entry, path))
    return total.hexdigest()


def _checked_out(top: bytes, commit: str, folder: bytes, base: bytes, excluded: _Excluded) -> Iterator[bytes]:
    """Write a commit's files below ``base/tree/folder`` and yield their paths, relative to ``base/tree``.

    Args:
        top: The work tree.
        commit: A commit of the repository that ``folder`` is the work tree of.
        folder: Empty, or a submodule that is checked out, relative to ``top``.
        base: A temporary folder.
        excluded: What does not count.

    Raises:
        OSError: Git cannot read or write the commit.
    """
    repository = os.path.join(top, folder)
    git_dir = _git(repository, "rev-parse", "--absolute-git-dir")
    work_tree = os.path.join(base, b"tree", folder)
    os.makedirs(work_tree, exist_ok=True)
    variables = {
        "GIT_DIR": os.fsdecode((git_dir or b"").removesuffix(b"\n")),
        "GIT_WORK_TREE": os.fsdecode(work_tree),
        "GIT_INDEX_FILE": os.fsdecode(os.path.join(base, hashlib.sha256(folder).hexdigest().encode())),
    }
    # Unlike `checkout-index`, which reads .gitattributes from the work tree, this takes those of the commit.
    command = ["read-tree", "--reset", "-u", "--no-recurse-submodules", commit]
    if not git_dir or _git(work_tree, *command, variables=variables) is None:
        raise OSError(f"git cannot check out {commit}")
    listing = _git(work_tree, "ls-files", "-z", "--stage", variables=variables) or b""
    for line in filter(None, listing.split(b"\0")):
        facts, _, name = line.partition(b"\t")
        mode, object_id, _ = facts.split(b" ")
        path = os.path.join(folder, name)
        if path in excluded:
            continue
        if mode != _SUBMODULE_MODE:
            yield path
        elif _is_repository(os.path.join(top, path)):
            yield from _checked_out(top, object_id.decode(), path, base, excluded)


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
