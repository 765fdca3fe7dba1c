"""The lint itself: files in, findings out. Opens no network, imports nothing that it checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.determinism.lint.catalogue import Selection, select
from e2e_registry.determinism.lint.changes import ChangedFiles, FileChanges, changes_since
from e2e_registry.determinism.lint.discovery import discover
from e2e_registry.determinism.lint.finding import Finding, LintReport
from e2e_registry.determinism.lint.meta import Unreadable
from e2e_registry.determinism.lint.module import Module, UnreadableSourceError, decode_source
from e2e_registry.determinism.lint.rule import Rule, Violation
from e2e_registry.determinism.lint.suppression import Suppression, complaints, read_suppressions


@dataclass(frozen=True, slots=True)
class FileResult:
    """What the lint says about one file.

    Attributes:
        findings: In order of line and column.
        suppressed: How many findings suppressions took away.
    """

    findings: Sequence[Finding]
    suppressed: int


def lint_paths(
    paths: Sequence[Path],
    *,
    selection: Selection | None = None,
    base: str | None = None,
    on_file: Callable[[int, int], None] | None = None,
) -> LintReport:
    """Check files and folders.

    Args:
        paths: Files and folders; folders are walked.
        selection: The codes to report; all by default.
        base: Report only findings on lines that are new since this revision.
        on_file: Called before each file with how many are done and how many there are.

    Raises:
        UsageError: A path does not exist, or git cannot tell what is new since ``base``.
    """
    selection = selection or select()
    files, skipped = discover(paths)
    changed = None if base is None else changes_since(base, folder=_folder(paths))
    if changed is not None:
        files = [file for file in files if changed.of(file) is not None]
    findings: list[Finding] = []
    suppressed = 0
    for done, file in enumerate(files):
        if on_file is not None:
            on_file(done, len(files))
        result = _lint_file(file, selection, changed)
        findings += result.findings
        suppressed += result.suppressed
    return LintReport(findings=findings, files=len(files), suppressed=suppressed, skipped=skipped, base=base)


def lint_source(
    data: bytes,
    path: Path,
    *,
    selection: Selection | None = None,
    changes: FileChanges | None = None,
    in_package: bool = False,
) -> FileResult:
    """Check the bytes of one file.

    Args:
        data: The file's content.
        path: The name that findings shall carry.
        selection: The codes to report; all by default.
        changes: Report only findings that these changes touch; all by default.
        in_package: Whether the file belongs to a package rather than being a script.
    """
    selection = selection or select()
    try:
        return _lint_module(Module(path, decode_source(data), in_package=in_package), selection, changes)
    except UnreadableSourceError as error:
        # A file that does not parse was not checked at all, so every line of it counts as touched.
        finding = Finding(path, error.line, error.column, error.line, error.column, Unreadable.code, error.reason)
        return FileResult([finding] if Unreadable.code in selection.codes else [], 0)


def _lint_module(module: Module, selection: Selection, changes: FileChanges | None) -> FileResult:
    suppressions = read_suppressions(module.text, module.lines)
    findings: list[Finding] = []
    suppressed = 0
    for rule, violation in _violations(module, selection):
        if _is_suppressed(module, rule.code, violation, suppressions):
            suppressed += 1
        else:
            findings.append(_finding(module, rule.code, violation))
    findings += _complaints(module, suppressions, selection)
    touched = [found for found in findings if changes is None or changes.touches(found.line, found.end_line)]
    return FileResult(sorted(set(touched)), suppressed)


def _violations(module: Module, selection: Selection) -> Iterator[tuple[Rule, Violation]]:
    for rule in selection.rules:
        if rule.applies_to(module.text):
            try:
                yield from ((rule, violation) for violation in rule.check(module))
            except RecursionError as error:
                # Generated code may nest deeper than a rule can describe, though the parser took it.
                raise UnreadableSourceError(f"nested too deeply to check for {rule.code}") from error


def _folder(paths: Sequence[Path]) -> Path:
    first = paths[0] if paths else Path()
    return first if first.is_dir() else first.parent


def _lint_file(file: Path, selection: Selection, changed: ChangedFiles | None) -> FileResult:
    try:
        data = file.read_bytes()
    except OSError as error:
        finding = Finding(file, 1, 1, 1, 1, Unreadable.code, f"cannot be read: {error.strerror}")
        return FileResult([finding] if Unreadable.code in selection.codes else [], 0)
    changes = None if changed is None else changed.of(file)
    in_package = (file.parent / "__init__.py").exists()
    return lint_source(data, file, selection=selection, changes=changes, in_package=in_package)


def _is_suppressed(module: Module, code: str, violation: Violation, suppressions: Sequence[Suppression]) -> bool:
    node = violation.node
    end = node.end_lineno or node.lineno
    lines = module.statement_lines(node)
    covering = [found for found in suppressions if found.covers(code, node.lineno, end, lines)]
    for suppression in covering:
        suppression.used.add(code)
    return bool(covering)


def _finding(module: Module, code: str, violation: Violation) -> Finding:
    node = violation.node
    end_line = node.end_lineno or node.lineno
    end_offset = node.col_offset if node.end_col_offset is None else node.end_col_offset
    return Finding(
        path=module.path,
        line=node.lineno,
        column=_column(module, node.lineno, node.col_offset),
        end_line=end_line,
        end_column=_column(module, end_line, end_offset),
        code=code,
        message=violation.message,
        source_line=module.lines[node.lineno - 1],
    )


def _column(module: Module, line: int, offset: int) -> int:
    """Turn the parser's offset in UTF-8 bytes into a column in characters, from 1."""
    return len(module.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1


def _complaints(module: Module, suppressions: Sequence[Suppression], selection: Selection) -> list[Finding]:
    judged = frozenset(rule.code for rule in selection.rules)
    return [
        Finding(
            path=module.path,
            line=found.line,
            column=found.column,
            end_line=found.line,
            end_column=found.end_column,
            code=code,
            message=message,
            source_line=module.lines[found.line - 1],
        )
        for found, code, message in complaints(suppressions, judged)
        if code in selection.codes
    ]
