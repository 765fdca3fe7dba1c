"""Checks tests: runs them, compares them with their standards, and says what is concluded."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

from e2e_registry.comparison import Assessment, TestVerdict, check_invariants, compare
from e2e_registry.comparison.assessment import Repeat, RepeatLabel
from e2e_registry.comparison.policy_change import policy_changes
from e2e_registry.config import Settings
from e2e_registry.environment import difference
from e2e_registry.errors import LostRunError, NotStartedError, RegistryError, StandardError
from e2e_registry.execution.capacity import Lease
from e2e_registry.execution.launcher import LOG_FILE, Cancellation
from e2e_registry.operations.machines import LocalMachine, Machine, skip_reason
from e2e_registry.operations.record import breaks_hint, first_disagreement
from e2e_registry.operations.running import ObservedRun
from e2e_registry.operations.standards import (
    check_policies_fit,
    display_path,
    nearest_platform,
    open_standard,
    pinned_metrics,
    standard_paths,
    write_candidate,
)
from e2e_registry.registration import Registration, coverage_faults, coverage_warnings, never_emitted_text
from e2e_registry.reports.values import listed
from e2e_registry.standard import Standard
from e2e_registry.tolerance import PolicyKind


def check_test(
    registration: Registration,
    settings: Settings,
    *,
    on_line: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
    machine: Machine | None = None,
    lease: Lease | None = None,
    repeats: int = 0,
) -> Assessment:
    """Run one test and judge it. Errors that concern this test alone become its verdict ``error``.

    Args:
        registration: The test.
        settings: The repository's settings.
        on_line: Called with each line the recipe prints.
        cancellation: Ends the run from another thread; the verdict is then ``incomplete``.
        machine: Where to run it; here by default.
        lease: What of the machine the test was given.
        repeats: How often a mismatching test is run again. That labels the mismatch and never changes the verdict.

    Raises:
        NotStartedError: It was called off before its recipe began.
    """
    machine = machine or LocalMachine()
    reason = skip_reason(registration, machine)
    if reason is not None:
        return Assessment(subject=registration.test_id, verdict=TestVerdict.SKIPPED, reasons=[reason])
    quarantine = quarantine_text(registration)
    run_once = functools.partial(
        machine.run, registration, settings, lease=lease, on_line=on_line, cancellation=cancellation
    )
    try:
        run = run_once()
        if _is_cancelled(cancellation) and run.is_interrupted:
            return dataclasses.replace(_interrupted(registration, run, settings), quarantine=quarantine)
        assessment = assess(registration, run, settings)
        if run.fault is None and not run.pins and run.platform_fault is None:
            candidate = display_path(write_candidate(registration, run), settings)
            assessment = dataclasses.replace(assessment, candidate=candidate)
        if assessment.verdict is TestVerdict.MISMATCH and repeats:
            assessment = _with_repeat(assessment, registration, run, settings, run_once, repeats)
        remark = machine.remark(registration)
        warnings = [*assessment.warnings, *([] if remark is None else [remark])]
        return dataclasses.replace(assessment, quarantine=quarantine, warnings=warnings)
    except NotStartedError:
        raise
    except LostRunError as error:
        reason = "the check was ended before the recipe was" if _is_cancelled(cancellation) else str(error)
        subject = registration.test_id
        return Assessment(subject=subject, verdict=TestVerdict.INCOMPLETE, reasons=[reason], quarantine=quarantine)
    except RegistryError as error:
        subject = registration.test_id
        return Assessment(subject=subject, verdict=TestVerdict.ERROR, error=error, quarantine=quarantine)


def _is_cancelled(cancellation: Cancellation | None) -> bool:
    return cancellation is not None and cancellation.is_cancelled


def _interrupted(registration: Registration, run: ObservedRun, settings: Settings) -> Assessment:
    return Assessment(
        subject=registration.test_id,
        verdict=TestVerdict.INCOMPLETE,
        reasons=["the check was ended before the recipe was"],
        duration_s=run.duration_s,
        run_path=display_path(run.path, settings),
    )


def _with_repeat(
    assessment: Assessment,
    registration: Registration,
    first: ObservedRun,
    settings: Settings,
    run_once: Callable[[], ObservedRun],
    repeats: int,
) -> Assessment:
    """Run a mismatching test again and label the mismatch. Whatever happens to those runs, the verdict stays."""
    try:
        repeat = _repeat(registration, first, settings, run_once, repeats)
    except RegistryError as error:
        warnings = [*assessment.warnings, f"whether it repeats is not known: {error}"]
        return dataclasses.replace(assessment, warnings=warnings)
    return dataclasses.replace(assessment, repeat=repeat)


def _repeat(
    registration: Registration,
    first: ObservedRun,
    settings: Settings,
    run_once: Callable[[], ObservedRun],
    repeats: int,
) -> Repeat | None:
    """Run a mismatching test again until a run disagrees with the first, or ``repeats`` runs agree.

    Returns:
        What that showed; None if somebody ended one of the runs.

    Raises:
        RegistryError: The test could not be run again, or the runs not be compared.
    """
    paths: list[str] = []
    for _ in range(repeats):
        run = run_once()
        if run.is_interrupted:
            return None
        paths.append(display_path(run.path, settings))
        reason = _comparability_fault(first, run)
        if reason is not None:
            return Repeat(label=RepeatLabel.NOT_COMPARABLE, run_paths=paths, reason=reason)
        reason = _disagreement(registration, first, run)
        if reason is not None:
            return Repeat(label=RepeatLabel.NONDETERMINISTIC, run_paths=paths, reason=reason)
    return Repeat(label=RepeatLabel.REPEATABLE, run_paths=paths)


def _comparability_fault(first: ObservedRun, run: ObservedRun) -> str | None:
    """Return why another run may give other numbers: on a cluster it may have come to another kind of node."""
    if run.platform_fault is not None:  # of a run that failed early, nobody knows where it was
        return None if run.problems else f"run again, its platform is unknown: {run.platform_fault}"
    if run.platform != first.platform:
        return f"run again, it was on {run.platform} rather than {first.platform}"
    return f"run again, it was not on the profile: {run.pins[0]}" if run.pins and not run.problems else None


def _disagreement(registration: Registration, first: ObservedRun, run: ObservedRun) -> str | None:
    """Return how a run differs from the first under the test's policies; None if it does not."""
    if run.problems:
        return f"run again, it ended otherwise: {run.problems[0]}"
    comparison = first_disagreement(registration, [first, run])
    if comparison is None:
        return None
    if comparison.first_divergence is None:
        return "run again, it logged other series"
    divergence = comparison.first_divergence
    return f"run again, it gave other numbers: first {divergence.key}, step {divergence.step}"


