"""Runs a recipe under several seeds, alone or against a candidate, and says what the spread allows to conclude.

Deterministic mode hides how much of a result is the seed's. This measures it: the same seeds on both sides, paired, so
that what both sides owe to a seed cancels in the difference.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.analysis.reduction import Reduction
from e2e_registry.analysis.workload import OnLine, TestWorkload, Workload
from e2e_registry.comparison.seed_statistics import (
    Sample,
    SeedMetric,
    SeedsResult,
    judge_threshold,
    require_scipy,
)
from e2e_registry.config import Settings, did_you_mean
from e2e_registry.environment import EnvironmentDifference, difference
from e2e_registry.errors import RecordingError, UsageError
from e2e_registry.operations.compare import Side, open_side
from e2e_registry.operations.record import require_complete
from e2e_registry.operations.standards import display_path
from e2e_registry.reports.values import listed
from e2e_registry.series import BatchStream, SeriesKey, decode_values, iter_series
from e2e_registry.tolerance import PolicyKind, matches

if TYPE_CHECKING:
    from e2e_registry.series import Float64Array

OnStage = Callable[[str], None]

#: Fewer seeds give a standard deviation, and little else.
USUAL_SEEDS = 3


_REDUCE: Mapping[Reduction, Callable[[Float64Array], float]] = {
    Reduction.LAST: lambda values: float(values[-1]),
    Reduction.MEAN: lambda values: math.fsum(values) / len(values),
    Reduction.MEDIAN: lambda values: float(np.median(values)),
    Reduction.MIN: lambda values: float(values.min()),
    Reduction.MAX: lambda values: float(values.max()),
}


@dataclass(frozen=True, kw_only=True)
class SeedsOptions:
    """What is measured.

    Attributes:
        metrics: Names and globs; empty for every numeric series.
        reduction: How a series becomes one number.
        skip_first: Distinct steps at the start of a series that are left out.
        threshold: The size of a difference that is to be judged, in the metric's unit.
    """

    metrics: tuple[str, ...] = ()
    reduction: Reduction = Reduction.LAST
    skip_first: int = 0
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning before anything runs."""
        if self.threshold is not None and not (math.isfinite(self.threshold) and self.threshold > 0):
            raise UsageError(f"--threshold {self.threshold}: give a positive size, in the metric's unit")


@dataclass(frozen=True)
class _SeedRun:
    """One run, reduced.

    Attributes:
        label: The run.
        seed: Its recorded seed; None if it records none.
        values: Series to its reduced value, NaN where it is not finite, None where no step is left.
        environment: The recorded facts.
    """

    label: str
    seed: int | None
    values: Mapping[SeriesKey, float | None]
    environment: Mapping[str, Mapping[str, Any]]


# ------------------------------------------------------------------------------------------------ entry points


def measure_seeds(
    baseline: Workload,
    seeds: Sequence[int],
    settings: Settings,
    options: SeedsOptions,
    *,
    candidate_arguments: Sequence[str] | None = None,
    on_stage: OnStage = lambda stage: None,
    on_line: OnLine | None = None,
) -> SeedsResult:
    """Run a workload, and a candidate if there is one, under each seed, and compare them seed by seed.

    Args:
        baseline: What is run.
        seeds: At least two different seeds.
        settings: The repository's settings.
        options: What is measured.
        candidate_arguments: What the candidate has at the end of its arguments; None for a spread alone.
        on_stage: Called before each run with what it is.
        on_line: Called with each line that a run prints.

    Raises:
        UsageError: SciPy is not installed, the seeds or metrics cannot be used, or the workload takes no seed.
        RecordingError: A run failed, or its recording is invalid or incomplete.
        StorageError: A run cannot be read or kept.
    """
    require_scipy()
    _check_seeds(baseline, seeds)
    workloads, label = {"baseline": baseline}, None
    if candidate_arguments is not None:
        workloads["candidate"] = baseline.with_arguments(candidate_arguments)
        label = f"the same with {shlex.join(candidate_arguments)}"
    sides: list[list[_SeedRun]] = [[] for _ in workloads]
    for at, seed in enumerate(seeds):
        for (name, workload), side in zip(workloads.items(), sides, strict=True):
            on_stage(f"seed {seed} ({at + 1} of {len(seeds)}), {name}")
            side.append(_fresh_run(workload, seed, settings, options, on_line))
    warnings = [warning for side in sides for warning in _unlike(side, is_fresh=True)]
    return _result(baseline.label, label, sides, options, warnings)


