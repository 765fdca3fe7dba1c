"""``seeds``: measures the spread over seeds, and compares a baseline with a candidate seed by seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.analysis.reduction import Reduction
from e2e_registry.cli import options, workloads
from e2e_registry.cli.output import print_json, require_output
from e2e_registry.cli.stages import stages
from e2e_registry.errors import UsageError

if TYPE_CHECKING:
    from e2e_registry.analysis.seeds import SeedsOptions
    from e2e_registry.analysis.workload import Workload
    from e2e_registry.comparison.seed_statistics import SeedsResult
    from e2e_registry.config import Settings

#: Each seed costs a run of each side.
_MOST_SEEDS = 1000

Seeds = Annotated[
    str | None, typer.Option("--seeds", metavar="LIST", help="Numbers and ranges, commas between them.  [default: 0-4]")
]
ArgsB = Annotated[
    str | None,
    typer.Option("--args-b", metavar="ARGS", help="The candidate: the same, with these arguments added at the end."),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option("--runs", metavar="RUN ...", help="The baseline: kept runs, paired by the seeds they record."),
]
Against = Annotated[
    list[Path] | None,
    typer.Option("--against", metavar="RUN ...", help="The candidate: kept runs. Without it, --runs is one spread."),
]
Metric = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="A metric or a glob; may be given more than once. All by default."),
]
Reduce = Annotated[Reduction, typer.Option("--reduce", help="How a series becomes the one number of a run.")]
SkipFirst = Annotated[int, typer.Option("--skip-first", min=0, help="Steps at the start that --reduce leaves out.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="X",
        help="Say whether the spread lets a difference of X be called an improvement, and how many seeds that takes. "
        "In the unit of the one metric that --metric names.",
    ),
]


def seeds(
    command: workloads.Command = None,
    test: workloads.Test = None,
    seed_list: Seeds = None,
    args_b: ArgsB = None,
    runs: Runs = None,
    against: Against = None,
    metric: Metric = None,
    reduce: Reduce = Reduction.LAST,
    skip_first: SkipFirst = 0,
    threshold: Threshold = None,
    profile: workloads.Profile = workloads.DEFAULT_PROFILE,
    timeout: workloads.Timeout = workloads.DEFAULT_TIMEOUT_S,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    json: options.Json = False,
) -> None:
    """Run a test or a command under several seeds: its spread, and what a candidate differs by beyond it."""
    from e2e_registry.analysis.seeds import SeedsOptions
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.seeds import print_seeds

    settings = options.settings(test)
    choices = SeedsOptions(metrics=tuple(metric or ()), reduction=reduce, skip_first=skip_first, threshold=threshold)
    if runs or against:
        if not runs or command or test is not None or args_b is not None or seed_list is not None:
            raise UsageError("--runs (and --against) take kept runs and start none: nothing else says what to run")
        result = _compare_kept(runs, against or [], settings, choices)
    else:
        gpus = options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus)
        workload = workloads.workload_of(test, command, settings, profile=profile, timeout_s=timeout, gpus=gpus)
        result = _measure(workload, args_b, parse_seeds(seed_list or "0-4"), settings, choices)
    if json:
        print_json(result.to_json())
    else:
        print_seeds(result, make_console())
    require_output()
    raise typer.Exit(result.exit_code)


def _compare_kept(runs: list[Path], against: list[Path], settings: Settings, choices: SeedsOptions) -> SeedsResult:
    from e2e_registry.analysis.seeds import compare_kept_runs

    return compare_kept_runs(runs, against, settings, choices)


def _measure(
    workload: Workload, args_b: str | None, seed_list: Sequence[int], settings: Settings, choices: SeedsOptions
) -> SeedsResult:
    from e2e_registry.analysis.seeds import measure_seeds

    arguments = None if args_b is None else workloads.split_arguments(args_b, "--args-b")
    with stages(workload.label) as progress:
        return measure_seeds(
            workload,
            seed_list,
            settings,
            choices,
            candidate_arguments=arguments,
            on_stage=progress.on_stage,
            on_line=progress.on_line,
        )


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a list such as ``0-4,7`` names.

    Raises:
        UsageError: It is no such list, or a very long one.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", part)
        if match is None:
            hint = "such as --seeds 0-4 or --seeds 1,2,5"
            raise UsageError(f"--seeds {text[:60]!r}: {part[:60]!r} is no seed", hint=hint)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last - first + len(seeds) >= _MOST_SEEDS:
            raise UsageError(f"--seeds {text[:60]!r}: {part[:60]!r} is no range of at most {_MOST_SEEDS} seeds")
        seeds += range(first, last + 1)
    return seeds
