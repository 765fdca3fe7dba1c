"""The options by which a command that runs something several times is told what to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.determinism.profiles import DEFAULT_PROFILE as DEFAULT_PROFILE  # for the commands' defaults
from e2e_registry.errors import UsageError

if TYPE_CHECKING:
    from e2e_registry.analysis.workload import Workload
    from e2e_registry.config import Settings
    from e2e_registry.execution.gpus import GpuAdmission

#: Seconds that a command may take which says nothing else.
DEFAULT_TIMEOUT_S = 3600.0

Test = Annotated[str | None, typer.Option("--test", help="A test file.")]
Profile = Annotated[str, typer.Option("--profile", help="Determinism profile of a command; a test declares its own.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds one run of a command may take.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- CMD ...]", help="Any command, after --; {seed} and {run_dir} are replaced in it."),
]
Observe = Annotated[
    list[str] | None,
    typer.Option("--observe", metavar="NAME", help="A metric of a command, or a glob, that is not judged: throughput."),
]


def workload_of(
    test: str | None,
    command: Sequence[str] | None,
    settings: Settings,
    *,
    profile: str,
    timeout_s: float,
    gpus: GpuAdmission,
    seed: int = 0,
    observe: Sequence[str] = (),
) -> Workload:
    """Return what the options name.

    Raises:
        UsageError: Neither or both of a test and a command are named, or there is no such test.
        RegistrationError: The test cannot be accepted.
    """
    from e2e_registry.analysis.workload import CommandWorkload, TestWorkload
    from e2e_registry.registration import find_test

    if (test is None) == (not command):
        raise UsageError("say what to run: --test FILE, or a command after --")
    if test is not None:
        return TestWorkload(find_test(settings, test), settings, gpus)
    return CommandWorkload(
        command=tuple(command or ()),
        settings=settings,
        profile=profile,
        timeout_s=timeout_s,
        base_seed=seed,
        observe=tuple(observe),
    )


def split_arguments(text: str, option: str) -> tuple[str, ...]:
    """Return the arguments that one option holds as a shell would split them.

    Raises:
        UsageError: A quotation is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}", hint="quote it as for a shell") from None
