"""``check``: runs tests and compares them with their standards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import SuiteProgress, print_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import Console

    from e2e_registry.comparison import Assessment
    from e2e_registry.config import Settings
    from e2e_registry.execution.gpus import GpuAdmission
    from e2e_registry.operations.machines import Machine

Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Tests that run at a time, as far as cores and GPUs are free: 1 by default, with --ray all that fit.",
    ),
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Start no further test once one has failed.")]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeat-on-mismatch",
        metavar="N",
        min=0,
        help="Run a mismatching test N more times and say whether it repeats; the verdict stays.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Run the tests on this Ray cluster; auto finds one, local starts one here."
    ),
]


def check(
    test: options.Tests = None,
    suite: options.Suite = None,
    all_: options.All = False,
    nightly: options.Nightly = False,
    labels: options.Labels = None,
    match_all_labels: options.MatchAllLabels = False,
    partition: options.Partition = None,
    jobs: Jobs = None,
    ray: RayAddress = None,
    fail_fast: FailFast = False,
    repeat_on_mismatch: Repeats = 0,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    all_metrics: options.AllMetrics = False,
    allow_empty: options.AllowEmpty = False,
    json: options.Json = False,
) -> None:
    """Run tests and compare them with their standards, bit for bit."""
    from e2e_registry.errors import NothingSelectedError
    from e2e_registry.operations.results import Results
    from e2e_registry.operations.selection import select
    from e2e_registry.operations.suite import SuiteOptions, check_suite
    from e2e_registry.reports.console import make_console, print_summary

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
        if allow_empty or settings.source is not None or settings.run_dir.exists():
            # Those of an earlier check are out of date.
            Results(settings, [], selection, allow_empty=allow_empty).end(None)
        if not allow_empty:
            raise
        registrations = []
    tests = [registration.test_id for registration in registrations]
    results = Results(settings, tests, selection, allow_empty=allow_empty)
    console = make_console()
    gpus = options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus)
    jobs = jobs or (1 if ray is None else max(len(registrations), 1))
    choices = SuiteOptions(jobs=jobs, fail_fast=fail_fast, repeats=repeat_on_mismatch)
    try:
        with _machine(ray, settings, gpus) as machine, SuiteProgress(len(registrations)) as progress:
            listener = _Listener(progress, None if json else console, all_metrics=all_metrics)
            check_suite(registrations, settings, results, listener, options=choices, machine=machine)
    finally:  # a check that is ended shows what it knows, too
        if json and results.has_begun:
            print_json(results.to_json())
        elif results.has_begun and len(registrations) > 1:
            print_summary(results.assessments, console, num_not_run=len(results.not_run))
    raise typer.Exit(results.exit_code)


def _machine(ray: str | None, settings: Settings, gpus: GpuAdmission) -> AbstractContextManager[Machine]:
    from e2e_registry.operations.machines import LocalMachine

    if ray is None:
        return contextlib.nullcontext(LocalMachine(gpus))
    from e2e_registry.operations.cluster import RayCluster

    return RayCluster(ray, settings, gpus)


class _Listener:
    """Shows a check as it goes: what runs on standard error, what is concluded on standard output.

    Args:
        progress: Shows what runs.
        console: Where conclusions go; None if a JSON document at the end holds them.
        all_metrics: Show every series.
    """

    def __init__(self, progress: SuiteProgress, console: Console | None, *, all_metrics: bool) -> None:
        self._progress = progress
        self._console = console
        self._all_metrics = all_metrics

    def started(self, test_id: str) -> Callable[[str], None]:
        return self._progress.started(test_id)

    def ended(self, assessment: Assessment) -> None:
        from e2e_registry.reports.console import print_assessment

        with self._progress.ended(assessment.subject, assessment.verdict.value):
            if self._console is not None:
                print_assessment(assessment, self._console, all_metrics=self._all_metrics)
