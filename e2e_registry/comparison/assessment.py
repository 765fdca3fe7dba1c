"""What is concluded of one test: its verdict, and all that a report needs to explain it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e_registry.comparison.arithmetic import to_float
from e2e_registry.comparison.invariants import InvariantBreak
from e2e_registry.comparison.result import Aggregate, Comparison, Divergence, SeriesResult, StepRanges, Verdict
from e2e_registry.errors import ExitCode, RegistryError

if TYPE_CHECKING:
    from e2e_registry.environment import EnvironmentDifference


class TestVerdict(enum.Enum):
    """What a check concludes of a test."""

    __test__ = False  # the name is the field's; pytest must not collect it

    MATCH = "match"
    WITHIN_TOLERANCE = "within-tolerance"
    MISMATCH = "mismatch"
    NO_STANDARD = "no-standard"
    INCOMPARABLE = "incomparable"
    FAILED = "failed"
    INCOMPLETE = "incomplete"
    INVALID = "invalid"
    SKIPPED = "skipped"
    ERROR = "error"

    @property
    def exit_code(self) -> ExitCode:
        """What a command answers when this is its only verdict; an error carries its own."""
        return _EXIT_CODES[self]

    @property
    def is_success(self) -> bool:
        """Whether nothing needs doing."""
        return self in (TestVerdict.MATCH, TestVerdict.WITHIN_TOLERANCE)

    @classmethod
    def of(cls, verdict: Verdict) -> TestVerdict:
        """Return the test verdict of a comparison that counts."""
        return cls(verdict.value)


_EXIT_CODES = {
    TestVerdict.MATCH: ExitCode.OK,
    TestVerdict.WITHIN_TOLERANCE: ExitCode.OK,
    TestVerdict.MISMATCH: ExitCode.MISMATCH,
    TestVerdict.NO_STANDARD: ExitCode.NO_STANDARD,
    TestVerdict.INCOMPARABLE: ExitCode.NO_STANDARD,
    TestVerdict.FAILED: ExitCode.RUN_FAILED,
    TestVerdict.INCOMPLETE: ExitCode.RUN_FAILED,
    TestVerdict.INVALID: ExitCode.RUN_FAILED,
    TestVerdict.SKIPPED: ExitCode.NOTHING_SELECTED,
    TestVerdict.ERROR: ExitCode.INTERNAL,
}


class RepeatLabel(enum.Enum):
    """What running a mismatching test again showed. It explains the verdict and never changes it."""

    REPEATABLE = "repeatable"
    NONDETERMINISTIC = "nondeterministic"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A mismatching test, run again.

    Attributes:
        label: Whether all runs agreed with the first under the test's policies; ``not comparable`` if one was on
            another platform.
        run_paths: The further runs that were kept.
        reason: What did not agree; None if all did.
    """

    label: RepeatLabel
    run_paths: Sequence[str]
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``results.json`` holds."""
        return {"label": self.label.value, "runs": list(self.run_paths), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """One test (or one bare comparison), judged.

    Attributes:
        subject: The test's id, or what was compared.
        verdict: The conclusion.
        platform: Slug of the platform the run was on, if there was a run.
        reasons: Why the verdict is not that of the comparison alone: one sentence each.
        comparison: The run against a standard; for information only unless ``is_judged``.
        is_judged: Whether the verdict rests on the comparison.
        compared_with: What it was compared with: a path from the root, or the other side of a bare comparison.
        breaks: Invariants that do not hold.
        environment: How the run's environment differs from the standard's.
        log_tail: The end of the recipe's output, where the recipe failed.
        run_path: The kept run.
        candidate: The run as a ready-to-commit standard, if it could be one.
        warnings: What did not change the verdict, and should be known.
        duration_s: Wall time of the run, seconds.
        next_steps: Commands that make sense now.
        quarantine: Why, and until when, a failure of this test does not block.
        error: Why nothing could be concluded, with verdict ``error``.
        repeat: What running the test again showed, if that was asked for and the verdict is ``mismatch``.
        node: The node of a Ray cluster that ran it; None for this machine.
        attempts: How often it was started: more than once only if Ray lost a node and ran it again.
    """

    subject: str
    verdict: TestVerdict
    platform: str | None = None
    reasons: Sequence[str] = ()
    comparison: Comparison | None = None
    is_judged: bool = False
    compared_with: str | None = None
    breaks: Sequence[InvariantBreak] = ()
    environment: Sequence[EnvironmentDifference] = ()
    log_tail: str | None = None
    run_path: str | None = None
    candidate: str | None = None
    warnings: Sequence[str] = ()
    duration_s: float | None = None
    next_steps: Sequence[str] = ()
    quarantine: str | None = None
    error: RegistryError | None = None
    repeat: Repeat | None = None
    node: str | None = None
    attempts: int = 1

    @property
    def exit_code(self) -> ExitCode:
        """What a command answers when this is all it did; a quarantined test blocks nothing."""
        if self.quarantine is not None and self.verdict is not TestVerdict.SKIPPED:
            return ExitCode.OK
        return self.verdict.exit_code if self.error is None else self.error.exit_code

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` and ``results.json`` hold for this test."""
        return {
            "subject": self.subject,
            "verdict": self.verdict.value,
            "exit_code": int(self.exit_code),
            "platform": self.platform,
            "reasons": list(self.reasons),
            "is_judged": self.is_judged,
            "compared_with": self.compared_with,
            "comparison": None if self.comparison is None else comparison_to_json(self.comparison),
            "broken_invariants": [_break_to_json(broken) for broken in self.breaks],
            "environment": [difference.to_json() for difference in self.environment],
            "run": self.run_path,
            "candidate": self.candidate,
            "log_tail": self.log_tail,
            "warnings": list(self.warnings),
            "quarantine": self.quarantine,
            "duration_s": self.duration_s,
            "next_steps": list(self.next_steps),
            "repeat": None if self.repeat is None else self.repeat.to_json(),
            "node": self.node,
            "attempts": self.attempts,
            "error": None if self.error is None else str(self.error),
        }


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON: every series with its counts, first and worst divergence, never its points."""
    first = comparison.first_divergence
    return {
        "verdict": comparison.verdict.value,
        "first_divergence": None if first is None else _divergence_to_json(first),
        "never_emitted": list(comparison.never_emitted),
        "series": [_series_to_json(result) for result in comparison.series],
    }


def _series_to_json(result: SeriesResult) -> dict[str, Any]:
    return {
        "metric": result.key.metric,
        "role": result.key.role,
        "rank": result.key.rank,
        "verdict": result.verdict.value,
        "policy": result.policy.to_json(),
        "presence": result.presence.value,
        "points": result.num_common,
        "differing": result.num_differing,
        "failing": result.num_failing,
        "of_other_dtype": result.num_dtype,
        "missing_steps": _ranges_to_json(result.missing),
        "extra_steps": _ranges_to_json(result.extra),
        "first": None if result.first is None else _divergence_to_json(result.first),
        "worst": None if result.worst is None else _divergence_to_json(result.worst),
        "largest_rel": _number(result.magnitude[0]),
        "aggregate": None if result.aggregate is None else _aggregate_to_json(result.aggregate),
    }


def _ranges_to_json(ranges: StepRanges) -> dict[str, Any]:
    return {"count": ranges.count, "first_ranges": [list(pair) for pair in ranges.ranges]}


def _aggregate_to_json(aggregate: Aggregate) -> dict[str, Any]:
    return {
        "reduce": aggregate.reduction,
        "want": None if aggregate.want is None else _number(to_float(aggregate.want)),
        "got": None if aggregate.got is None else _number(to_float(aggregate.got)),
        "allowance": _number(aggregate.allowance),
        "passes": aggregate.passes,
    }


def _number(value: float | None) -> float | str | None:
    """Return a float as strict JSON allows it: infinities as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _divergence_to_json(divergence: Divergence) -> dict[str, Any]:
    return {
        "metric": divergence.key.metric,
        "role": divergence.key.role,
        "rank": divergence.key.rank,
        "step": divergence.step,
        "occurrence": divergence.occurrence,
        "seq": divergence.seq,
        "want": None if divergence.want is None else divergence.want.to_json(),
        "got": None if divergence.got is None else divergence.got.to_json(),
        "abs": _number(divergence.abs_error),
        "rel": _number(divergence.rel_error),
        "ulp": divergence.ulp_error,
        "allowance": _number(divergence.allowance),
    }


def _break_to_json(broken: InvariantBreak) -> dict[str, Any]:
    return {
        "metric": broken.key.metric,
        "role": broken.key.role,
        "rank": broken.key.rank,
        "invariant": str(broken.invariant),
        "what": broken.what,
        "count": broken.count,
        "step": broken.step,
        "value": broken.point.to_json(),
    }
