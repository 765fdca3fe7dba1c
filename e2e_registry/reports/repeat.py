"""Renders whether a recipe repeats: a verdict line, then what differs, metrics before checkpoints."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from e2e_registry.comparison.checkpoints import CheckpointComparison, EntryDifference, EntryFault, FileComparison
from e2e_registry.comparison.repeatability import Control, Cost, RepeatResult, RepeatVerdict, RunComparison
from e2e_registry.reports.console import print_comparison, print_environment, print_line, print_warnings
from e2e_registry.reports.values import count_text, listed, pair_text

#: Differing files, and differing entries of each, that a report shows before it only counts.
MAX_FILES = 4
MAX_ENTRIES = 8

VERDICT_STYLES = {
    RepeatVerdict.REPEATABLE: "green",
    RepeatVerdict.NOT_REPEATABLE: "bold red",
    RepeatVerdict.CONTROL_EQUAL: "bold red",
}


def print_repeat(result: RepeatResult, console: Console, *, all_metrics: bool = False) -> None:
    """Print a verdict and what explains it; bounded in length, unless every series is asked for."""
    text = Text(result.verdict.value, VERDICT_STYLES[result.verdict])
    text.append(f"  {result.subject}", "bold").append(f"  {result.platform}", "cyan")
    console.print(text, soft_wrap=True)
    if result.differing:
        _print_difference(result, console, all_metrics=all_metrics)
    else:
        print_line(console, f"{count_text(result.num_runs, 'run')} equal in every bit: {_extent(result)}")
    if result.control is not None:
        _print_control(result, result.control, console)
    if result.cost is not None:
        print_line(console, _cost_text(result.cost))
    print_warnings(result.warnings, console)
    kept = [result.first_run, *(comparison.run for comparison in result.comparisons)]
    print_line(console, f"kept runs: {listed(kept)}", "dim")


def _extent(result: RepeatResult) -> str:
    parts = []
    if result.num_series:
        series = count_text(result.num_series, "series", "series")
        parts.append(f"{series}, {count_text(result.num_points, 'point')}")
    checkpoints = result.comparisons[0].checkpoints
    if checkpoints.files:
        files = count_text(len(checkpoints.files), "checkpoint")
        parts.append(f"{files}, {count_text(checkpoints.num_entries, 'entry', 'entries')}")
    return "; ".join(parts)


def _print_difference(result: RepeatResult, console: Console, *, all_metrics: bool) -> None:
    shown = result.differing[0]
    number = list(result.comparisons).index(shown) + 2
    others = len(result.differing) - 1
    more = "" if not others else f", and so do {others} more" if others > 1 else ", and so does one more"
    print_line(console, f"run {number} of {result.num_runs} differs from run 1{more}; below, run 1 is the standard")
    if shown.are_metrics_equal:
        equal = count_text(result.num_series, "series", "series")
        print_line(console, f"metrics: {equal} equal" if result.num_series else "metrics: none logged")
    else:
        print_comparison(shown.metrics, console, all_metrics=all_metrics)
    _print_checkpoints(shown.checkpoints, console)
    print_environment(shown.environment, console)


def _print_checkpoints(comparison: CheckpointComparison, console: Console) -> None:
    if not comparison.files:
        print_line(console, "checkpoints: none found", "dim")
        return
    differing = comparison.differing
    if not differing:
        entries = count_text(comparison.num_entries, "entry", "entries")
        print_line(console, f"checkpoints: {count_text(len(comparison.files), 'file')} equal, {entries}")
        return
    print_line(console, f"checkpoints differ: {len(differing)} of {count_text(len(comparison.files), 'file')}", "bold")
    for file in differing[:MAX_FILES]:
        _print_file(file, console)
    if len(differing) > MAX_FILES:
        print_line(console, f"  … and {count_text(len(differing) - MAX_FILES, 'more file', 'more files')}")


def _print_file(file: FileComparison, console: Console) -> None:
    of = f"{len(file.differences)} of {count_text(file.num_entries, 'entry', 'entries')}"
    groups = [f"{name} {failed}/{total}" for name, (failed, total) in file.groups.items()]
    by_group = f" ({listed(groups)})" if groups else ""
    if file.format == "bytes":
        print_line(console, f"  {file.path}, compared as bytes: {_difference_text(file.differences[0])}")
    else:
        print_line(console, f"  {file.path}: {of} differ{by_group}; the first:")
        for difference in file.differences[:MAX_ENTRIES]:
            print_line(console, f"    {difference.name}: {_difference_text(difference)}", "red")
        hidden = len(file.differences) - MAX_ENTRIES
        if hidden > 0:
            print_line(console, f"    … and {count_text(hidden, 'more entry', 'more entries')}")
    if file.note is not None:
        print_line(console, f"    {file.note}", "dim")


def _difference_text(difference: EntryDifference) -> str:
    match difference.fault:
        case EntryFault.ONLY_WANT:
            return f"missing (run 1 has {difference.want})"
        case EntryFault.ONLY_GOT:
            return f"not in run 1 (got {difference.got})"
        case EntryFault.DTYPE | EntryFault.SHAPE:
            return f"want {difference.want}, got {difference.got}"
        case EntryFault.BITS if difference.index is None:
            return f"want {difference.want}, got {difference.got}"
    place = "" if not difference.index else f" at {list(difference.index)}"
    values = ""
    if difference.want_point is not None and difference.got_point is not None:
        want, got = pair_text(difference.want_point, difference.got_point)
        values = f": want {want}, got {got}"
    count = f"{difference.num_differing:,} of {count_text(difference.num_elements, 'element')} differ"
    return f"{difference.want}, {count}, first{place}{values}"


def _print_control(result: RepeatResult, control: Control, console: Console) -> None:
    if not control.differs and control.comparison.metrics.failing:
        digests = listed([str(result.key) for result in control.comparison.metrics.failing])
        message = (
            f"control: seed {control.seed} changes {digests}, and no judged number: all equal those of seed "
            f"{result.seed}. The seed does not reach what is trained, so equal runs prove nothing: do the weights, or "
            "what they are trained on, depend on it?"
        )
        print_line(console, message, "red")
        return
    if not control.differs:
        message = (
            f"control: seed {control.seed} gives the same bits as seed {result.seed}. The seed reaches nothing that is "
            "measured, so equal runs prove nothing: is it read, and are the metrics those of the training?"
        )
        print_line(console, message, "red")
        return
    print_line(
        console, f"control: seed {control.seed} differs from seed {result.seed}, {_first_place(control.comparison)}"
    )


def _first_place(comparison: RunComparison) -> str:
    first = comparison.metrics.first_divergence
    if first is not None:
        want, got = pair_text(first.want, first.got)
        return f"first at {first.key}, step {first.step}: {want} and {got}"
    file = comparison.checkpoints.differing[0]
    return f"first in {file.path}, {file.differences[0].name or 'its bytes'}"


def _cost_text(cost: Cost) -> str:
    ratios = cost.ratios
    without = f" without {shlex.join(cost.removed)} and" if cost.removed else " without"
    return (
        f"cost of deterministic mode: {cost.median_ratio:.2f} times the wall time of plain mode (whole processes, "
        f"median of {count_text(len(ratios), 'pair')}, {ratios[0]:.2f} to {ratios[-1]:.2f}); plain mode runs{without} "
        "the profile's variables"
    )
