"""A report as text, as GitHub annotations, and as JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from e2e_registry.determinism.lint.catalogue import CATALOGUE
from e2e_registry.determinism.lint.finding import Finding, LintReport, shown
from e2e_registry.determinism.lint.rule import Documented

_WIDTH = 100


def render_text(report: LintReport) -> str:
    """Render for people: each finding with its line of source, then once per rule why and what to do."""
    blocks = [_finding_text(finding) for finding in report.findings]
    blocks += [_explanation(code) for code in report.counts]
    blocks += [f"{shown(skipped.path)}: skipped, {skipped.reason}" for skipped in report.skipped]
    return "\n".join([*blocks, _summary(report)])


def render_github(report: LintReport) -> str:
    """Render as workflow commands, which GitHub shows beside the lines of a pull request.

    GitHub shows ten annotations of a kind for each step, so the summary line gives the whole count.
    """
    return "\n".join([*(_annotation(finding) for finding in report.findings), _summary(report)])


def report_json(report: LintReport) -> dict[str, Any]:
    """Return a report for programs; ``rules`` holds the texts of the codes that occur."""
    return {
        "format": 1,
        "files": report.files,
        "suppressed": report.suppressed,
        "base": report.base,
        "counts": report.counts,
        "findings": [_finding_json(finding) for finding in report.findings],
        "skipped": [{"path": shown(skipped.path), "reason": skipped.reason} for skipped in report.skipped],
        "rules": {code: rule_json(CATALOGUE[code]) for code in report.counts},
    }


def render_rule(entry: Documented) -> str:
    """Render all that is known about one code, for ``--explain``."""
    parts = [
        f"{entry.code} {entry.name}: {entry.summary}",
        f"Why\n{_wrapped(entry.why)}",
        f"Fix\n{_wrapped(entry.fix)}",
        *([f"Scope\n{_wrapped(entry.scope)}"] if entry.scope else []),
        f"Reported\n{textwrap.indent(entry.flagged.strip(), '    ')}",
        f"Not reported\n{textwrap.indent(entry.clean.strip(), '    ')}",
    ]
    return "\n\n".join(parts)


def render_rule_list(entries: Iterable[Documented]) -> str:
    """Render one line a code."""
    listed = list(entries)
    width = max(len(entry.name) for entry in listed)
    return "\n".join(f"{entry.code}  {entry.name:<{width}}  {entry.summary}" for entry in listed)


def rule_json(entry: Documented) -> dict[str, str]:
    """Return the texts of one code."""
    names = ("code", "name", "summary", "why", "fix", "scope")
    return {name: getattr(entry, name) for name in names}


def _finding_text(finding: Finding) -> str:
    head = f"{finding.location}: {finding.code} {CATALOGUE[finding.code].name}: {finding.message}"
    source = finding.source_line.strip()
    return f"{head}\n    {source[:_WIDTH]}" if source else head


def _explanation(code: str) -> str:
    entry = CATALOGUE[code]
    return f"\n{code} {entry.name}: {entry.summary}\n{_wrapped(f'Why: {entry.why}')}\n{_wrapped(f'Fix: {entry.fix}')}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _summary(report: LintReport) -> str:
    findings, files = len(report.findings), report.files
    text = f"{findings or 'no'} finding{'' if findings == 1 else 's'} in {files} file{'' if files == 1 else 's'}"
    if report.base is not None:
        text += f" changed since {report.base}"
    if report.suppressed:
        text += f", {report.suppressed} suppressed with a reason"
    counts = ", ".join(f"{code} {count}" for code, count in report.counts.items())
    return f"\n{text}{f' ({counts})' if counts else ''}"


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "path": shown(finding.path),
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "code": finding.code,
        "name": CATALOGUE[finding.code].name,
        "message": finding.message,
    }


def _annotation(finding: Finding) -> str:
    entry = CATALOGUE[finding.code]
    # A column range is only meaningful to GitHub inside one line.
    columns = {"col": finding.column, "endColumn": finding.end_column} if finding.line == finding.end_line else {}
    properties = {
        "file": _workspace_path(finding.path),
        "line": finding.line,
        "endLine": finding.end_line,
        **columns,
        "title": f"{finding.code} {entry.name}",
    }
    written = ",".join(f"{name}={_escape_property(str(value))}" for name, value in properties.items())
    return f"::error {written}::{_escape_data(f'{finding.message}. Fix: {entry.fix}')}"


def _workspace_path(path: Path) -> str:
    """Return the path from the checkout's root, which is how GitHub finds the file of an annotation."""
    workspace = os.environ.get("GITHUB_WORKSPACE")
    root = Path(workspace).resolve() if workspace else Path.cwd()
    resolved = path.resolve()
    return shown(resolved.relative_to(root) if resolved.is_relative_to(root) else path)


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
