"""Renders what an artifact offers for the standards, and what was made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from e2e_registry.comparison import Action, StandardChange
from e2e_registry.reports.console import print_line, print_table
from e2e_registry.reports.recording import print_difference
from e2e_registry.reports.values import count_text

#: What becomes, or became, of a run, and how that is shown.
DECISION_STYLES = {
    "pending": "bold yellow",
    "accepted": "bold green",
    "rejected": "bold red",
    "skipped": "dim",
    "unchanged": "green",
    "refused": "bold red",
}

#: What the keys of a review do. As in `cargo insta review`, a capital letter speaks for all that is left.
KEYS = {
    "a": "accept: the run becomes the standard",
    "r": "reject: the standard stays, and this run is not asked about again, unless --test names it",
    "s": "skip: decide later; the next `accept` asks again",
    "A": "accept this and all that follow",
    "q": "quit: skip this and all that follow",
}


def print_proposal(change: StandardChange, run: str | None, place: str, console: Console, *, all_metrics: bool) -> None:
    """Print what accepting a run would do.

    Args:
        change: The change that was prepared.
        run: Where the run lies in the artifact.
        place: Its place among those that are to decide, such as ``1 of 3``.
        console: Where to print.
        all_metrics: Show every series, also those that are equal.
    """
    verb = {Action.CREATED: "new standard", Action.UPDATED: "change"}.get(change.action, "change beside the values")
    text = Text(f"{verb} {place}", "bold yellow").append(f"  {change.subject}", "bold")
    console.print(text.append(f"  {change.platform}", "cyan"), soft_wrap=True)
    print_difference(change, console, all_metrics=all_metrics)
    if change.change is None:
        print_line(console, f"no standard for this platform yet; this one would hold {_points(change)}")
    print_line(console, f"run: {run}", "dim")


def print_decision(decision: str, subject: str, platform: str | None, detail: str | None, console: Console) -> None:
    """Print what became of one run, and why or where."""
    text = Text(decision, DECISION_STYLES[decision]).append(f"  {subject}", "bold")
    if platform is not None:
        text.append(f"  {platform}", "cyan")
    console.print(text, soft_wrap=True)
    if detail is not None:
        print_line(console, detail)


def print_keys(console: Console) -> None:
    """Print what the keys of a review do."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    for key, meaning in KEYS.items():
        table.add_row(key, meaning)
    print_table(table, console)


def print_decisions(decisions: Sequence[str], written: Sequence[str], console: Console) -> None:
    """Print one line that counts the decisions, and how to commit what was written."""
    counts = Counter(decisions)
    text = Text(f"{count_text(len(decisions), 'run')}: ")
    parts = [Text(f"{counts[decision]} {decision}", DECISION_STYLES[decision]) for decision in counts]
    console.print(text + Text(", ").join(parts), soft_wrap=True)
    if written:
        print_line(console, f"next: review and commit: git add {' '.join(written)}")


def _points(change: StandardChange) -> str:
    return count_text(change.num_points, "point")
