"""``run``: runs a recipe and keeps the recording."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from e2e_registry.cli import options, workloads
from e2e_registry.cli.output import print_json, progress


def run(
    command: Annotated[list[str] | None, typer.Argument(help="Any command, after --.", metavar="[-- CMD ...]")] = None,
    test: workloads.Test = None,
    profile: workloads.Profile = workloads.DEFAULT_PROFILE,
    timeout: workloads.Timeout = workloads.DEFAULT_TIMEOUT_S,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    json: options.Json = False,
) -> None:
    """Run a test's recipe, or any command, and keep the recording; nothing is judged."""
    from e2e_registry.errors import ExitCode, UsageError
    from e2e_registry.operations.running import run_command, run_test
    from e2e_registry.operations.standards import display_path
    from e2e_registry.registration import find_test
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.recording import print_run
    from e2e_registry.series import extents

    if (test is None) == (not command):
        raise UsageError("say what to run: --test FILE, or a command after --")
    settings = options.settings(test)
    if test is not None:
        registration = find_test(settings, test)
        with progress(registration.test_id) as on_line:
            gpus = options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus)
            observed = run_test(registration, settings, on_line=on_line, gpus=gpus)
    else:
        with progress(" ".join(command or ())[:60]) as on_line:
            observed = run_command(command or (), settings, profile=profile, timeout_s=timeout, on_line=on_line)
    label, series = display_path(observed.path, settings), extents(observed.batches())
    outcome = str((observed.outcome or {}).get("explanation", "was not seen to end"))
    if json:
        shown: dict[str, Any] = {"run": label, "platform": observed.platform, "outcome": observed.outcome}
        shown |= {"environment": observed.environment, "problems": observed.problems}
        shown |= {"warnings": list(observed.warnings)}
        print_json({**shown, "series": [extent.to_json() for extent in series]})
    else:
        print_run(
            label,
            outcome,
            observed.platform,
            series,
            observed.problems,
            make_console(),
            warnings=observed.warnings,
            log_tail=observed.log_tail() if observed.has_failed else "",
        )
    raise typer.Exit(ExitCode.RUN_FAILED if observed.problems else ExitCode.OK)