def quarantine_text(registration: Registration) -> str | None:
    """Return why and until when a failure does not block; None for a test that blocks today."""
    quarantine = registration.quarantine
    if quarantine is None or quarantine.blocks_on(datetime.datetime.now(datetime.UTC).date()):
        return None
    return f"until {quarantine.until.isoformat()}: {quarantine.reason}"


# ------------------------------------------------------------------------------------------------ assessing


def assess(registration: Registration, run: ObservedRun, settings: Settings) -> Assessment:
    """Judge a run of a test against the test's standard for the run's platform.

    Raises:
        RegistrationError: A tolerance does not fit what was recorded.
        StandardError: A standard cannot be read.
    """
    paths = standard_paths(registration, settings)
    verdict, reasons = _verdict_without_comparison(registration, run, paths)
    has_ended_well = run.fault is None
    if has_ended_well:
        check_policies_fit(registration, run)
    assessment = Assessment(
        subject=registration.test_id,
        verdict=TestVerdict.MATCH,
        platform=run.platform,
        breaks=check_invariants(run.batches(), registration.invariant),
        warnings=[*_warnings(run), *(coverage_warnings(registration, run.metrics) if has_ended_well else ())],
        duration_s=run.duration_s,
        run_path=display_path(run.path, settings),
        node=run.node,
        attempts=run.attempts,
    )
    assessment = _compared(registration, run, settings, assessment, verdict, paths)
    return _conclude(registration, run, settings, assessment, verdict, reasons, paths)


def _weaker_policies(registration: Registration, standard: Standard) -> Iterator[str]:
    """Say where the checkout would let pass what the standard was recorded to catch."""
    policies = registration.policies()
    now = {metric: policies.policy(metric) for metric in standard.metadata.policies}
    for change in policy_changes(standard.metadata.policies, now):
        if not change.is_weaker or not change.old.is_judged:
            continue
        if change.new.kind is PolicyKind.UNREGISTERED:
            yield f"{change.metric} is not registered any more; it is judged until the standard is recorded again"
        else:
            yield f"judged less strictly than the standard was recorded: {change.text()}"


def _verdict_without_comparison(
    registration: Registration, run: ObservedRun, platforms: Container[str]
) -> tuple[TestVerdict | None, list[str]]:
    """Return the verdict of a run that no comparison can be held against, and why; None if one can."""
    if run.fault is not None:
        return run.fault.verdict, list(run.fault.reasons)
    if run.platform_fault is not None:
        return TestVerdict.INCOMPARABLE, [f"the platform of the run is unknown: {run.platform_fault}"]
    if run.pins:
        return TestVerdict.INCOMPARABLE, [f"not on the profile {registration.profile!r}: {pin}" for pin in run.pins]
    return (None if run.platform in platforms else TestVerdict.NO_STANDARD), []


