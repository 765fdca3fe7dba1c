"""Statistics of a metric over seeds: spread, paired difference, and what a threshold would need.

All intervals are two-sided 95% intervals under the usual model: values over seeds are independent and roughly normal.
With three to five seeds that is a coarse instrument, which the intervals say themselves: they are wide. SciPy holds
the distributions, and is imported when a number is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from e2e_registry.errors import ExitCode, UsageError
from e2e_registry.series import SeriesKey

LEVEL = 0.95
#: The chance of seeing a true difference that ``seeds_for_power`` asks for.
POWER = 0.8
#: Beyond it the number of seeds is only said to be larger.
MAX_SEEDS = 100_000


def require_scipy() -> Any:
    """Return ``scipy.stats``.

    Raises:
        UsageError: SciPy is not installed.
    """
    try:
        return import_module("scipy.stats")
    except ImportError:
        raise UsageError(
            "statistics over seeds need SciPy, which is not installed",
            hint="pip install 'scipy>=1.14', or the extra that brings it: pip install 'e2e-registry[recipes]'",
        ) from None


@dataclass(frozen=True, slots=True)
class Sample:
    """One value a seed, of one metric.

    Attributes:
        values: The values, at least two, finite.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float:
        """The standard deviation of the population that the seeds are drawn from (divisor n - 1)."""
        return statistics.stdev(self.values)

    def sd_interval(self) -> tuple[float, float]:
        """Return the 95% interval of the standard deviation; with few seeds it is known poorly."""
        chi2, df = require_scipy().chi2, len(self.values) - 1
        tails = (1 + LEVEL) / 2, (1 - LEVEL) / 2
        low, high = (self.sd * math.sqrt(df / float(chi2.ppf(tail, df))) for tail in tails)
        return low, high

    def half_width(self) -> float:
        """Return half the width of the 95% t interval of the mean."""
        return _half_width(self.sd, len(self.values))

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the sample."""
        return {
            "values": list(self.values),
            "mean": self.mean,
            "sd": self.sd,
            "sd_interval": list(self.sd_interval()),
        }


def _half_width(sd: float, count: int) -> float:
    return float(require_scipy().t.ppf((1 + LEVEL) / 2, count - 1)) * sd / math.sqrt(count)


@dataclass(frozen=True, slots=True)
class ThresholdJudgement:
    """Whether seed noise lets a difference of a given size be called an improvement.

    Attributes:
        threshold: The size, in the metric's unit.
        num_seeds: The measured seeds.
        sd: Standard deviation of a difference between two runs: measured over pairs, or that of two independent runs.
        is_paired: Whether it was measured over pairs.
    """

    threshold: float
    num_seeds: int
    sd: float
    is_paired: bool

    @property
    def half_width(self) -> float:
        """How far, at 95%, the mean difference over the measured number of seeds strays by noise alone."""
        return _half_width(self.sd, self.num_seeds)

    @property
    def is_supported(self) -> bool:
        """Whether a mean difference of the threshold would lie outside of what noise alone produces."""
        return self.half_width <= self.threshold

    @property
    def single_pair_chance(self) -> float:
        """Chance that one run of an unchanged candidate looks better than one of the baseline by the threshold."""
        if self.sd == 0:
            return 0.0
        return float(require_scipy().t.sf(self.threshold / self.sd, self.num_seeds - 1))

    @property
    def seeds_for_interval(self) -> int | None:
        """Seeds at which the interval of the mean difference is the threshold wide to each side; None: too many."""
        return _smallest(lambda count: _half_width(self.sd, count) <= self.threshold)

    @property
    def seeds_for_power(self) -> int | None:
        """Seeds at which a true difference of the threshold is seen with a chance of 80%; None: too many."""
        return _smallest(lambda count: _power(self.threshold, self.sd, count) >= POWER)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the threshold."""
        return {
            "threshold": self.threshold,
            "is_supported": self.is_supported,
            "sd_of_difference": self.sd,
            "is_paired": self.is_paired,
            "half_width": self.half_width,
            "single_pair_chance": self.single_pair_chance,
            "seeds_for_interval": self.seeds_for_interval,
            "seeds_for_power": self.seeds_for_power,
        }


def _power(difference: float, sd: float, count: int) -> float:
    """Return the power of the two-sided paired t-test; source: the noncentral t distribution."""
    if sd == 0:
        return 1.0
    noncentrality = difference * math.sqrt(count) / sd
    if noncentrality > 30:  # where SciPy's noncentral t gives out, and the power is 1 to every digit
        return 1.0
    stats = require_scipy()
    critical = float(stats.t.ppf((1 + LEVEL) / 2, count - 1))
    tails = stats.nct.sf(critical, count - 1, noncentrality), stats.nct.cdf(-critical, count - 1, noncentrality)
    return float(sum(tails))


