"""Renders lists of tests, and standards as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from e2e_registry.registration import Registration
from e2e_registry.reports.console import print_table
from e2e_registry.reports.values import count_text, value_text
from e2e_registry.series import Point, SeriesExtent, SeriesKey
from e2e_registry.standard import StandardMetadata
from e2e_registry.tolerance import Policy

#: A test, the median of its measured durations in seconds if there is one, and the platforms of its standards.
TestRow = tuple[Registration, float | None, Sequence[str]]


def print_tests(tests: Sequence[TestRow], console: Console) -> None:
    """Print tests with their suites, how long they should take and took, and the platforms of their standards."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("test", "suite", "profile", "est. s", "measured s", "standards"):
        table.add_column(name, no_wrap=True, justify="right" if name.endswith(" s") else "left")
    for test, median_s, platforms in tests:
        standards = ", ".join(platforms) or "none yet"
        measured = "" if median_s is None else f"{median_s:.1f}"
        name = f"{test.test_id} (disabled: {test.disabled})" if test.disabled else test.test_id
        table.add_row(name, test.suite, test.profile, f"{test.est_time:g}", measured, standards)
    print_table(table, console, indent=0)


def print_standard(label: str, metadata: StandardMetadata, series: Sequence[SeriesExtent], console: Console) -> None:
    """Print a standard: what it says about itself, and its series in brief."""
    console.print(Text(label, "bold"), soft_wrap=True)
    recorded = metadata.recorded
    facts = {
        "test": metadata.test,
        "platform": metadata.platform,
        "recorded": recorded.get("time"),
        "commit": f"{recorded.get('head')}{' (dirty)' if recorded.get('dirty') else ''}",
        "runs agreed": recorded.get("runs_agreed"),
        "reason": recorded.get("reason"),
        "content digest": metadata.content_digest,
    }
    for name, value in facts.items():
        if value is not None:
            console.print(Text(f"  {name + ':':<16}{value}"), soft_wrap=True)
    policies = {name: str(Policy.from_json(policy)) for name, policy in metadata.policies.items()}
    print_table(extents_table(series, policies), console)


def extents_table(series: Sequence[SeriesExtent], policies: dict[str, str] | None = None) -> Table:
    """Return a table of series in brief, with their policies where they are known."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("series", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for name in ("points", "steps", "first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    if policies is not None:
        table.add_column("policy", no_wrap=True)
    for extent in series:
        steps = f"{extent.first_step}-{extent.last_step}"
        values = value_text(extent.first), value_text(extent.last)
        row = [str(extent.key), ", ".join(extent.dtypes), f"{extent.num_points:,}", steps, *values]
        table.add_row(*row, *([] if policies is None else [policies.get(extent.key.metric, "")]))
    return table


def print_points(label: str, points: Iterable[tuple[SeriesKey, int, Point]], console: Console) -> None:
    """Print every point of a metric, a line each, as it is read."""
    console.print(Text(label, "bold"), soft_wrap=True)
    count = 0
    for key, step, point in points:
        shown = point.digest if point.digest is not None else f"{value_text(point)}  {point.bits:x}"
        console.print(Text(f"  {key}  step {step}  {shown}"), soft_wrap=True)
        count += 1
    console.print(Text(f"  {count_text(count, 'point')}", "dim"))
