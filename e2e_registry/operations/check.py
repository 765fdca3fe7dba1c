"""Checks tests: runs them, compares them with their standards, and says what is concluded."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Sequence

from e2e_registry.comparison import Assessment, TestVerdict, check_invariants, compare
from e2e_registry.comparison.assessment import Repeat, RepeatLabel
from e2e_registry.config import Settings
from e2e_registry.environment import difference
from e2e_registry.errors import LostRunError, RegistryError
from e2e_registry.execution.capacity import Lease
from e2e_registry.execution.launcher import LOG_FILE, Cancellation
from e2e_registry.operations.machines import LocalMachine, Machine, skip_reason
from e2e_registry.operations.record import first_disagreement
from e2e_registry.operations.running import ObservedRun
from e2e_registry.operations.standards import (
    check_policies_fit,
    display_path,
    nearest_platform,
    pinned_metrics,
    standard_paths,
    write_candidate,
)
from e2e_registry.registration import Registration
from e2e_registry.standard import Standard


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
        if not run.problems and not run.pins:
            candidate = display_path(write_candidate(registration, run), settings)
            assessment = dataclasses.replace(assessment, candidate=candidate)
        if assessment.verdict is TestVerdict.MISMATCH and repeats:
            assessment = dataclasses.replace(assessment, repeat=_repeat(registration, run, settings, run_once, repeats))
        remark = machine.remark(registration)
        warnings = [*assessment.warnings, *([] if remark is None else [remark])]
        return dataclasses.replace(assessment, quarantine=quarantine, warnings=warnings)
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
    """
    paths: list[str] = []
    for _ in range(repeats):
        run = run_once()
        if run.is_interrupted:
            return None
        paths.append(display_path(run.path, settings))
        disagreement = None if run.problems else first_disagreement(registration, [first, run])
        if run.problems:
            reason = f"run again, it ended otherwise: {run.problems[0]}"
        elif disagreement is not None and disagreement.first_divergence is not None:
            divergence = disagreement.first_divergence
            reason = f"run again, it gave other numbers: first {divergence.key}, step {divergence.step}"
        elif disagreement is not None:
            reason = "run again, it logged other series"
        else:
            continue
        return Repeat(label=RepeatLabel.NONDETERMINISTIC, run_paths=paths, reason=reason)
    return Repeat(label=RepeatLabel.REPEATABLE, run_paths=paths)


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
    check_policies_fit(registration, run)
    paths = standard_paths(registration, settings)
    near = run.platform if run.platform in paths else nearest_platform(run.platform, paths)
    standard = None if near is None else Standard(paths[near])
    verdict, reasons = _verdict_without_comparison(registration, run, is_same_platform=near == run.platform)
    assessment = Assessment(
        subject=registration.test_id,
        verdict=TestVerdict.MATCH,
        platform=run.platform,
        breaks=check_invariants(run.batches(), registration.invariant),
        warnings=_warnings(run),
        duration_s=run.duration_s,
        run_path=display_path(run.path, settings),
        node=run.node,
        attempts=run.attempts,
    )
    if standard is not None and run.recording is not None and run.recording.has_series:
        policies = registration.policies(pinned_metrics(standard))
        comparison = compare(run.batches(), standard.batches(), policies=policies)
        assessment = dataclasses.replace(
            assessment,
            comparison=comparison,
            compared_with=display_path(standard.path, settings),
            environment=difference(standard.metadata.environment, run.environment),
        )
    return _conclude(registration, run, settings, assessment, verdict, reasons)


def _verdict_without_comparison(
    registration: Registration, run: ObservedRun, *, is_same_platform: bool
) -> tuple[TestVerdict | None, list[str]]:
    """Return the verdict of a run that no comparison can be held against, and why; None if one can."""
    if run.has_failed:
        return TestVerdict.FAILED, [f"the recipe {(run.outcome or {}).get('explanation', 'failed')}"]
    if run.invalid is not None:
        return TestVerdict.INVALID, [str(run.invalid)]
    if run.recording is not None and not run.recording.is_complete:
        return TestVerdict.INCOMPLETE, list(run.recording.incomplete_reasons)
    if run.recording is None or not run.recording.has_series:
        return TestVerdict.FAILED, ["the recipe exited with code 0 and logged nothing: is the recorder opened?"]
    if run.pins:
        return TestVerdict.INCOMPARABLE, [f"not on the profile {registration.profile!r}: {pin}" for pin in run.pins]
    if not is_same_platform:
        return TestVerdict.NO_STANDARD, []
    return None, []


