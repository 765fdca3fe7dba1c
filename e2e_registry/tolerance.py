"""How a metric is judged: strictly, within a registered tolerance, or not at all; and invariants of its values."""

from __future__ import annotations

import enum
import fnmatch
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, get_args

from e2e_registry.errors import RegistrationError, UsageError, exit_if_script

Side = Literal["increase", "decrease"]
Reduction = Literal["median", "mean", "last"]


def _check_bound(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {value!r}")
    try:
        is_finite = math.isfinite(value)
    except OverflowError as error:  # an int beyond every float
        raise UsageError(f"{name} is too large for a float") from error
    if not is_finite:
        raise UsageError(f"{name}={value!r} is not a bound: it must be finite")
    if value < 0:
        raise UsageError(f"{name}={value!r} is negative")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}:tolerances"


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if value < 0:
        raise UsageError(f"{name}={value!r} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A bound that a metric may move by, and why it cannot be strict.

    A value passes if ``|got - want| <= atol + rtol * |want|`` (scaled by the standard only, so that a worse run
    cannot widen its own allowance), or if it lies within ``ulp`` units in the last place of the native dtype.

    Attributes:
        atol: Absolute bound, in the metric's own unit.
        rtol: Relative bound, as a share of the standard's magnitude.
        ulp: Distance in representable values of the native dtype; floats only, and not of a mean or median.
        fails_on: Judge one side only: a move the other way passes, however far.
        reduce: Judge one aggregate a series rather than each point.
        skip_first: Distinct steps at the start of a series that ``reduce`` leaves out.
        reason: Why this metric cannot be strict. Required, and shown with every verdict that used the bound.

    Raises:
        UsageError: A bound is negative, NaN or infinite, all bounds are zero, the reason is missing, or the
            options do not go together.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0
    fails_on: Side | None = None
    reduce: Reduction | None = None
    skip_first: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not mean anything, once, so that the comparer need not."""
        try:
            self._validate()
        except UsageError as error:
            caller = sys._getframe(2)  # of the constructor that called this
            exit_if_script(RegistrationError(error.message, where=_place(caller), hint=error.hint), caller)
            raise

    def _validate(self) -> None:
        _check_bound("atol", self.atol)
        _check_bound("rtol", self.rtol)
        _check_count("ulp", self.ulp)
        _check_count("skip_first", self.skip_first)
        if self.atol == 0 and self.rtol == 0 and self.ulp == 0:
            raise UsageError("all bounds are zero", hint="leave it strict (the default), or give atol, rtol or ulp")
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise UsageError("a tolerance needs a reason", hint='say why the metric cannot be strict: reason="..."')
        if self.fails_on is not None and self.fails_on not in get_args(Side):
            raise UsageError(f"fails_on={self.fails_on!r} must be one of {', '.join(get_args(Side))}")
        if self.reduce is not None and self.reduce not in get_args(Reduction):
            raise UsageError(f"reduce={self.reduce!r} must be one of {', '.join(get_args(Reduction))}")
        if self.skip_first and self.reduce is None:
            raise UsageError("skip_first needs reduce: skipped points would never be judged")
        if self.ulp and self.reduce in ("mean", "median"):
            raise UsageError(f"ulp does not go with reduce={self.reduce!r}: a {self.reduce} has no native dtype")

    @property
    def bounds_text(self) -> str:
        """The options that differ from their defaults, as one writes them; without the reason."""
        shown = {name: getattr(self, name) for name in ("atol", "rtol", "ulp", "fails_on", "reduce", "skip_first")}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value)

    def accepts_no_more_than(self, other: Tolerance) -> bool:
        """Whether every value that this tolerance accepts is one that ``other`` accepts too."""
        judges_the_same = (self.reduce, self.skip_first) == (other.reduce, other.skip_first)
        is_as_two_sided = self.fails_on is None or self.fails_on == other.fails_on
        bounds = ((self.atol, other.atol), (self.rtol, other.rtol), (self.ulp, other.ulp))
        return judges_the_same and is_as_two_sided and all(mine <= theirs for mine, theirs in bounds)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for a standard's metadata."""
        names = ("atol", "rtol", "ulp", "fails_on", "reduce", "skip_first", "reason")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class PolicyKind(enum.Enum):
    """The three ways to judge a metric, and the metric nobody asked about."""

    STRICT = "strict"
    TOLERANCE = "tolerance"
    OBSERVE = "observe"
    UNREGISTERED = "unregistered"


_STRICTNESS = (PolicyKind.STRICT, PolicyKind.TOLERANCE, PolicyKind.OBSERVE, PolicyKind.UNREGISTERED)


@dataclass(frozen=True, slots=True)
class Policy:
    """How one metric is judged."""

    kind: PolicyKind
    tolerance: Tolerance | None = None

    @property
    def is_judged(self) -> bool:
        """Whether a difference in this metric can fail a test."""
        return self.kind in (PolicyKind.STRICT, PolicyKind.TOLERANCE)

    def accepts_no_more_than(self, other: Policy) -> bool:
        """Whether whatever passes under this policy would pass under ``other``."""
        if self.tolerance is not None and other.tolerance is not None:
            return self.tolerance.accepts_no_more_than(other.tolerance)
        return _STRICTNESS.index(self.kind) <= _STRICTNESS.index(other.kind)

    def __str__(self) -> str:
        """Render as reports show it: ``strict``, ``atol=1e-07``, ``observe``."""
        return self.kind.value if self.tolerance is None else self.tolerance.bounds_text

    def to_json(self) -> dict[str, Any]:
        """Return the form kept in a standard's metadata."""
        options = {} if self.tolerance is None else self.tolerance.to_json()
        return {"kind": self.kind.value, **options}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Policy:
        """Read what :meth:`to_json` wrote.

        Raises:
            UsageError: The options are not those of a policy.
        """
        fields = {name: value for name, value in data.items() if name != "kind"}
        try:
            kind = PolicyKind(data.get("kind"))
            return Policy(kind, Tolerance(**fields) if kind is PolicyKind.TOLERANCE else None)
        except (ValueError, TypeError) as error:
            raise UsageError(f"not a policy: {dict(data)!r}") from error


STRICT = Policy(PolicyKind.STRICT)
OBSERVE = Policy(PolicyKind.OBSERVE)
UNREGISTERED = Policy(PolicyKind.UNREGISTERED)


def is_glob(pattern: str) -> bool:
    """Whether a registered name is a pattern rather than one metric's name."""
    return any(char in pattern for char in "*?[")


def matches(name: str, pattern: str) -> bool:
    """Whether a metric's name is the pattern or is matched by it; case matters on every system."""
    return name == pattern or (is_glob(pattern) and fnmatch.fnmatchcase(name, pattern))


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one test: which metrics are registered and how each is judged.

    Attributes:
        metrics: Registered names and globs.
        tolerances: Name or glob to tolerance; an exact name goes before a glob, then the first glob in order.
        observe: Names and globs that are kept and shown, never judged.
        pinned: Names that the globs were expanded to when the standard was recorded. They stay registered, so
            that a metric that vanished is missed even though no glob names it.
        judge_all: Judge metrics that nothing registers strictly: for a comparison without a test.
    """

    metrics: Sequence[str] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    observe: Sequence[str] = ()
    pinned: frozenset[str] = frozenset()
    judge_all: bool = False

    def policy(self, metric: str) -> Policy:
        """Return how ``metric`` is judged; ``observe`` wins over registration, and a tolerance over strict."""
        if any(matches(metric, pattern) for pattern in self.observe):
            return OBSERVE
        if not self.is_registered(metric):
            return STRICT if self.judge_all else UNREGISTERED
        if metric in self.tolerances:
            return Policy(PolicyKind.TOLERANCE, self.tolerances[metric])
        for pattern, tolerance in self.tolerances.items():
            if matches(metric, pattern):
                return Policy(PolicyKind.TOLERANCE, tolerance)
        return STRICT

    def is_registered(self, metric: str) -> bool:
        """Whether a registered name or glob, or a pinned expansion of one, covers ``metric``."""
        return metric in self.pinned or any(matches(metric, pattern) for pattern in self.metrics)

    def never_emitted(self, emitted: frozenset[str]) -> list[str]:
        """Return the registered names and globs that no emitted metric answers to, in order; observed ones left out."""
        patterns = [*self.metrics, *sorted(name for name in self.pinned if self.policy(name).is_judged)]
        missing = [p for p in patterns if p not in self.observe and not any(matches(name, p) for name in emitted)]
        return list(dict.fromkeys(missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """What must hold for every value of every writer of a metric, when recording and when checking.

    Attributes:
        equals: The one value allowed (compared as a number: an int64 1 equals 1.0).
        min: Smallest value allowed.
        max: Largest value allowed.
        finite: Whether NaN and infinities are refused. ``False`` permits, not requires, them.

    Raises:
        UsageError: A bound is NaN, or ``min`` is above ``max``.
    """

    equals: float | None = None
    min: float | None = None
    max: float | None = None
    finite: bool = True

    def __post_init__(self) -> None:
        """Refuse bounds that no value, or every value, would satisfy."""
        for name in ("equals", "min", "max"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise UsageError(f"{name} must be a number, not {value!r}")
        if not isinstance(self.finite, bool):
            raise UsageError(f"finite must be True or False, not {self.finite!r}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UsageError(f"min={self.min!r} is above max={self.max!r}")

    @property
    def has_bounds(self) -> bool:
        """Whether a value can break the invariant other than by being non-finite."""
        return self.equals is not None or self.min is not None or self.max is not None

    def __str__(self) -> str:
        """Render as one writes it."""
        parts = [f"{n}={getattr(self, n)!r}" for n in ("equals", "min", "max") if getattr(self, n) is not None]
        return ", ".join(parts if self.finite else [*parts, "finite=False"])
