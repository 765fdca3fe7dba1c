"""``check``: runs tests and compares them with their standards."""

from __future__ import annotations

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json, progress


def check(
    test: options.Tests = None,
    suite: options.Suite = None,
    all_: options.All = False,
    nightly: options.Nightly = False,
    labels: options.Labels = None,
    match_all_labels: options.MatchAllLabels = False,
    partition: options.Partition = None,
    all_metrics: options.AllMetrics = False,
    allow_empty: options.AllowEmpty = False,
    json: options.Json = False,
) -> None:
    """Run tests and compare them with their standards, bit for bit."""
    from e2e_registry.comparison import TestVerdict
    from e2e_registry.errors import ExitCode, NothingSelectedError, worst_exit_code
    from e2e_registry.operations.check import check_test, write_results
    from e2e_registry.operations.selection import select
    from e2e_registry.reports.console import make_console, print_assessment, print_summary

    settings = options.settings(test[0] if test else None)
    selection = options.selection(
        tests=test,
        suite=suite,
        everything=all_,
        nightly=nightly,
        labels=labels,
        match_all_labels=match_all_labels,
        partition=partition,
    )
    try:
        registrations = select(settings, **selection)
    except NothingSelectedError:
        if not allow_empty:
            raise
        registrations = []
    assessments = []
    console = make_console()
    for registration in registrations:
        with progress(registration.test_id) as on_line:
            assessment = check_test(registration, settings, on_line=on_line)
        assessments.append(assessment)
        write_results(assessments, settings)
        if not json:
            print_assessment(assessment, console, all_metrics=all_metrics)
    if json:
        print_json({"tests": [assessment.to_json() for assessment in assessments]})
    elif len(assessments) > 1:
        print_summary(assessments, console)
    ran = [assessment for assessment in assessments if assessment.verdict is not TestVerdict.SKIPPED]
    if not ran:
        raise typer.Exit(ExitCode.OK if allow_empty else ExitCode.NOTHING_SELECTED)
    raise typer.Exit(worst_exit_code(assessment.exit_code for assessment in ran))