def _conclude(
    registration: Registration,
    run: ObservedRun,
    settings: Settings,
    assessment: Assessment,
    verdict: TestVerdict | None,
    reasons: list[str],
) -> Assessment:
    """Choose the verdict, and add what helps with it."""
    comparison = assessment.comparison
    never_emitted = _never_emitted(registration, run) if comparison is None else comparison.never_emitted
    is_run_usable = verdict in (None, TestVerdict.INCOMPARABLE, TestVerdict.NO_STANDARD)
    if is_run_usable and (assessment.breaks or never_emitted):
        if comparison is None:
            reasons += [f"{name}: registered, but no metric of the run answers to it" for name in never_emitted]
        is_judged = verdict is None
        verdict = TestVerdict.MISMATCH
    else:
        is_judged = verdict is None
    if verdict is None and comparison is not None:
        verdict = TestVerdict.of(comparison.verdict)
    if verdict is TestVerdict.NO_STANDARD and comparison is not None:
        verdict = TestVerdict.INCOMPARABLE
        reasons = [*reasons, f"no standard for {run.platform}; there is one for {_platforms(registration, settings)}"]
    verdict = verdict or TestVerdict.NO_STANDARD
    if is_run_usable and not registration.requires_verdict(run.platform):
        verdict, is_judged = TestVerdict.SKIPPED, False
        reasons = [*reasons, f"no verdict is required on {run.platform}; the run is kept"]
    return dataclasses.replace(
        assessment,
        verdict=verdict,
        reasons=reasons,
        is_judged=is_judged,
        log_tail=run.log_tail() if verdict is TestVerdict.FAILED else None,
        next_steps=_next_steps(registration, verdict, run, settings),
    )


def _never_emitted(registration: Registration, run: ObservedRun) -> Sequence[str]:
    names = frozenset(() if run.recording is None else run.recording.metrics)
    return registration.policies().never_emitted(names)


def _platforms(registration: Registration, settings: Settings) -> str:
    return ", ".join(standard_paths(registration, settings))


def _warnings(run: ObservedRun) -> list[str]:
    warnings = []
    if run.attempts > 1:
        warnings.append(f"Ray lost the node or the worker of an earlier attempt; this is attempt {run.attempts}")
    if run.left_out:
        warnings.append(f"too large to be brought back from the cluster: {', '.join(run.left_out[:5])}")
    left = (run.outcome or {}).get("left_behind") or []
    if left:
        shown = "; ".join(f"{child['pid']} {child['command']}" for child in left[:3])
        warnings.append(f"the recipe left {len(left)} process(es) behind, which were ended: {shown}")
    if run.unknown_writers:
        warnings.append(f"determinism state unknown: {', '.join(run.unknown_writers)}")
    return [*warnings, *run.lax_switches]


def _next_steps(registration: Registration, verdict: TestVerdict, run: ObservedRun, settings: Settings) -> list[str]:
    record = f"e2e-registry record --test {registration.test_id}"
    match verdict:
        case TestVerdict.MISMATCH:
            return [f"if the change is intended: {record}"]
        case TestVerdict.NO_STANDARD:
            return [f"{record}, then commit the standard"]
        case TestVerdict.INCOMPARABLE if run.pins:
            return ["unset the variable, or state it in the registration's env= if this machine sets it for all"]
        case TestVerdict.INCOMPARABLE:
            return [f"{record}, to add a standard for {run.platform}"]
        case TestVerdict.FAILED | TestVerdict.INCOMPLETE:
            return [f"read the whole output: {display_path(run.path / LOG_FILE, settings)}"]
    return []
