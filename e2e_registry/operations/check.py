"""Checks tests: runs them, compares them with their standards, and says what is concluded."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from e2e_registry.comparison import Assessment, TestVerdict, check_invariants, compare
from e2e_registry.config import Settings
from e2e_registry.environment import difference
from e2e_registry.errors import RegistryError
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.operations.running import ObservedRun, run_test
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
from e2e_registry.storage import write_json

RESULTS_FORMAT = 1
RESULTS_FILE = "results.json"


def skip_reason(registration: Registration) -> str | None:
    """Return why a test cannot run here, or None."""
    if registration.disabled:
        return f"disabled: {registration.disabled}"
    if registration.num_gpus > _count_gpus():
        return f"needs {registration.num_gpus} GPU(s), and {_count_gpus()} are here"
    return None


def _count_gpus() -> int:
    """Count CUDA devices without starting CUDA: the kernel driver's device nodes."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def check_test(
    registration: Registration,
    settings: Settings,
    *,
    on_line: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
) -> Assessment:
    """Run one test and judge it. Errors that concern this test alone become its verdict ``error``."""
    reason = skip_reason(registration)
    if reason is not None:
        return Assessment(subject=registration.test_id, verdict=TestVerdict.SKIPPED, reasons=[reason])
    quarantine = quarantine_text(registration)
    try:
        run = run_test(registration, settings, on_line=on_line, cancellation=cancellation)
        assessment = assess(registration, run, settings)
        if not run.problems and not run.pins:
            candidate = display_path(write_candidate(registration, run), settings)
            assessment = dataclasses.replace(assessment, candidate=candidate)
        return dataclasses.replace(assessment, quarantine=quarantine)
    except RegistryError as error:
        subject = registration.test_id
        return Assessment(subject=subject, verdict=TestVerdict.ERROR, error=error, quarantine=quarantine)


def quarantine_text(registration: Registration) -> str | None:
    """Return why and until when a failure does not block; None for a test that blocks today."""
    quarantine = registration.quarantine
    if quarantine is None or quarantine.blocks_on(datetime.datetime.now(datetime.UTC).date()):
        return None
    return f"until {quarantine.until.isoformat()}: {quarantine.reason}"


def write_results(assessments: Sequence[Assessment] | Sequence[dict[str, Any]], settings: Settings) -> Path:
    """Write ``results.json`` of a check into the run folder and return its path."""
    path = settings.run_dir / RESULTS_FILE
    tests = [assessment if isinstance(assessment, dict) else assessment.to_json() for assessment in assessments]
    write_json(path, {"format": RESULTS_FORMAT, "tests": tests})
    return path


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
        next_steps=_next_steps(registration, verdict, run),
    )


def _never_emitted(registration: Registration, run: ObservedRun) -> Sequence[str]:
    names = frozenset(() if run.recording is None else run.recording.metrics)
    return registration.policies().never_emitted(names)


def _platforms(registration: Registration, settings: Settings) -> str:
    return ", ".join(standard_paths(registration, settings))


def _warnings(run: ObservedRun) -> list[str]:
    warnings = []
    left = (run.outcome or {}).get("left_behind") or []
    if left:
        shown = "; ".join(f"{child['pid']} {child['command']}" for child in left[:3])
        warnings.append(f"the recipe left {len(left)} process(es) behind, which were ended: {shown}")
    if run.unknown_writers:
        warnings.append(f"determinism state unknown: {', '.join(run.unknown_writers)}")
    return warnings


def _next_steps(registration: Registration, verdict: TestVerdict, run: ObservedRun) -> list[str]:
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
            return [f"read the whole output: {run.path.name}/output.log"]
    return []
