"""Renders what recording, adopting and running did."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from e2e_registry.comparison import Action, StandardChange, Verdict
from e2e_registry.comparison.change import REPEAT_UNPROVEN
from e2e_registry.reports.console import (
    print_comparison,
    print_environment,
    print_line,
    print_lines,
    print_log_tail,
    print_table,
    print_warnings,
    rendered,
)
from e2e_registry.reports.inventory import extents_table
from e2e_registry.reports.values import MAX_SHOWN, count_text, listed
from e2e_registry.series import SeriesExtent

ACTION_STYLES = {
    Action.CREATED: "bold green",
    Action.UPDATED: "bold yellow",
    Action.VALUES_UNCHANGED: "green",
    Action.UNCHANGED: "green",
    Action.REFUSED: "bold red",
}


def print_change(change: StandardChange, console: Console, *, all_metrics: bool = False) -> None:
    """Print what became of a standard, and what changed against the old one, first divergence first."""
    text = Text(change.action.value, ACTION_STYLES[change.action])
    text.append(f"  {change.subject}", "bold").append(f"  {change.platform}", "cyan")
    console.print(text, soft_wrap=True)
    if change.disagreement is not None:
        print_line(console, "two runs of the same recipe do not agree, so there is nothing to record:", "red")
        print_comparison(change.disagreement, console, all_metrics=all_metrics)
        print_warnings(change.warnings, console)
        print_line(console, "next: make the recipe repeat; a tolerance is right only where it cannot")
        return
    print_difference(change, console, all_metrics=all_metrics)
    for warning in change.warnings:
        print_line(console, f"warning: {warning}", "yellow")
    print_outcome(change, console)
    if change.action is not Action.UNCHANGED:
        print_line(console, f"next: review and commit it: git add {change.path}")


def print_difference(change: StandardChange, console: Console, *, all_metrics: bool = False) -> None:
    """Print how a run differs from the old standard, and how many runs stand behind it."""
    if change.action is Action.VALUES_UNCHANGED:
        print_line(console, "values unchanged; what else changed:")
    elif change.metadata_changes:
        print_line(console, "what changes beside the values:")
    changes = [f"  {text}" for text in change.metadata_changes]
    print_lines(console, changes, "such change", style="yellow", limit=None if all_metrics else MAX_SHOWN)
    differs = change.change is not None and change.change.verdict is not Verdict.MATCH
    if change.change is not None and differs:
        print_line(console, "the new run against the old standard, largest change first:")
        print_comparison(change.change, console, all_metrics=all_metrics, is_change=True)
    if differs or change.action in (Action.UPDATED, Action.VALUES_UNCHANGED):
        print_environment(change.environment, console)
    if change.kept_old:
        names = listed([str(key) for key in change.kept_old])
        print_line(console, f"within their tolerance, so their old rows stay (--refresh renews them): {names}")
    print_line(console, _agreement(change))
    print_warnings(change.warnings, console)


def print_outcome(change: StandardChange, console: Console) -> None:
    """Print whether the standard was written, and how much it holds."""
    verb = "stays as it was" if change.action is Action.UNCHANGED else "written"
    print_line(console, f"{change.path} {verb} ({count_text(change.num_points, 'point')})")


def change_text(change: StandardChange) -> str:
    """Return what :func:`print_change` prints."""
    return rendered(lambda console: print_change(change, console))


def _agreement(change: StandardChange) -> str:
    if change.runs_agreed is None:
        return f"one run: {REPEAT_UNPROVEN}"
    reused = "" if change.reused_run is None else f", one of them kept from before: {change.reused_run}"
    return f"{change.runs_agreed} runs agree{reused}"


def print_run(
    label: str,
    outcome: str,
    platform: str,
    series: Sequence[SeriesExtent],
    problems: Sequence[str],
    console: Console,
    *,
    warnings: Sequence[str] = (),
    log_tail: str = "",
) -> None:
    """Print what one run recorded.

    Args:
        label: The run directory.
        outcome: How the recipe ended, in words.
        platform: The platform slug.
        series: The recorded series.
        problems: What is wrong with the recording.
        console: Where to print.
        warnings: What may be wrong with it.
        log_tail: The last lines of its output, of a recipe that failed.
    """
    ended = f"the recipe {outcome}"
    text = Text(ended, "green" if not problems else "red")
    text.append(f"  {platform}", "cyan")
    console.print(text, soft_wrap=True)
    for problem in problems:
        if problem != ended:
            print_line(console, problem, "red")
    print_warnings(warnings, console)
    print_log_tail(log_tail, console)
    if series:
        print_table(extents_table(series), console)
    console.print(Text(f"kept: {label}"), soft_wrap=True)
