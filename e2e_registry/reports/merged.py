"""Renders the merged results of several machines for a terminal or a log."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from e2e_registry.comparison import TestVerdict
from e2e_registry.comparison.merged import MergedResults, MergedVerdict
from e2e_registry.printable import printable_line
from e2e_registry.reports.console import VERDICT_STYLES, print_line, print_lines, print_table, print_warnings
from e2e_registry.reports.recorded import first_divergence, first_reason
from e2e_registry.reports.values import count_text

#: Verdicts that a log shows before it only counts; the JSON and the artifacts hold all.
MAX_VERDICTS = 200


def print_merged(merged: MergedResults, console: Console) -> None:
    """Print the headline, what is wrong with the results as a whole, and a line a verdict."""
    console.print(Text(headline(merged), "bold red" if merged.exit_code else "bold green"), soft_wrap=True)
    print_lines(console, [one_line(problem.message) for problem in merged.problems], "problem", style="red")
    print_warnings([one_line(warning) for warning in merged.warnings], console)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    for verdict in merged.verdicts[:MAX_VERDICTS]:
        cells = [verdict_text(verdict), verdict.test, verdict.platform or "-", what_text(verdict)]
        table.add_row(*map(one_line, cells), style=_style(verdict))
    if merged.verdicts:
        print_table(table, console)
    if len(merged.verdicts) > MAX_VERDICTS:
        print_line(console, f"… and {len(merged.verdicts) - MAX_VERDICTS} more")


def one_line(value: str, limit: int = 300) -> str:
    """Return text that a terminal shows and does not obey: control characters escaped, on one line, clipped."""
    return printable_line(value if len(value) <= limit else value[: limit - 1] + "…")


def _style(verdict: MergedVerdict) -> str:
    if verdict.is_missing or verdict.verdict is None:
        return "bold red" if verdict.exit_code else "dim"
    return VERDICT_STYLES[verdict.verdict] if verdict.exit_code or verdict.verdict is TestVerdict.MATCH else ""


def headline(merged: MergedResults) -> str:
    """Say how many of the required verdicts are fine."""
    required = [verdict for verdict in merged.verdicts if verdict.standing.value == "required"]
    good = len(required) - sum(verdict in merged.failing for verdict in required)
    missing = sum(verdict.is_missing for verdict in required)
    parts = [f"{good} of {count_text(len(required), 'required verdict')} fine"]
    parts += [f"{missing} missing"] if missing else []
    parts += [count_text(len(merged.problems), "problem")] if merged.problems else []
    return f"End to end: {', '.join(parts)}, {count_text(merged.num_jobs, 'job')}"


def verdict_text(verdict: MergedVerdict) -> str:
    """Name the verdict, and what it counts for if that is nothing."""
    if verdict.verdict is None or verdict.is_missing:
        name = "no verdict" if verdict.standing.value == "required" else "not run"
    else:
        name = verdict.verdict.value
    if verdict.is_quarantined:
        return f"{name} (quarantined)"
    return name if verdict.standing.value == "required" else f"{name} (for information)"


def what_text(verdict: MergedVerdict) -> str:
    """Say in one sentence what explains a verdict; empty where nothing needs to."""
    if verdict.verdict is TestVerdict.MATCH:
        return ""
    first = first_divergence(verdict.result)
    return verdict.note or (f"first at {first}" if first else "") or first_reason(verdict.result)