def _smallest(is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest count from 2 on that is enough, for a condition that stays true once it is."""
    low, high = 1, 2
    while not is_enough(high):
        if high >= MAX_SEEDS:
            return None
        low, high = high, min(2 * high, MAX_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class SeedMetric:
    """One series over seeds.

    Attributes:
        key: The series.
        baseline: Its reduced values, a value a seed.
        candidate: Those of the other side, for the same seeds in the same order; None without one.
        threshold: The judgement of a threshold, if one was asked for.
    """

    key: SeriesKey
    baseline: Sample
    candidate: Sample | None = None
    threshold: ThresholdJudgement | None = None

    @property
    def difference(self) -> Sample | None:
        """Candidate minus baseline, seed by seed; what both owe to the seed cancels."""
        if self.candidate is None:
            return None
        pairs = zip(self.candidate.values, self.baseline.values, strict=True)
        return Sample(tuple(candidate - baseline for candidate, baseline in pairs))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% t interval of the mean paired difference."""
        difference = self.difference
        if difference is None:
            return None
        half = difference.half_width()
        return difference.mean - half, difference.mean + half

    @property
    def has_evidence(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the series."""
        difference, interval = self.difference, self.interval
        return {
            "metric": self.key.metric,
            "role": self.key.role,
            "rank": self.key.rank,
            "baseline": self.baseline.to_json(),
            "candidate": None if self.candidate is None else self.candidate.to_json(),
            "difference": None
            if difference is None or interval is None
            else {**difference.to_json(), "interval": list(interval), "has_evidence": self.has_evidence},
            "threshold": None if self.threshold is None else self.threshold.to_json(),
        }


def judge_threshold(threshold: float, baseline: Sample, difference: Sample | None) -> ThresholdJudgement:
    """Judge a threshold by measured pairs, or by the spread of one side: two independent runs differ by sqrt(2) of it.

    Args:
        threshold: The size of a difference, positive, in the metric's unit.
        baseline: The values of one side.
        difference: Candidate minus baseline, if there is a candidate.
    """
    sd = baseline.sd * math.sqrt(2) if difference is None else difference.sd
    return ThresholdJudgement(threshold, len(baseline.values), sd, difference is not None)


@dataclass(frozen=True, kw_only=True)
class SeedsResult:
    """A recipe over seeds, alone or against a candidate.

    Attributes:
        subject: What was run, or the sets of kept runs.
        candidate: What the candidate is; None for a spread alone.
        reduction: How a series became one number.
        seeds: The seeds, in the order of all values; None for runs that do not say.
        metrics: The series that every run has.
        left_out: Series without a number in every run, with the reason.
        changes: How the recorded environments of both sides differ.
        runs: The kept runs by side.
        warnings: What should be known.
    """

    subject: str
    candidate: str | None
    reduction: str
    seeds: Sequence[int] | None
    metrics: Sequence[SeedMetric]
    left_out: Mapping[SeriesKey, str]
    changes: Sequence[str]
    runs: Sequence[Sequence[str]]
    warnings: Sequence[str] = ()

    @property
    def num_seeds(self) -> int:
        """How many runs each side has."""
        return len(self.runs[0])

    @property
    def is_seed_idle(self) -> bool:
        """Whether different seeds gave the same value in every series: then the seed reaches nothing."""
        return self.seeds is not None and all(len(set(metric.baseline.values)) == 1 for metric in self.metrics)

    @property
    def unsupported(self) -> list[SeedMetric]:
        """The series whose spread does not support the threshold."""
        return [metric for metric in self.metrics if metric.threshold and not metric.threshold.is_supported]

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers: an idle seed and an unsupported threshold are findings, a difference is none."""
        return ExitCode.MISMATCH if self.is_seed_idle or self.unsupported else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "subject": self.subject,
            "candidate": self.candidate,
            "reduction": self.reduction,
            "level": LEVEL,
            "seeds": None if self.seeds is None else list(self.seeds),
            "exit_code": int(self.exit_code),
            "is_seed_idle": self.is_seed_idle,
            "metrics": [metric.to_json() for metric in self.metrics],
            "left_out": {str(key): reason for key, reason in self.left_out.items()},
            "changes": list(self.changes),
            "runs": [list(side) for side in self.runs],
            "warnings": list(self.warnings),
        }