def _compared(
    registration: Registration,
    run: ObservedRun,
    settings: Settings,
    assessment: Assessment,
    verdict: TestVerdict | None,
    paths: Mapping[str, Path],
) -> Assessment:
    """Compare a run with the standard of its platform, or for information with the nearest.

    A comparison that decides nothing may fail, too, and replaces no verdict then. But a standard that cannot be read is
    an error while it is open whether there is one.
    """
    near = run.platform if run.platform in paths else nearest_platform(run.platform, paths)
    if near is None or run.recording is None or not run.recording.has_series:
        return assessment
    try:
        standard = open_standard(paths[near], near)
        policies = registration.policies(pinned_metrics(standard))
        comparison = compare(run.batches(), standard.batches(), policies=policies)
    except RegistryError as error:
        if verdict is None or (verdict is TestVerdict.NO_STANDARD and isinstance(error, StandardError)):
            raise
        shown = display_path(paths[near], settings)
        return dataclasses.replace(
            assessment, warnings=[*assessment.warnings, f"not compared with {shown}, for information: {error}"]
        )
    return dataclasses.replace(
        assessment,
        comparison=comparison,
        compared_with=display_path(standard.path, settings),
        environment=difference(standard.metadata.environment, run.environment),
        warnings=[*assessment.warnings, *(_weaker_policies(registration, standard) if near == run.platform else ())],
    )


def _conclude(
    registration: Registration,
    run: ObservedRun,
    settings: Settings,
    assessment: Assessment,
    verdict: TestVerdict | None,
    reasons: list[str],
    paths: Mapping[str, Path],
) -> Assessment:
    """Choose the verdict, and add what helps with it."""
    comparison, is_judged = assessment.comparison, verdict is None
    faults = coverage_faults(registration, run.metrics) if run.fault is None else []
    if run.fault is None and (assessment.breaks or faults):
        verdict = TestVerdict.MISMATCH
        shown = [] if comparison is None else [never_emitted_text(name) for name in comparison.never_emitted]
        reasons = [*reasons, *(fault for fault in faults if fault not in shown)]
    elif verdict is None and comparison is not None:
        verdict = TestVerdict.of(comparison.verdict)
    elif verdict is TestVerdict.NO_STANDARD and paths:
        verdict = TestVerdict.INCOMPARABLE
        reasons = [*reasons, f"no standard for {run.platform}; there is one for {', '.join(paths)}"]
    verdict = verdict or TestVerdict.NO_STANDARD
    is_elsewhere = run.platform_fault is None and not registration.requires_verdict(run.platform)
    if run.fault is None and is_elsewhere:
        verdict, is_judged = TestVerdict.SKIPPED, False
        reasons = [*reasons, f"no verdict is required on {run.platform}; the run is kept"]
    return dataclasses.replace(
        assessment,
        verdict=verdict,
        reasons=reasons,
        is_judged=is_judged,
        log_tail=run.log_tail() if verdict is TestVerdict.FAILED else None,
        next_steps=_next_steps(registration, verdict, run, settings, hint=_mismatch_hint(assessment, faults)),
    )


def _mismatch_hint(assessment: Assessment, faults: Sequence[str]) -> str | None:
    """Return what to do about a mismatch that ``record`` would refuse; None if it would not."""
    if faults:
        return "correct the recipe, or what the registration names"
    return breaks_hint(assessment.breaks) if assessment.breaks else None


def _warnings(run: ObservedRun) -> list[str]:
    warnings = [*run.warnings]
    if run.attempts > 1:
        warnings.append(f"Ray lost the node or the worker of an earlier attempt; this is attempt {run.attempts}")
    if run.left_out:
        warnings.append(f"too large to be brought back from the cluster: {', '.join(run.left_out[:5])}")
    left = (run.outcome or {}).get("left_behind") or []
    if left:
        shown = "; ".join(f"{child['pid']} {child['command']}" for child in left[:3])
        warnings.append(f"the recipe left {len(left)} process(es) behind, which were ended: {shown}")
    if run.unknown_writers:
        warnings.append(f"determinism state unknown: {listed(run.unknown_writers)}")
    return warnings


def _next_steps(
    registration: Registration, verdict: TestVerdict, run: ObservedRun, settings: Settings, *, hint: str | None
) -> list[str]:
    record = f"e2e-registry record --test {registration.test_id}"
    match verdict:
        case TestVerdict.MISMATCH if hint is not None:
            return [hint]
        case TestVerdict.MISMATCH:
            return [f"if the change is intended: {record}"]
        case TestVerdict.NO_STANDARD:
            return [f"{record}, then commit the standard"]
        case TestVerdict.INCOMPARABLE if run.platform_fault is not None:
            return []  # the reason says what to do, and record refuses such a run
        case TestVerdict.INCOMPARABLE if run.pins:
            return ["unset the variable, or state it in the registration's env= if this machine sets it for all"]
        case TestVerdict.INCOMPARABLE:
            return [f"{record}, to add a standard for {run.platform}"]
        case TestVerdict.FAILED | TestVerdict.INCOMPLETE:
            advice = None if run.fault is None else run.fault.hint
            read = f"read the whole output: {display_path(run.path / LOG_FILE, settings)}"
            return [read] if advice is None else [advice, read]
    return []
