"""``merge``: merges the results of several machines into one verdict and a step summary."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json

if TYPE_CHECKING:
    from e2e_registry.comparison.merged import MergedResults

#: What GitHub's runner names the file of a step's summary by.
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"

PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="What `plan` printed: every verdict that it requires must be there."),
]
SummaryFile = Annotated[
    Path | None,
    typer.Option(
        "--summary",
        metavar="FILE",
        help=f"Append a report in Markdown to this file; by default to the one that {SUMMARY_VARIABLE} names.",
    ),
]


def merge(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="results.json files, or folders of artifacts.")
    ],
    plan: PlanFile = None,
    summary: SummaryFile = None,
    allow_empty: options.AllowEmpty = False,
    json: options.Json = False,
) -> None:
    """Merge the results of several machines; fail on the worst verdict, and on a required one that is missing."""
    from e2e_registry.operations.merge import merge as merge_results
    from e2e_registry.operations.plan import read_plan
    from e2e_registry.reports.github import summary as render
    from e2e_registry.reports.github import workflow_commands
    from e2e_registry.storage import append_text

    merged = merge_results(paths, plan=None if plan is None else read_plan(plan), may_be_empty=allow_empty)
    summary = summary or (Path(os.environ[SUMMARY_VARIABLE]) if os.environ.get(SUMMARY_VARIABLE) else None)
    run_id = os.environ.get("GITHUB_RUN_ID", "")
    if summary is not None:
        append_text(summary, render(merged, next_step=f"e2e-registry accept {run_id}" if run_id.isdigit() else None))
    if json:
        print_json(merged.to_json())
    else:
        _print(merged)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for command in workflow_commands(merged):
            typer.echo(command, err=json)
    raise typer.Exit(merged.exit_code)


def _print(merged: MergedResults) -> None:
    """Print a line a verdict; where a workflow's log would obey them, with its commands switched off meanwhile."""
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.merged import print_merged

    is_workflow = os.environ.get("GITHUB_ACTIONS") == "true"
    token = secrets.token_hex(16)
    if is_workflow:
        typer.echo(f"::stop-commands::{token}")
    print_merged(merged, make_console())
    if is_workflow:
        typer.echo(f"::{token}::")
