"""``list`` and ``show``: what tests and standards there are, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json, require_output

if TYPE_CHECKING:
    from e2e_registry.config import Settings
    from e2e_registry.standard import Standard


def list_(
    suite: options.Suite = None,
    labels: options.Labels = None,
    match_all_labels: options.MatchAllLabels = False,
    partition: options.Partition = None,
    json: options.Json = False,
) -> None:
    """List the tests, their suites, and the platforms that they have standards for."""
    from e2e_registry.operations.inventory import list_tests, listed_to_json
    from e2e_registry.operations.selection import select
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.inventory import print_tests

    settings = options.settings()
    selection = options.selection(
        suite=suite,
        everything=suite is None,
        nightly=True,
        labels=labels,
        match_all_labels=match_all_labels,
        partition=partition,
    )
    listed = list_tests(select(settings, **selection), settings)
    if json:
        print_json({"tests": [listed_to_json(entry) for entry in listed]})
    else:
        rows = [(e.registration, e.measured.median_s if e.measured else None, e.platforms) for e in listed]
        print_tests(rows, make_console())
    require_output()


def show(
    target: Annotated[str, typer.Argument(help="A test file, or a .parquet standard.")],
    metric: Annotated[str | None, typer.Option("--metric", help="Show every point of this metric.")] = None,
    platform: Annotated[str | None, typer.Option("--platform", help="Of a test's standards, this one.")] = None,
    json: options.Json = False,
) -> None:
    """Show a standard as a table: its series, or the points of one metric."""
    from e2e_registry.operations.inventory import standards_of

    settings = options.settings(target)
    standards = standards_of(target, settings, platform=platform)
    if json:
        print_json({"standards": [_to_json(standard, settings, metric) for standard in standards]})
    else:
        _print(standards, settings, metric)
    require_output()


def _print(standards: list[Standard], settings: Settings, metric: str | None) -> None:
    from e2e_registry.operations.inventory import points_of, standard_label
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.inventory import print_points, print_standard
    from e2e_registry.series import extents

    console = make_console()
    for standard in standards:
        label = standard_label(standard, settings)
        if metric is None:
            print_standard(label, standard.metadata, extents(standard.batches()), console)
        else:
            print_points(label, points_of(standard, metric), console)


def _to_json(standard: Standard, settings: Settings, metric: str | None) -> dict[str, object]:
    from e2e_registry.operations.inventory import points_of, standard_label
    from e2e_registry.series import extents

    shown: dict[str, object] = {"path": standard_label(standard, settings), "metadata": standard.metadata.to_json()}
    if metric is None:
        shown["series"] = [entry.to_json() for entry in extents(standard.batches())]
    else:
        shown["points"] = [
            {"metric": key.metric, "role": key.role, "rank": key.rank, "step": step, **point.to_json()}
            for key, step, point in points_of(standard, metric)
        ]
    return shown
