"""What a comparison found: results a series, divergences, and the verdicts that follow from them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from e2e_registry.comparison.arithmetic import to_float, ulp_distance
from e2e_registry.series import Point, SeriesKey
from e2e_registry.tolerance import Policy, PolicyKind

if TYPE_CHECKING:
    from e2e_registry.series import Int64Array

#: Runs of missing or extra steps that a result names before it only counts; keeps every report bounded.
MAX_STEP_RANGES = 8


class Verdict(enum.Enum):
    """What a comparison concludes, of one series or of all."""

    MATCH = "match"
    WITHIN_TOLERANCE = "within-tolerance"
    MISMATCH = "mismatch"
    OBSERVED = "observed"
    UNREGISTERED = "unregistered"


class Presence(enum.Enum):
    """On which sides a series exists."""

    BOTH = "both"
    ONLY_GOT = "only in the run"
    ONLY_WANT = "only in the standard"


@dataclass(frozen=True, slots=True)
class Divergence:
    """One place where the two sides differ.

    Attributes:
        key: The series.
        step: The step it was logged with.
        occurrence: Position among the points of that step, from 0.
        seq: Emission position, in the standard where the point exists there, else in the run: it orders
            divergences for display.
        want: The standard's value, or None where it has none.
        got: The run's value, or None where it has none.
        allowance: What the tolerance allows at this point, in the metric's unit; None under ``strict``.
    """

    key: SeriesKey
    step: int
    occurrence: int
    seq: int
    want: Point | None
    got: Point | None
    allowance: float | None = None

    @property
    def abs_error(self) -> float | None:
        """|got - want|, correctly rounded; None where it has no meaning."""
        error = self._exact_error()
        return None if error is None else to_float(error)

    @property
    def rel_error(self) -> float | None:
        """|got - want| / |want|, correctly rounded; None where it has no meaning, or the standard's value is 0."""
        error = self._exact_error()
        if error is None or self.want is None or self.want.exact() == 0:
            return None
        return to_float(error / abs(self.want.exact()))

    @property
    def ulp_error(self) -> int | None:
        """Distance in representable values of the native dtype; None unless both are finite floats of one dtype."""
        if self.want is None or self.got is None or self.want.dtype is not self.got.dtype:
            return None
        if not (self.want.dtype.is_float and self.want.is_finite_number and self.got.is_finite_number):
            return None
        pair = np.array([self.want.bits, self.got.bits], np.uint64)
        return int(ulp_distance(self.want.dtype, pair[:1], pair[1:])[0])

    def _exact_error(self) -> Fraction | None:
        if self.want is None or self.got is None:
            return None
        if not (self.want.is_finite_number and self.got.is_finite_number):
            return None
        return abs(self.got.exact() - self.want.exact())


