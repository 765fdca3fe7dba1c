"""``assert_matches_standard``: lets an ordinary test keep a standard beside itself.

Light to import, since the pytest plugin imports it in every pytest run; what it does stands in
:mod:`e2e_registry.operations.assertion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_registry.errors import RegistryError, UsageError

if TYPE_CHECKING:
    from e2e_registry.recording import MetricRecorder
    from e2e_registry.tolerance import Tolerance

_NO_TOLERANCES: Mapping[str, Tolerance] = {}


@dataclass(frozen=True, kw_only=True)
class RunningTest:
    """The test that runs in this process, as its plugin describes it.

    Attributes:
        file: The test file.
        names: Its name in the file: classes, then the function with its parameters.
        node_id: How to name it on pytest's command line.
        profile: The determinism profile that the process was asked to hold, if it was.
        must_record: Whether assertions write their standards.
        still_exists: Whether a test of these names is still in the file.
        used: The names that its assertions have used so far.
        changes: What its assertions have written, for people.
    """

    file: Path
    names: tuple[str, ...]
    node_id: str
    profile: str | None
    must_record: bool
    still_exists: Callable[[tuple[str, ...]], bool]
    used: set[str] = field(default_factory=set)
    changes: list[str] = field(default_factory=list)


# A plain global and no ContextVar: threads that a test starts are part of it, and a process runs one test at a time.
# The last is the one; those before it are tests that run pytest in their own process, as those of plugins do.
_running: list[RunningTest] = []


def enter(test: RunningTest) -> None:
    """Say which test runs now."""
    _running.append(test)


def leave() -> None:
    """Say that it has ended."""
    if _running:  # else its setup did not come that far
        _running.pop()


def assert_matches_standard(
    series: Mapping[str, Any] | MetricRecorder,
    name: str,
    tolerances: Mapping[str, Tolerance] = _NO_TOLERANCES,
    *,
    finite: bool = True,
    platform: str | None = None,
) -> None:
    """Compare series with the standard that this test keeps, bit for bit, or within stated tolerances.

    The standard is ``<folder of the test file>/<its stem>/<name>.<platform>.parquet``; ``pytest --record-assertions``
    writes it. Without one the assertion fails, and writes nothing beside the test.

    Args:
        series: What the fixture ``metric_recorder`` gathered; or metric name to its values: a list, or a NumPy array
            or torch tensor of shape ``(n,)``, for the steps 0 to n-1; a list of ``(step, value)`` pairs; or one
            value. Values keep their native dtype.
        name: Names the standard among those of the test file; letters, digits, ``_`` and ``-``.
        tolerances: Metric name or glob to :class:`~e2e_registry.Tolerance`; what none covers is strict.
        finite: Whether NaN and infinities are refused, in a standard as in a comparison.
        platform: States the platform rather than have it read off this process: ``"any"`` for what is the same on
            every machine, such as sample ids.

    Raises:
        AssertionError: The series differ from the standard, or there is none to compare with. The message is the
            registry's report.
        UsageError: There is no running test; or name, platform or a tolerance cannot be accepted.
        RecordingError: A value cannot be recorded.
        StorageError: The standard cannot be read or written.
    """
    __tracebackhide__ = True
    try:
        failure = _check(series, name, tolerances, is_finite=finite, platform=platform)
    except RegistryError as error:
        raise error.with_traceback(None) from None
    if failure is not None:
        raise AssertionError(failure)


def _check(
    series: Mapping[str, Any] | MetricRecorder,
    name: str,
    tolerances: Mapping[str, Tolerance],
    *,
    is_finite: bool,
    platform: str | None,
) -> str | None:
    """Return why the assertion fails; None if it holds, or has written the standard."""
    from e2e_registry.comparison import Action
    from e2e_registry.operations.assertion import Assertion, check_assertion, record_assertion
    from e2e_registry.reports.console import assessment_text
    from e2e_registry.reports.recording import change_text

    if not _running:
        raise UsageError(
            "assert_matches_standard() was called outside a test",
            hint="call it in a test that pytest runs, with the plugin e2e_registry",
        )
    test = _running[-1]
    if name in test.used:
        raise UsageError(
            f"assert_matches_standard() was called twice with the name {name!r} in one test",
            hint="give each its own name, or log the series of both to one metric_recorder",
        )
    asserted = Assertion.of(series, name, test, tolerances=tolerances, is_finite=is_finite, platform=platform)
    test.used.add(name)
    if test.must_record:
        change = record_assertion(asserted)
        remark = "" if change.action is Action.UNCHANGED or not asserted.remark else f"\n  warning: {asserted.remark}"
        test.changes.append(change_text(change) + remark)
        return None
    assessment = check_assertion(asserted)
    return None if assessment.verdict.is_success else assessment_text(assessment)
