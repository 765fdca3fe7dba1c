"""``record``: runs tests until they are known to repeat, and writes their standards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json, progress, require_output

if TYPE_CHECKING:
    from e2e_registry.comparison import StandardChange
    from e2e_registry.config import Settings
    from e2e_registry.errors import RegistryError
    from e2e_registry.execution.gpus import GpuAdmission
    from e2e_registry.operations.record import RecordOptions
    from e2e_registry.registration import Registration


def record(
    test: options.Tests = None,
    suite: options.Suite = None,
    all_: options.All = False,
    nightly: options.Nightly = False,
    labels: options.Labels = None,
    match_all_labels: options.MatchAllLabels = False,
    partition: options.Partition = None,
    from_results: options.FromResults = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs that must agree before anything is written.")] = 2,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Renew also series whose old rows their tolerance accepts.")
    ] = False,
    list_only: Annotated[bool, typer.Option("--list-only", help="List what would be recorded; run nothing.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="DIR", help="Copy what is written there too, in its path from the root, with a report."
        ),
    ] = None,
    allow_unknown_state: options.AllowUnknownState = False,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    reason: options.Reason = None,
    all_metrics: options.AllMetrics = False,
    json: options.Json = False,
) -> None:
    """Record standards: run until two runs agree, refuse if they do not, show the change, write only what changed."""
    from e2e_registry.errors import ExitCode, RegistryError, worst_exit_code
    from e2e_registry.operations.machines import LocalMachine, skip_reason
    from e2e_registry.operations.record import RecordOptions
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.recording import print_change

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
    registrations, _ = options.selected(settings, selection, from_results)
    if list_only:
        _list(registrations, settings, as_json=json)
        return
    choices = RecordOptions(runs=runs, refresh=refresh, allow_unknown_state=allow_unknown_state, reason=reason)
    gpus = options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus)
    console = make_console()
    results: dict[str, StandardChange] = {}
    failures: dict[str, RegistryError] = {}
    skipped: dict[str, str] = {}
    for registration in registrations:
        test_id, obstacle = registration.test_id, skip_reason(registration, LocalMachine(gpus))
        if obstacle is not None:
            skipped[test_id] = obstacle
            typer.echo(f"skipped: {test_id}: {obstacle}", err=True)
            continue
        try:
            results[test_id] = _record_one(registration, settings, choices, gpus)
        except RegistryError as error:
            failures[test_id] = error
            typer.echo(f"error: {test_id}: {error}" if len(registrations) > 1 else f"error: {error}", err=True)
            continue
        if not json:
            print_change(results[test_id], console, all_metrics=all_metrics)
    if export is not None:
        from e2e_registry.operations.export import export_changes

        report = export_changes(export, [*results.values()], failures, settings)
        typer.echo(f"exported, with {report}", err=True)
    if json:
        print_json({"tests": [_to_json(test.test_id, results, failures, skipped) for test in registrations]})
    codes = [*(change.exit_code for change in results.values()), *(error.exit_code for error in failures.values())]
    raise typer.Exit(worst_exit_code(codes) if codes else ExitCode.NOTHING_SELECTED)


def _to_json(
    test: str, results: dict[str, StandardChange], failures: dict[str, RegistryError], skipped: dict[str, str]
) -> dict[str, Any]:
    """Return the entry of one test: what became of its standard, or why nothing did."""
    from e2e_registry.errors import ExitCode

    if test in results:
        return results[test].to_json()
    if test in failures:
        return {
            "subject": test,
            "action": "failed",
            "error": str(failures[test]),
            "exit_code": int(failures[test].exit_code),
        }
    return {
        "subject": test,
        "action": "skipped",
        "reasons": [skipped[test]],
        "error": None,
        "exit_code": int(ExitCode.NOTHING_SELECTED),
    }


def _record_one(
    registration: Registration, settings: Settings, choices: RecordOptions, gpus: GpuAdmission
) -> StandardChange:
    from e2e_registry.operations.record import record_test

    with progress(registration.test_id) as on_line:
        return record_test(
            registration,
            settings,
            choices,
            gpus=gpus,
            on_run=lambda number, total: on_line(f"run {number} of {total}"),
            on_line=on_line,
        )


def _list(registrations: list[Registration], settings: Settings, *, as_json: bool) -> None:
    from e2e_registry.operations.inventory import list_tests, listed_to_json

    listed = list_tests(registrations, settings)
    if as_json:
        print_json({"tests": [listed_to_json(entry) for entry in listed]})
    else:
        for entry in listed:
            typer.echo(f"{entry.registration.test_id}  ({', '.join(entry.platforms) or 'no standard yet'})")
    require_output()
