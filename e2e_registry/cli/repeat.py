"""``repeat``: runs a recipe several times and compares the runs bit for bit."""

from __future__ import annotations

from typing import Annotated

import typer

from e2e_registry.cli import options, workloads
from e2e_registry.cli.output import print_json
from e2e_registry.cli.stages import stages

Runs = Annotated[int, typer.Option("--runs", min=2, help="How many runs are compared.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="What {seed} stands for in a command.")]
NoControl = Annotated[
    bool, typer.Option("--no-control", help="Leave out the run under another seed, which has to differ.")
]
ControlSeed = Annotated[
    int | None, typer.Option("--control-seed", min=0, help="Seed of the control; by default one more than the runs'.")
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints",
        metavar="GLOB",
        help="Checkpoint files below the run directory; by default those in checkpoints/ and *.pt, *.safetensors, "
        "*.npz and the like.",
    ),
]
Cost = Annotated[
    str | None,
    typer.Option(
        "--cost",
        metavar="ARGS",
        help="Time pairs of runs against plain mode: without these arguments and without the profile's variables. "
        'With --cost "" plain mode lacks the variables alone.',
    ),
]
CostPairs = Annotated[int, typer.Option("--cost-pairs", min=1, help="How many pairs --cost is the median of.")]


def repeat(
    command: workloads.Command = None,
    test: workloads.Test = None,
    runs: Runs = 2,
    seed: Seed = 0,
    no_control: NoControl = False,
    control_seed: ControlSeed = None,
    checkpoints: Checkpoints = None,
    cost: Cost = None,
    cost_pairs: CostPairs = 3,
    observe: workloads.Observe = None,
    profile: workloads.Profile = workloads.DEFAULT_PROFILE,
    timeout: workloads.Timeout = workloads.DEFAULT_TIMEOUT_S,
    gpu_wait: options.GpuWait = None,
    allow_busy_gpus: options.AllowBusyGpus = False,
    all_metrics: options.AllMetrics = False,
    json: options.Json = False,
) -> None:
    """Run a test or a command twice or more and compare metrics and checkpoints bit for bit."""
    from e2e_registry.analysis.repeat import RepeatOptions
    from e2e_registry.analysis.repeat import repeat as measure
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.repeat import print_repeat

    settings = options.settings(test)
    workload = workloads.workload_of(
        test,
        command,
        settings,
        profile=profile,
        timeout_s=timeout,
        gpus=options.gpu_admission(gpu_wait, allow_busy_gpus=allow_busy_gpus),
        seed=seed,
        observe=observe or (),
    )
    choices = RepeatOptions(
        runs=runs,
        has_control=not no_control,
        control_seed=control_seed,
        checkpoints=tuple(checkpoints) if checkpoints else None,
        plain_without=None if cost is None else workloads.split_arguments(cost, "--cost"),
        cost_pairs=cost_pairs,
    )
    with stages(workload.label) as progress:
        result = measure(workload, settings, choices, on_stage=progress.on_stage, on_line=progress.on_line)
    if json:
        print_json(result.to_json())
    else:
        print_repeat(result, make_console(), all_metrics=all_metrics)
    raise typer.Exit(result.verdict.exit_code)
