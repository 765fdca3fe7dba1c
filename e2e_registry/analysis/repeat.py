"""Runs a recipe several times and compares metrics and checkpoints bit for bit; the oracle of all determinism.

Switches and variables can lie, two runs cannot: whatever the doctor says, a recipe repeats if its runs are equal. A
run under another seed is the control: if that one is equal too, nothing is being measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.analysis.checkpoints import DEFAULT_GLOBS, compare_checkpoints, find_checkpoints
from e2e_registry.analysis.workload import SEED_FIELD, OnLine, TestWorkload, Workload
from e2e_registry.comparison import compare
from e2e_registry.comparison.repeatability import Control, Cost, RepeatResult, RunComparison
from e2e_registry.config import Settings
from e2e_registry.environment import difference
from e2e_registry.errors import RecipeError, UsageError
from e2e_registry.operations.record import require_complete
from e2e_registry.operations.running import ObservedRun
from e2e_registry.operations.standards import display_path
from e2e_registry.reports.values import listed
from e2e_registry.series import SeriesKey

OnStage = Callable[[str], None]

_TOO_FEW = 2

_NOTHING_LEFT = "log through MetricRecorder, or save checkpoints below {run_dir}; --checkpoints names other files"


@dataclass(frozen=True, kw_only=True)
class RepeatOptions:
    """How to repeat.

    Attributes:
        runs: How many runs are compared, at least two.
        has_control: Whether a run under another seed follows.
        control_seed: Its seed; one more than the runs' by default.
        checkpoints: Patterns of checkpoint files below the run directory; None for the usual ones.
        plain_without: The arguments that plain mode leaves out; None to measure no cost.
        cost_pairs: How many pairs of runs the cost is the median of.
    """

    runs: int = 2
    has_control: bool = True
    control_seed: int | None = None
    checkpoints: tuple[str, ...] | None = None
    plain_without: tuple[str, ...] | None = None
    cost_pairs: int = 3


@dataclass(frozen=True)
class _KeptRun:
    """A run and its checkpoints."""

    run: ObservedRun
    checkpoints: Mapping[str, Path]

    @property
    def metrics(self) -> Sequence[str]:
        return () if self.run.recording is None else self.run.recording.metrics


def repeat(
    workload: Workload,
    settings: Settings,
    options: RepeatOptions,
    *,
    on_stage: OnStage = lambda stage: None,
    on_line: OnLine | None = None,
) -> RepeatResult:
    """Run a test or a command several times in fresh processes and compare the runs bit for bit.

    Args:
        workload: What is run.
        settings: The repository's settings.
        options: How to repeat.
        on_stage: Called before each run with what it is.
        on_line: Called with each line that a run prints.

    Raises:
        UsageError: There is nothing to compare, or the options do not fit the workload.
        RecordingError: A run failed, or its recording is invalid or incomplete.
        StorageError: A run or a checkpoint cannot be read or written.
    """
    if options.runs < _TOO_FEW:
        raise UsageError(f"--runs {options.runs}: it takes two runs to repeat anything")
    return _Repetition(workload, settings, options, on_stage, on_line).result()


class _Repetition:
    """One call of :func:`repeat`."""

    def __init__(
        self, workload: Workload, settings: Settings, options: RepeatOptions, on_stage: OnStage, on_line: OnLine | None
    ) -> None:
        self._workload = workload
        self._settings = settings
        self._options = options
        self._on_stage = on_stage
        self._on_line = on_line
        # Whatever cannot be done must be known before anything runs.
        self._seed, self._control_seed = _seeds(workload, options)
        removed = options.plain_without
        self._plain = None if removed is None else workload.without_arguments(removed) if removed else workload

    def result(self) -> RepeatResult:
        """Run everything and compare it."""
        first, *others = (self._kept(f"run {at} of {self._options.runs}", self._seed) for at in self._numbers())
        comparisons = [self._compared(other, first) for other in others]
        self._require_something_to_compare(first, comparisons)
        is_repeatable = all(comparison.is_equal for comparison in comparisons)
        control = self._control(first) if is_repeatable else None  # one that differs would show nothing
        policies = self._workload.policies(first.metrics)
        judged = [batch for batch in first.run.batches() if policies.policy(batch.key.metric).is_judged]
        return RepeatResult(
            subject=self._workload.label,
            platform=first.run.platform,
            seed=self._seed,
            first_run=display_path(first.run.path, self._settings),
            num_series=len({batch.key for batch in judged}),
            num_points=sum(map(len, judged)),
            comparisons=comparisons,
            control=control,
            cost=self._cost(),
            warnings=[*self._warnings(first, control)],
        )

    def _numbers(self) -> range:
        return range(1, self._options.runs + 1)

    def _kept(self, stage: str, seed: int | None) -> _KeptRun:
        self._on_stage(stage)
        run = self._workload.run(seed=seed, on_line=self._on_line)
        checkpoints = find_checkpoints(run.path, self._options.checkpoints or DEFAULT_GLOBS)
        if not run.is_complete:
            require_complete(run)
        # A recipe may leave checkpoints and log nothing.
        if not (run.metrics or checkpoints or self._options.checkpoints):
            message = "the recipe exited with code 0, logged nothing and left no checkpoint"
            raise RecipeError(message, where=run.path, hint=_NOTHING_LEFT)
        return _KeptRun(run, checkpoints)

    def _compared(self, got: _KeptRun, want: _KeptRun) -> RunComparison:
        policies = self._workload.policies({*got.metrics, *want.metrics})
        return RunComparison(
            run=display_path(got.run.path, self._settings),
            metrics=compare(got.run.batches(), want.run.batches(), policies=policies),
            checkpoints=compare_checkpoints(got.checkpoints, want.checkpoints),
            environment=difference(want.run.environment, got.run.environment),
        )

    def _require_something_to_compare(self, first: _KeptRun, comparisons: Sequence[RunComparison]) -> None:
        has_files = any(comparison.checkpoints.files for comparison in comparisons)
        if self._options.checkpoints and not has_files:
            patterns = ", ".join(self._options.checkpoints)
            raise UsageError(
                f"no file of the runs is a checkpoint by {patterns}",
                where=first.run.path,
                hint="patterns are relative to the run directory, which {run_dir} in a command stands for",
            )
        if not has_files and not any(comparison.metrics.num_judged for comparison in comparisons):
            raise UsageError(
                f"{self._workload.label} leaves nothing to compare: no judged metric and no checkpoint",
                hint=_NOTHING_LEFT,
            )

    # -------------------------------------------------------------------------------------------- control, cost

    def _control(self, first: _KeptRun) -> Control | None:
        seed = self._control_seed
        if seed is None:
            return None
        run = self._kept(f"control, seed {seed}", seed)
        return Control(seed, self._compared(run, first), {**self._numeric(first), **self._numeric(run)})

    def _numeric(self, kept: _KeptRun) -> dict[SeriesKey, bool]:
        """Return the judged series that hold numbers, with whether these are floats."""
        policies = self._workload.policies(kept.metrics)
        dtypes = {} if kept.run.recording is None else kept.run.recording.dtypes
        return {
            key: any(dtype.is_float for dtype in found)
            for key, found in dtypes.items()
            if policies.policy(key.metric).is_judged and not all(dtype.is_digest for dtype in found)
        }

    def _cost(self) -> Cost | None:
        if self._plain is None:
            return None
        pairs = tuple(self._timed_pair(at) for at in range(self._options.cost_pairs))
        return Cost(pairs, self._options.plain_without or ())

    def _timed_pair(self, at: int) -> tuple[float, float]:
        """Time both modes one after the other, the first one first in every other pair: a drift hits both alike."""
        stage = f"cost, pair {at + 1} of {self._options.cost_pairs}"
        modes = [(self._workload, True), (self._plain or self._workload, False)]
        seconds: dict[bool, float] = {}
        for workload, is_pinned in modes if at % 2 == 0 else reversed(modes):
            self._on_stage(f"{stage}, {'deterministic' if is_pinned else 'plain'}")
            run = workload.run(seed=self._seed, is_pinned=is_pinned, on_line=self._on_line)
            if run.has_failed or run.duration_s is None:
                require_complete(run)
                raise RecipeError("the run has no duration", where=run.path)
            seconds[is_pinned] = run.duration_s
        return seconds[True], seconds[False]

    # -------------------------------------------------------------------------------------------- warnings

    def _warnings(self, first: _KeptRun, control: Control | None) -> Iterator[str]:
        yield from (f"not on the profile: {pin}" for pin in first.run.pins)
        yield from first.run.warnings
        if self._options.has_control and self._control_seed is None:
            where = (
                "the test declares no seed= (or give --control-seed)"
                if isinstance(self._workload, TestWorkload)
                else f"{SEED_FIELD} stands nowhere in the command"
            )
            yield f"no different-seed control: {where}; so it is not shown that the runs measure anything"
        elif control is not None and control.differs and first.metrics and control.comparison.are_metrics_equal:
            yield f"under seed {control.seed} only checkpoints differ: no metric notices the seed"
        elif control is not None and control.differs and control.idle_series:
            idle = listed([str(key) for key in control.idle_series])
            seeds = f"under seed {control.seed} as under seed {self._seed}"
            yield f"the same {seeds}, so equal runs say little of it: {idle}"


def _seeds(workload: Workload, options: RepeatOptions) -> tuple[int | None, int | None]:
    """Return the seeds of the runs and of the control; None where there is none."""
    seed, control = workload.seed, options.control_seed
    if not options.has_control:
        return seed, None
    if control is None:
        return seed, None if seed is None else seed + 1
    if seed is None and not isinstance(workload, TestWorkload):
        raise UsageError(
            f"--control-seed {control} has nowhere to go: {SEED_FIELD} stands nowhere in the command",
            hint=f"write {SEED_FIELD} where the seed goes",
        )
    seed = 0 if seed is None else seed  # a test without a registered seed takes `--seed` all the same
    if control == seed:
        raise UsageError(f"--control-seed {control} is the seed of the runs", hint="give another one")
    return seed, control
