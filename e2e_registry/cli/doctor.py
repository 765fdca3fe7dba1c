"""``doctor``: says whether deterministic mode holds, of the shell, a test, a kept run or a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options, workloads
from e2e_registry.cli.output import print_json, progress
from e2e_registry.cli.parsing import command_after_dashes
from e2e_registry.errors import UsageError

if TYPE_CHECKING:
    from e2e_registry.config import Settings
    from e2e_registry.determinism.diagnosis import Diagnosis
    from e2e_registry.execution.gpus import GpuAdmission

Run = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN | -- CMD ...]", help="The directory of a kept run; or any command, after --."),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help=f"The profile to judge by: that of the run by default, else {workloads.DEFAULT_PROFILE}. "
        "A test declares its own.",
    ),
]
Pinned = Annotated[
    bool, typer.Option("--pinned", help="Start the command with the profile's variables, as run and check do.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run the test, also where a kept run would tell the same.")]


def doctor(
    context: typer.Context,
    run: Run = None,
    test: workloads.Test = None,
    profile: Profile = None,
    pinned: Pinned = False,
    fresh: Fresh = False,
    timeout: workloads.Timeout = workloads.DEFAULT_TIMEOUT_S,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    json: options.Json = False,
) -> None:
    """Say what is set, effective, late or missing: in this shell, a test, a kept run or a command.

    Without a test, run or command the shell itself is judged. A command runs in the environment of this shell.
    """
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.doctor import print_diagnosis

    command = command_after_dashes(context)
    if sum(what is not None for what in (test, run, command)) > 1:
        raise UsageError("say one thing to judge: --test FILE, a kept run, or a command after --")
    settings = options.settings(test)
    gpus = options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus)
    diagnosis = _diagnose(
        run, test, command, profile, settings, is_pinned=pinned, is_fresh=fresh, timeout_s=timeout, gpus=gpus
    )
    if json:
        print_json(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis, make_console())
    raise typer.Exit(diagnosis.exit_code)


def _diagnose(
    run: Path | None,
    test: str | None,
    command: list[str] | None,
    profile: str | None,
    settings: Settings,
    *,
    is_pinned: bool,
    is_fresh: bool,
    timeout_s: float,
    gpus: GpuAdmission,
) -> Diagnosis:
    from e2e_registry.operations.doctor import diagnose_command, diagnose_run, diagnose_shell, diagnose_test
    from e2e_registry.registration import find_test

    if test is not None:
        if profile is not None:
            raise UsageError("--profile does not go with --test: a test declares its profile")
        registration = find_test(settings, test)
        with progress(registration.test_id) as on_line:
            return diagnose_test(registration, settings, is_fresh=is_fresh, on_line=on_line, gpus=gpus)
    if run is not None:
        return diagnose_run(run, settings, profile=profile)
    profile = profile or workloads.DEFAULT_PROFILE
    if command is None:
        return diagnose_shell(profile)
    with progress(" ".join(command)[:60]) as on_line:
        return diagnose_command(
            command, settings, profile=profile, timeout_s=timeout_s, is_pinned=is_pinned, on_line=on_line
        )
