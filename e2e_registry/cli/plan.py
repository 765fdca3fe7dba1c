"""``plan``: says which tests run on which machines of CI, and which verdicts must come back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json, require_output

Platform = Annotated[
    str | None, typer.Option("--platform", metavar="SLUG", help="Plan for this platform alone; by default for all.")
]
Partitions = Annotated[int, typer.Option("--partitions", min=1, help="Split a platform's tests into up to N jobs.")]
HeadRevision = Annotated[
    str | None,
    typer.Option(
        "--head-rev", metavar="COMMIT", help="Print its source tree too: CI checks out a merge commit instead of it."
    ),
]
GithubOutput = Annotated[
    Path | None,
    typer.Option("--github-output", metavar="FILE", help="Append matrix, count and head-source-tree as step outputs."),
]


def plan(
    test: options.Tests = None,
    suite: options.Suite = None,
    all_: options.All = False,
    nightly: options.Nightly = False,
    labels: options.Labels = None,
    match_all_labels: options.MatchAllLabels = False,
    from_results: options.FromResults = None,
    platform: Platform = None,
    partitions: Partitions = 1,
    head_rev: HeadRevision = None,
    github_output: GithubOutput = None,
    allow_empty: options.AllowEmpty = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, as always.")] = False,
) -> None:
    """Print the matrix of CI's jobs as JSON, with the verdicts that must come back."""
    from e2e_registry.errors import NothingSelectedError
    from e2e_registry.operations.plan import make_plan
    from e2e_registry.storage import append_text

    settings = options.settings(test[0] if test else None)
    chosen = options.selection(
        tests=test,
        suite=suite,
        everything=all_,
        nightly=nightly,
        labels=labels,
        match_all_labels=match_all_labels,
    )
    try:
        registrations, pairs = options.selected(settings, chosen, from_results)
    except NothingSelectedError:
        if not allow_empty:
            raise
        registrations, pairs = [], None
    made = make_plan(
        registrations,
        settings,
        platform=platform,
        partitions=partitions,
        head_revision=head_rev,
        only=pairs,
        may_be_empty=allow_empty,
    )
    if github_output is not None:
        append_text(github_output, made.github_outputs())
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    print_json(made.to_json())
    require_output()
