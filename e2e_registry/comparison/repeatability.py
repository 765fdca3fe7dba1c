"""What running one recipe several times showed: whether it repeats, whether its seed matters, what it costs."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from e2e_registry.comparison.assessment import comparison_to_json
from e2e_registry.comparison.checkpoints import CheckpointComparison
from e2e_registry.comparison.result import Comparison, Verdict
from e2e_registry.errors import ExitCode
from e2e_registry.series import SeriesKey

if TYPE_CHECKING:
    from e2e_registry.environment import EnvironmentDifference


class RepeatVerdict(enum.Enum):
    """What is concluded of a recipe that was run several times."""

    REPEATABLE = "repeatable"
    NOT_REPEATABLE = "not repeatable"
    CONTROL_EQUAL = "control equal"

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers."""
        return ExitCode.OK if self is RepeatVerdict.REPEATABLE else ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """One run, compared bit for bit with the first.

    Attributes:
        run: The run directory.
        metrics: Its judged series against those of the first run.
        checkpoints: Its checkpoints against those of the first run.
        environment: How its recorded environment differs from that of the first run.
    """

    run: str
    metrics: Comparison
    checkpoints: CheckpointComparison
    environment: Sequence[EnvironmentDifference] = ()

    @property
    def are_metrics_equal(self) -> bool:
        """Whether every judged series is equal."""
        return self.metrics.verdict is Verdict.MATCH

    @property
    def is_equal(self) -> bool:
        """Whether metrics and checkpoints are equal in every bit."""
        return self.are_metrics_equal and self.checkpoints.is_equal

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the run."""
        return {
            "run": self.run,
            "equal": self.is_equal,
            "metrics": comparison_to_json(self.metrics),
            "checkpoints": self.checkpoints.to_json(),
            "environment": [difference.to_json() for difference in self.environment],
        }


@dataclass(frozen=True, slots=True)
class Control:
    """A run under another seed, which must differ: equal bits would mean that nothing is measured.

    Attributes:
        seed: Its seed.
        comparison: The run against the first run.
        numeric: The judged series of either run that hold numbers, with whether these are floats.
    """

    seed: int
    comparison: RunComparison
    numeric: Mapping[SeriesKey, bool]

    @property
    def differs(self) -> bool:
        """Whether the seed reaches what is trained: a judged number, or a weight in a checkpoint.

        Sample ids may follow a seed that no weight ever sees, so a digest counts only where no float is judged. A seed
        or a generator's state that a checkpoint keeps differs by itself, and shows nothing.
        """
        moved = {result.key for result in self.comparison.metrics.series if result.verdict is Verdict.MISMATCH}
        if any(self.numeric.values()):
            moved &= self.numeric.keys()
        return bool(moved) or any(
            difference.is_in_weights for file in self.comparison.checkpoints.files for difference in file.differences
        )

    @property
    def idle_series(self) -> tuple[SeriesKey, ...]:
        """The judged series of numbers that are the same under both seeds."""
        results = self.comparison.metrics.series
        return tuple(r.key for r in results if r.key in self.numeric and r.verdict is Verdict.MATCH)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the control."""
        idle = [str(key) for key in self.idle_series]
        return {"seed": self.seed, "differs": self.differs, "idle_series": idle, **self.comparison.to_json()}


@dataclass(frozen=True, slots=True)
class Cost:
    """What deterministic mode costs, as wall times of whole processes.

    Attributes:
        pairs: Seconds in deterministic and in plain mode, of runs that followed each other.
        removed: The arguments that plain mode leaves out.
    """

    pairs: tuple[tuple[float, float], ...]
    removed: tuple[str, ...]

    @property
    def ratios(self) -> list[float]:
        """Deterministic time over plain time, a number a pair, in ascending order."""
        return sorted(deterministic / plain for deterministic, plain in self.pairs)

    @property
    def median_ratio(self) -> float:
        """The median over the pairs: a run that something else slowed down does not move it."""
        return statistics.median(self.ratios)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the cost."""
        return {
            "median_ratio": self.median_ratio,
            "removed_arguments": list(self.removed),
            "pairs": [{"deterministic_s": one, "plain_s": other} for one, other in self.pairs],
        }


@dataclass(frozen=True, kw_only=True)
class RepeatResult:
    """One recipe, run several times in fresh processes.

    Attributes:
        subject: The test's id, or the command.
        platform: Slug of the platform the first run was on.
        seed: The seed of the runs; None if they were given none.
        first_run: The run that the others are compared with.
        num_series: Its judged series.
        num_points: The points of those.
        comparisons: The other runs, in the order in which they ran.
        control: The run under another seed, if there was one.
        cost: What deterministic mode costs, if it was measured.
        warnings: What did not change the verdict, and should be known.
    """

    subject: str
    platform: str
    seed: int | None
    first_run: str
    num_series: int
    num_points: int
    comparisons: Sequence[RunComparison]
    control: Control | None = None
    cost: Cost | None = None
    warnings: Sequence[str] = ()

    @cached_property
    def differing(self) -> tuple[RunComparison, ...]:
        """The runs that differ from the first."""
        return tuple(comparison for comparison in self.comparisons if not comparison.is_equal)

    @property
    def num_runs(self) -> int:
        """How many runs were compared, the first one included."""
        return len(self.comparisons) + 1

    @property
    def verdict(self) -> RepeatVerdict:
        """The conclusion; that runs differ goes before a control that does not."""
        if self.differing:
            return RepeatVerdict.NOT_REPEATABLE
        if self.control is not None and not self.control.differs:
            return RepeatVerdict.CONTROL_EQUAL
        return RepeatVerdict.REPEATABLE

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "subject": self.subject,
            "verdict": self.verdict.value,
            "exit_code": int(self.verdict.exit_code),
            "platform": self.platform,
            "seed": self.seed,
            "first_run": self.first_run,
            "series": self.num_series,
            "points": self.num_points,
            "runs": [comparison.to_json() for comparison in self.comparisons],
            "control": None if self.control is None else self.control.to_json(),
            "cost": None if self.cost is None else self.cost.to_json(),
            "warnings": list(self.warnings),
        }
