"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from e2e_registry.config import Settings
    from e2e_registry.execution.gpus import GpuAdmission
    from e2e_registry.operations.selection import Selection
    from e2e_registry.registration import Registration

Tests = Annotated[list[str] | None, typer.Option("--test", help="A test file; may be given more than once.")]
Suite = Annotated[str | None, typer.Option("--suite", help="All tests of a suite.")]
All = Annotated[bool, typer.Option("--all", help="All tests.")]
Nightly = Annotated[bool, typer.Option("--nightly", help="Take also tests that are registered as nightly.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--labels",
        metavar="LABELS",
        help="Of a suite or all, take tests without labels and those with one of these. Commas between them; "
        "run-ci-<label> and a JSON array of a pull request's labels are understood.",
    ),
]
MatchAllLabels = Annotated[
    bool, typer.Option("--match-all-labels", help="Take the tests of all labels, whatever --labels says.")
]
Partition = Annotated[
    str | None, typer.Option("--partition", metavar="I/N", help="Of what is selected, take part I of N.")
]
FromResults = Annotated[
    list[Path] | None,
    typer.Option(
        "--from-results",
        metavar="PATH",
        help="The tests whose results ask for a new standard: results.json files, or folders of downloaded artifacts.",
    ),
]
GpuWait = Annotated[
    float | None,
    typer.Option(
        "--gpu-wait",
        metavar="SECONDS",
        min=0,
        help="How long to wait for a GPU that somebody else computes on; ten minutes by default.",
    ),
]
AllowBusyGpus = Annotated[
    bool, typer.Option("--allow-busy-gpus", help="Run beside whatever else computes on the GPUs, without waiting.")
]


def gpu_admission(gpu_wait: float | None, *, allow_busy_gpus: bool) -> GpuAdmission:
    """Return what --gpu-wait and --allow-busy-gpus say."""
    from e2e_registry.execution.gpus import DEFAULT_WAIT_S, GpuAdmission

    return GpuAdmission(wait_s=DEFAULT_WAIT_S if gpu_wait is None else gpu_wait, allows_busy=allow_busy_gpus)


Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
AllMetrics = Annotated[bool, typer.Option("--all-metrics", help="Show every series, also those that are equal.")]
AllowUnknownState = Annotated[
    bool,
    typer.Option("--allow-unknown-state", help="Take a run whose writers left no determinism state."),
]
AllowOtherSource = Annotated[
    bool, typer.Option("--allow-other-source", help="Take runs of other source code than the checkout's.")
]
Reason = Annotated[str | None, typer.Option("--reason", help="Why; kept in the standard.")]
AllowEmpty = Annotated[bool, typer.Option("--allow-empty", help="Succeed when nothing is selected or all is skipped.")]


def settings(test: str | None = None) -> Settings:
    """Return the settings that hold for a test file, where one is named and there, else for the current folder."""
    from e2e_registry.config import load_settings

    is_file = test is not None and Path(test).is_file()
    return load_settings(Path(test) if test is not None and is_file else Path.cwd())


def selection(
    *,
    tests: list[str] | None = None,
    suite: str | None = None,
    everything: bool = False,
    nightly: bool = False,
    labels: list[str] | None = None,
    match_all_labels: bool = False,
    partition: str | None = None,
) -> Selection:
    """Return what the options that select tests say together."""
    from e2e_registry.operations.partition import Partition
    from e2e_registry.operations.selection import Selection, parse_labels

    return Selection(
        tests=tests or (),
        suite=suite,
        everything=everything,
        nightly=nightly,
        labels=None if labels is None else parse_labels(labels),
        match_all_labels=match_all_labels,
        partition=None if partition is None else Partition.parse(partition),
    )


def selected(
    settings: Settings, chosen: Selection, from_results: list[Path] | None
) -> tuple[list[Registration], frozenset[tuple[str, str | None]] | None]:
    """Return the tests that are asked for: by results, with the pairs of test and platform that ask, or by options.

    Raises:
        UsageError: Both select.
        NothingSelectedError: Neither selects a test.
    """
    from e2e_registry.errors import UsageError
    from e2e_registry.operations.merge import select_recordable
    from e2e_registry.operations.selection import select

    if not from_results:
        return select(settings, **chosen), None
    if any(chosen.values()):
        raise UsageError("--from-results selects tests, and so does another option", hint="give it alone")
    return select_recordable(settings, from_results)