@dataclass(slots=True)
class StepRanges:
    """Steps that one side lacks: an exact count, and the first few runs of them as inclusive ranges."""

    count: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, steps: Int64Array) -> None:
        """Add sorted steps that come after all added before."""
        if not len(steps):
            return
        self.count += len(steps)
        cuts = np.flatnonzero(np.diff(steps) > 1) + 1
        for part in np.split(steps, cuts[: MAX_STEP_RANGES + 1]):
            first, last = int(part[0]), int(part[-1])
            if self.ranges and first <= self.ranges[-1][1] + 1:
                self.ranges[-1] = (self.ranges[-1][0], last)
            elif len(self.ranges) < MAX_STEP_RANGES:
                self.ranges.append((first, last))
            else:
                return

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The judged aggregate of a ``reduce`` tolerance; None where no finite point was left to aggregate."""

    reduction: str
    want: Fraction | None
    got: Fraction | None
    allowance: float | None
    passes: bool


@dataclass(slots=True)
class SeriesResult:
    """What the comparison found in one series.

    Attributes:
        key: The series.
        policy: How it was judged.
        presence: On which sides it exists.
        num_common: Points that both sides have.
        num_differing: Common points whose dtype, bits or digest differ.
        num_failing: Common points that the policy does not accept.
        num_dtype: Of the failing points, those whose dtype differs.
        missing: Steps that the run lacks.
        extra: Steps that the standard lacks.
        first: The first failing place, in emission order.
        worst: The failing common point with the largest absolute error; where none fails, the largest accepted
            difference.
        largest_rel: The largest relative error of a common number, rounded; infinite where a side is not finite, or
            the standard's value is 0.
        aggregate: Of a ``reduce`` tolerance.
    """

    key: SeriesKey
    policy: Policy
    presence: Presence = Presence.BOTH
    num_common: int = 0
    num_differing: int = 0
    num_failing: int = 0
    num_dtype: int = 0
    missing: StepRanges = field(default_factory=StepRanges)
    extra: StepRanges = field(default_factory=StepRanges)
    first: Divergence | None = None
    worst: Divergence | None = None
    largest_rel: float = 0.0
    aggregate: Aggregate | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold exactly the same points."""
        return self.presence is Presence.BOTH and not (self.num_differing or self.missing or self.extra)

    @property
    def is_digest(self) -> bool:
        """Whether a digest is what differs first."""
        point = None if self.first is None else self.first.want or self.first.got
        return point is not None and point.dtype.is_digest

    @property
    def magnitude(self) -> tuple[float, float]:
        """How large the difference is, to order series by: the largest relative error, then the worst absolute one.

        Series and steps on one side only, another dtype and non-finite values are larger than any number. A digest
        says that something moved, not how far, so it is no larger than nothing.
        """
        if self.presence is not Presence.BOTH or self.missing or self.extra or self.num_dtype:
            return math.inf, math.inf
        error = None if self.worst is None else self.worst.abs_error
        return self.largest_rel, math.inf if error is None else error

    @property
    def verdict(self) -> Verdict:
        """The verdict of this series under its policy."""
        if self.policy.kind is PolicyKind.OBSERVE:
            return Verdict.OBSERVED
        if self.policy.kind is PolicyKind.UNREGISTERED:
            return Verdict.UNREGISTERED
        if self.is_equal and (self.aggregate is None or self.aggregate.passes):
            return Verdict.MATCH
        if self.presence is not Presence.BOTH or self.missing or self.extra or self.num_failing:
            return Verdict.MISMATCH
        if self.aggregate is not None and not self.aggregate.passes:
            return Verdict.MISMATCH
        return Verdict.WITHIN_TOLERANCE


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a run with a standard.

    Attributes:
        series: A result a series, in key order.
        never_emitted: Registered names and globs that no metric of the run answers to.
    """

    series: tuple[SeriesResult, ...]
    never_emitted: tuple[str, ...]

    @cached_property
    def verdict(self) -> Verdict:
        """``mismatch`` if anything judged failed, else ``within-tolerance`` if anything differed, else ``match``."""
        verdicts = {result.verdict for result in self.series}
        if self.never_emitted or Verdict.MISMATCH in verdicts:
            return Verdict.MISMATCH
        return Verdict.WITHIN_TOLERANCE if Verdict.WITHIN_TOLERANCE in verdicts else Verdict.MATCH

    @property
    def num_judged(self) -> int:
        """How many series could have failed."""
        return sum(result.policy.is_judged for result in self.series) + len(self.never_emitted)

    @cached_property
    def failing(self) -> tuple[SeriesResult, ...]:
        """The series that fail, by their first divergence in emission order."""
        failed = [result for result in self.series if result.verdict is Verdict.MISMATCH]
        return tuple(sorted(failed, key=_emission_order))

    @property
    def first_divergence(self) -> Divergence | None:
        """The first failing place in emission order over all series."""
        return self.failing[0].first if self.failing else None


def _emission_order(result: SeriesResult) -> tuple[float, tuple[bytes, bytes, int]]:
    return (math.inf if result.first is None else result.first.seq), result.key.sort_key()


def largest_first(results: Iterable[SeriesResult]) -> list[SeriesResult]:
    """Sort series by how large their differences are; equal ones stay in emission order."""
    return sorted(results, key=lambda result: (*(-size for size in result.magnitude), *_emission_order(result)))
