"""``compare``: compares recordings and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json

if TYPE_CHECKING:
    from e2e_registry.comparison import Assessment


def compare(
    run: Annotated[Path, typer.Argument(help="A run directory, a .jsonl file or a .parquet standard.")],
    against: Annotated[Path | None, typer.Option("--against", help="What to compare it with: the same kinds.")] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="Judge by this test's policies, against its standard by default.")
    ] = None,
    all_metrics: options.AllMetrics = False,
    json: options.Json = False,
) -> None:
    """Compare a recording with another, or with a test's standard; nothing is run."""
    assessment = _assess(run, against, test)
    if json:
        print_json(assessment.to_json())
    else:
        from e2e_registry.reports.console import make_console, print_assessment

        print_assessment(assessment, make_console(), all_metrics=all_metrics)
    raise typer.Exit(assessment.exit_code)


def _assess(run: Path, against: Path | None, test: str | None) -> Assessment:
    from e2e_registry.errors import UsageError
    from e2e_registry.operations.compare import compare_sides, compare_with_test, open_side

    settings = options.settings(test)
    if test is not None:
        return compare_with_test(run, against, test, settings)
    if against is None:
        raise UsageError("say what to compare with: --against PATH, or --test FILE for a test's standard")
    return compare_sides(open_side(run, settings), open_side(against, settings))
