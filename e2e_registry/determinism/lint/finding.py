"""What the lint says: one finding a place, and the report of a whole invocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def shown(path: Path) -> str:
    """Return a path as text that any output can take: a file's name may hold bytes that are no text."""
    return path.as_posix().encode(errors="replace").decode()


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place in one file where a rule applies.

    Attributes:
        path: The file as the user named it or as the walk found it.
        line: First line of the flagged code, from 1.
        column: First character of it, from 1 (characters, not bytes).
        end_line: Last line of the flagged code.
        end_column: Character after its last one, from 1.
        code: The rule's code, such as ``DET001``.
        message: What is wrong at this place.
        source_line: The text of ``line``, for people.
    """

    path: Path
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    message: str
    source_line: str = field(default="", compare=False)

    @property
    def location(self) -> str:
        """The place as editors and terminals understand it: ``file:line:column``."""
        return f"{shown(self.path)}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A file that was named and not read as Python, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport:
    """What one invocation found.

    Attributes:
        findings: In order of path, line and column.
        files: How many files were checked.
        suppressed: How many findings a suppression with a reason took away.
        skipped: Files that were named and are not Python source.
        base: The revision that new uses were measured against, if any.
    """

    findings: Sequence[Finding]
    files: int
    suppressed: int = 0
    skipped: Sequence[Skipped] = ()
    base: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How often each code was found, in order of code."""
        return dict(sorted(Counter(finding.code for finding in self.findings).items()))
