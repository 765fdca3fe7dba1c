"""Which lines are new since a revision, from git."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e_registry.errors import UsageError

_HUNK = re.compile(rb"@@ -\d+(?:,(?P<removed>\d+))? \+(?P<start>\d+)(?:,(?P<added>\d+))? @@")
#: Options that make the patch independent of the user's git settings, and no larger than it must be.
_DIFF = (
    "-c",
    "core.quotePath=true",
    "diff",
    "--unified=0",
    "--inter-hunk-context=0",
    "--diff-algorithm=minimal",
    "--find-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--ignore-submodules",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)

#: What git sets for hooks: with them, ``git -C folder`` takes the folder for the top of the working tree.
_HOOK_VARIABLES = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"})


@dataclass(slots=True)
class FileChanges:
    """What changed in one file.

    Attributes:
        is_new: The whole file is new.
        added: Lines of the present text that were added or rewritten, from 1.
        removed_after: Lines of the present text behind which lines were removed.
    """

    is_new: bool = False
    added: set[int] = field(default_factory=set)
    removed_after: set[int] = field(default_factory=set)

    def touches(self, first: int, last: int) -> bool:
        """Whether a line from ``first`` to ``last`` is new, or a line between them is gone.

        A call that lost its ``generator=`` argument is a new use as much as one that gained workers.
        """
        lines = range(first, last + 1)
        return (
            self.is_new
            or any(line in self.added for line in lines)
            or any(line in self.removed_after for line in lines[:-1])
        )


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """The changes of a working tree since the point where it left a revision.

    Attributes:
        root: The top folder of the repository.
        files: Resolved path to its changes. Untracked files that git does not ignore are new.
    """

    root: Path
    files: Mapping[Path, FileChanges]

    def of(self, path: Path) -> FileChanges | None:
        """Return the changes of a file, or ``None`` if it has none.

        Raises:
            UsageError: The file is outside of the repository.
        """
        resolved = path.resolve()
        if not resolved.is_relative_to(self.root):
            raise UsageError(
                f"--diff cannot tell what is new here: the file is outside of {self.root}",
                where=path,
                hint="run the lint in the repository that holds the files",
            )
        return self.files.get(resolved)


def changes_since(base: str, *, folder: Path) -> ChangedFiles:
    """Compare the working tree with the merge base of ``base`` and HEAD.

    Args:
        base: Any revision that git understands, such as ``origin/main``.
        folder: A folder inside the repository.

    Raises:
        UsageError: There is no git, no repository, no such revision, or no common history.
    """
    if base.startswith("-") or not base.strip():
        raise UsageError(f"--diff {base!r} is not a revision", hint="for example --diff origin/main")
    root = Path(
        os.fsdecode(_git(folder, ["rev-parse", "--show-toplevel"], "not inside a git repository").rstrip(b"\n"))
    )
    merge_base = _empty_tree(root) if base == "HEAD" and _has_no_commit(root) else _merge_base(root, base)
    patch = _git(root, [*_DIFF, merge_base, "--"], "git diff failed")
    files = {(root / name).resolve(): changes for name, changes in _read_patch(patch)}
    untracked = _git(root, ["ls-files", "--others", "--exclude-standard", "-z"], "git ls-files failed")
    for name in filter(None, untracked.split(b"\0")):
        files[(root / os.fsdecode(name)).resolve()] = FileChanges(is_new=True)
    return ChangedFiles(root.resolve(), files)


def _has_no_commit(root: Path) -> bool:
    """Whether the repository is new, as at the hook of its first commit: then everything is."""
    return not _git(root, ["rev-list", "--all", "--max-count=1"], "git rev-list failed").strip()


def _empty_tree(root: Path) -> str:
    return _git(root, ["hash-object", "-t", "tree", os.devnull], "git hash-object failed").decode().strip()


def _merge_base(root: Path, base: str) -> str:
    shallow_hint = "fetch the revision and its history: git fetch origin, or fetch-depth: 0 in actions/checkout"
    _git(
        root,
        ["rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"],
        f"git knows no revision {base!r}",
        shallow_hint,
    )
    no_history = f"HEAD and {base!r} have no commit in common"
    return _git(root, ["merge-base", base, "HEAD"], no_history, shallow_hint).decode().strip()


def _git(folder: Path, arguments: Sequence[str], problem: str, hint: str | None = None) -> bytes:
    environment = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise UsageError("--diff needs git, which is not installed", hint="install git, or leave --diff out") from error
    if result.returncode != 0:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"{problem}{f' ({said[0]})' if said else ''}", where=folder, hint=hint or "leave --diff out")
    return result.stdout


def _read_patch(patch: bytes) -> Iterator[tuple[str, FileChanges]]:
    """Yield each file of a patch without context lines, by its present name; deleted files are left out."""
    name: str | None = None
    changes = FileChanges()
    lines = iter(patch.split(b"\n"))
    for line in lines:
        if line.startswith(b"diff --git "):
            if name is not None:
                yield name, changes
            name, changes = None, FileChanges()
        elif line.startswith(b"+++ "):
            name = _read_name(line.removeprefix(b"+++ "))
        elif match := _HUNK.match(line):
            start, added, removed = int(match["start"]), _count(match["added"]), _count(match["removed"])
            changes.added.update(range(start, start + added))
            if added == 0:
                changes.removed_after.add(start)
            _skip_content(lines, added + removed)
    if name is not None:
        yield name, changes


def _skip_content(lines: Iterator[bytes], count: int) -> None:
    """Count a hunk's lines off, never reading them: an added line may itself be ``++ b/other.py``."""
    while count > 0:
        # Git's remark that a file ends without a newline stands between them and is none of them.
        if not next(lines, b"").startswith(b"\\"):
            count -= 1


def _count(group: bytes | None) -> int:
    return 1 if group is None else int(group)


def _read_name(field_text: bytes) -> str | None:
    """Return the path after ``+++``: git quotes unusual characters as C does, and ends names with spaces by a tab."""
    text = field_text.rstrip(b"\t")
    if text == b"/dev/null":
        return None
    if text.startswith(b'"'):
        text = ast.literal_eval("b" + text.decode("ascii"))
    return os.fsdecode(text.removeprefix(b"b/"))
