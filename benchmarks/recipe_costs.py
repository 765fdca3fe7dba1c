"""What deterministic mode costs each recipe, and what ``cpu-portable`` costs over ``cpu-native``.

``python benchmarks/recipe_costs.py`` runs every test of a suite in three modes that take turns, and prints medians of
the ratios of the turns, so that a machine that changes its speed changes all modes:

- plain: without ``--deterministic-mode`` and without any variable of a profile;
- native: deterministic under ``cpu-native``, which pins threads alone;
- portable: as the suite runs it.

Each ratio is given twice: of whole runs, imports and the start of Ray included, and of the time between the first and
the last line that the recipe logged, which is the share that grows with longer training.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from e2e_registry.analysis.workload import TestWorkload
from e2e_registry.config import load_settings
from e2e_registry.operations.running import ObservedRun
from e2e_registry.operations.selection import select

FLAG = "--deterministic-mode"


@dataclass(frozen=True)
class Timed:
    """Seconds of one run: of the whole recipe, and between its first and its last logged line."""

    whole: float
    logged: float


@dataclass(frozen=True)
class RecipeCost:
    """Medians over the turns of one test; ratios of whole runs and of the logged part."""

    test: str
    portable_s: float
    native_over_plain: Timed
    portable_over_native: Timed


def _timed(run: ObservedRun) -> Timed:
    if not run.is_complete:
        raise SystemExit(f"{run.path}: {'; '.join(run.problems)}")
    times = [
        json_module.loads(line)["time_ns"]
        for file in run.path.glob("metrics.*.jsonl")
        for line in file.read_text().splitlines()[1:]
    ]
    return Timed(run.duration_s or 0.0, (max(times) - min(times)) / 1e9)


def _modes(workload: TestWorkload) -> dict[str, Callable[[], ObservedRun]]:
    plain = workload.without_arguments([FLAG])
    native = dataclasses.replace(
        workload, registration=dataclasses.replace(workload.registration, profile="cpu-native")
    )
    return {
        "plain": lambda: plain.run(seed=workload.seed, is_pinned=False),
        "native": lambda: native.run(seed=workload.seed),
        "portable": lambda: workload.run(seed=workload.seed),
    }


def _cost(workload: TestWorkload, turns: int) -> RecipeCost:
    modes = _modes(workload)
    taken: list[dict[str, Timed]] = []
    for turn in range(turns):
        order = list(modes) if turn % 2 == 0 else list(reversed(modes))
        taken.append({name: _timed(modes[name]()) for name in order})

    def ratio(over: str, under: str) -> Timed:
        return Timed(
            statistics.median(turn[over].whole / turn[under].whole for turn in taken),
            statistics.median(turn[over].logged / turn[under].logged for turn in taken),
        )

    portable_s = statistics.median(turn["portable"].whole for turn in taken)
    return RecipeCost(workload.label, portable_s, ratio("native", "plain"), ratio("portable", "native"))


def measure(
    suite: Annotated[str, typer.Option(help="The suite whose recipes are timed.")] = "short-cpu",
    turns: Annotated[int, typer.Option(min=1, help="Turns of three runs for each test.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time every test of a suite in plain mode, under cpu-native and under cpu-portable."""
    settings = load_settings(Path.cwd())
    costs = []
    if not json:
        print("test | portable, s | native/plain: whole, logged | portable/native: whole, logged")
    for registration in select(settings, suite=suite):
        cost = _cost(TestWorkload(registration, settings), turns)
        costs.append(cost)
        if not json:
            native, portable = cost.native_over_plain, cost.portable_over_native
            print(
                f"{cost.test} | {cost.portable_s:.1f} | {native.whole:.2f}, {native.logged:.2f} | "
                f"{portable.whole:.2f}, {portable.logged:.2f}",
                flush=True,
            )
    if json:
        print(json_module.dumps([asdict(cost) for cost in costs], indent=2))


if __name__ == "__main__":
    typer.run(measure)