def compare_kept_runs(
    baseline: Sequence[Path], candidate: Sequence[Path], settings: Settings, options: SeedsOptions
) -> SeedsResult:
    """Compare two sets of kept runs, paired by their recorded seeds; or say how far one set spreads.

    Args:
        baseline: Run directories or standards; a single set may also hold ``.jsonl`` files.
        candidate: The other set; empty for a spread alone.
        settings: The repository's settings.
        options: What is measured.

    Raises:
        UsageError: SciPy is not installed, a run does not say its seed or repeats one, or fewer than two seeds are on
            both sides.
        RecordingError: A run is invalid or incomplete.
        StorageError: A run cannot be read.
    """
    require_scipy()
    sides = [[_kept_run(path, settings, options) for path in paths] for paths in (baseline, candidate) if paths]
    warnings: list[str] = []
    if len(sides) == 2:
        sides, left_out = _paired(sides)
        warnings += [f"{label} has no partner of its seed on the other side" for label in left_out]
    else:
        _check_distinct(sides[0])
    for side in sides:
        warnings += _unlike(side)
    candidate_label = f"{len(sides[1])} kept runs" if len(sides) == 2 else None
    return _result(f"{len(sides[0])} kept runs", candidate_label, sides, options, warnings)


def _check_seeds(workload: Workload, seeds: Sequence[int]) -> None:
    if workload.seed is None and not isinstance(workload, TestWorkload):
        raise UsageError("{seed} stands nowhere in the command", hint="write {seed} where the seed goes")
    if len(set(seeds)) != len(seeds):
        raise UsageError(f"a seed is given twice: {', '.join(map(str, seeds))}", hint="a repeated run is no new seed")
    if len(seeds) < 2:
        raise UsageError("one seed has no spread", hint="give three to five or more, such as --seeds 0-4")


# ------------------------------------------------------------------------------------------------ runs


def _fresh_run(
    workload: Workload, seed: int, settings: Settings, options: SeedsOptions, on_line: OnLine | None
) -> _SeedRun:
    run = workload.run(seed=seed, on_line=on_line)
    require_complete(run)
    wanted = options.metrics
    for pattern in wanted:  # before the other seeds are trained
        if not any(matches(name, pattern) for name in run.metrics):
            raise UsageError(
                f"the run has no metric {pattern!r}",
                where=display_path(run.path, settings),
                hint=did_you_mean(pattern, sorted(run.metrics)),
            )
    if not wanted and isinstance(workload, TestWorkload):
        policies = workload.registration.policies()
        wanted = tuple(name for name in run.metrics if policies.policy(name).kind is not PolicyKind.UNREGISTERED)
    label = display_path(run.path, settings)
    return _SeedRun(label, seed, dict(_reduced(run.batches(), wanted, options)), run.environment)


def _kept_run(path: Path, settings: Settings, options: SeedsOptions) -> _SeedRun:
    side: Side = open_side(path, settings)
    if side.incomplete_reasons:
        raise RecordingError(f"the run is incomplete: {'; '.join(side.incomplete_reasons)}", where=path)
    seed = side.environment.get("recipe", {}).get("seed")
    values = dict(_reduced(side.batches(), options.metrics, options))
    return _SeedRun(str(path), seed if isinstance(seed, int) else None, values, side.environment)


def _reduced(
    stream: BatchStream, metrics: Sequence[str], options: SeedsOptions
) -> Iterator[tuple[SeriesKey, float | None]]:
    """Yield each selected numeric series with its one number; None where no step is left to reduce."""
    for key, batches in iter_series(stream):
        if metrics and not any(matches(key.metric, pattern) for pattern in metrics):
            continue
        numeric = (batch for batch in batches if not batch.dtype.is_digest)
        parts = [(batch.steps, decode_values(batch.dtype, batch.bits)) for batch in numeric]
        if not parts:
            continue
        steps, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        skipped = np.unique(steps)[: options.skip_first]
        kept = values[~np.isin(steps, skipped)] if options.skip_first else values
        if not len(kept):
            yield key, None
        elif options.reduction is not Reduction.LAST and not np.isfinite(kept).all():
            yield key, math.nan  # an aggregate over what is left of a diverged run would hide that it diverged
        else:
            yield key, _REDUCE[options.reduction](kept)


def _paired(sides: Sequence[Sequence[_SeedRun]]) -> tuple[list[list[_SeedRun]], list[str]]:
    """Return both sides with the same seeds in the same order, and the runs whose seed is on one side only."""
    by_seed: list[dict[int, _SeedRun]] = []
    for side in sides:
        found: dict[int, _SeedRun] = {}
        for run in side:
            if run.seed is None:
                raise UsageError(
                    "the run does not say its seed, so it cannot be paired",
                    where=run.label,
                    hint="run tests with seed=, and commands through repeat or seeds with {seed} in them",
                )
            if run.seed in found:
                raise UsageError(f"{found[run.seed].label} and {run.label} are both of seed {run.seed}")
            found[run.seed] = run
        by_seed.append(found)
    common = sorted(by_seed[0].keys() & by_seed[1].keys())
    if len(common) < 2:
        seeds = [", ".join(map(str, sorted(side))) for side in by_seed]
        raise UsageError(
            f"fewer than two seeds are on both sides: {seeds[0]} against {seeds[1]}",
            hint="pairs need the same seeds on both sides",
        )
    left_out = [run.label for side in by_seed for seed, run in side.items() if seed not in common]
    return [[side[seed] for seed in common] for side in by_seed], left_out


def _check_distinct(runs: Sequence[_SeedRun]) -> None:
    if len(runs) < 2:
        raise UsageError("one run has no spread", hint="give the runs of three to five or more seeds")
    seen: dict[int, str] = {}
    for run in runs:
        if run.seed is not None and run.seed in seen:
            raise UsageError(
                f"{seen[run.seed]} and {run.label} are both of seed {run.seed}", hint="a repeated run is no new seed"
            )
        if run.seed is not None:
            seen[run.seed] = run.label


def _unlike(runs: Sequence[_SeedRun], *, is_fresh: bool = False) -> list[str]:
    """Say which runs of one set differ in more than their seed: their spread would not be the seed's.

    Fresh runs were asked for the same, wherever in their arguments the seed went; but somebody may have edited the
    source meanwhile.
    """
    warnings = []
    for run in runs[1:]:
        changes = [str(change) for change in _changes(runs[0], run) if not (is_fresh and change.group == "recipe")]
        if changes:
            warnings.append(f"{run.label} differs from {runs[0].label} in more than the seed: {'; '.join(changes)}")
    return warnings


def _changes(one: _SeedRun, other: _SeedRun) -> list[EnvironmentDifference]:
    if not one.environment or not other.environment:
        return []
    found = difference(one.environment, other.environment)
    return [entry for entry in found if not entry.is_informational and "seed" not in entry.name.casefold()]


# ------------------------------------------------------------------------------------------------ result


def _result(
    subject: str,
    candidate: str | None,
    sides: Sequence[Sequence[_SeedRun]],
    options: SeedsOptions,
    warnings: Iterable[str] = (),
) -> SeedsResult:
    metrics, left_out = _metrics(sides, options)
    if not metrics:
        asked = ", ".join(options.metrics) or "a numeric series"
        reasons = listed([f"{key}: {reason}" for key, reason in left_out.items()], separator="; ")
        raise UsageError(f"no run-to-run number for {asked}{f': {reasons}' if reasons else ''}", where=subject)
    if options.threshold is not None and len(metrics) > 1:
        names = ", ".join(str(metric.key) for metric in metrics[:8])
        raise UsageError(
            f"--threshold {options.threshold} is in the unit of one metric, and {len(metrics)} are selected: {names}",
            hint="name it: --metric NAME",
        )
    known = [run.seed for run in sides[0] if run.seed is not None]
    return SeedsResult(
        subject=subject,
        candidate=candidate,
        reduction=options.reduction.value,
        seeds=known if len(known) == len(sides[0]) else None,
        metrics=metrics,
        left_out=left_out,
        changes=[str(change) for change in _changes(sides[0][0], sides[1][0])] if len(sides) == 2 else [],
        runs=[[run.label for run in side] for side in sides],
        warnings=[*warnings, *_few(len(sides[0]))],
    )


def _few(count: int) -> list[str]:
    return [f"{count} seeds say next to nothing about a spread; take 5 or more"] if count < USUAL_SEEDS else []


def _metrics(
    sides: Sequence[Sequence[_SeedRun]], options: SeedsOptions
) -> tuple[list[SeedMetric], dict[SeriesKey, str]]:
    runs = [run for side in sides for run in side]
    keys = sorted({key for run in runs for key in run.values}, key=SeriesKey.sort_key)
    metrics, left_out = [], {}
    for key in keys:
        lacking = [run.label for run in runs if run.values.get(key) is None]
        diverged = [run.label for run in runs if not math.isfinite(run.values.get(key) or 0.0)]
        if lacking:
            left_out[key] = f"not in every run: {lacking[0]} lacks it"
        elif diverged:
            left_out[key] = f"not finite in every run: {diverged[0]}"
        else:
            metrics.append(_metric(key, sides, options))
    return metrics, left_out


def _metric(key: SeriesKey, sides: Sequence[Sequence[_SeedRun]], options: SeedsOptions) -> SeedMetric:
    baseline, *others = (Sample(tuple(float(run.values[key] or 0.0) for run in side)) for side in sides)
    metric = SeedMetric(key, baseline, others[0] if others else None)
    if options.threshold is None:
        return metric
    return dataclasses.replace(metric, threshold=judge_threshold(options.threshold, baseline, metric.difference))
