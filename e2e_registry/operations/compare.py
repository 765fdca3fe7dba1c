"""Compares two recordings, or one with a test's standard; runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_registry.comparison import Assessment, Comparison, Presence, TestVerdict, check_invariants, compare
from e2e_registry.config import Settings
from e2e_registry.errors import NoStandardError, UsageError
from e2e_registry.series import SeriesBatch
from e2e_registry.standard import Standard
from e2e_registry.tolerance import Policies

if TYPE_CHECKING:
    from e2e_registry.registration import Registration


@dataclass(frozen=True)
class Side:
    """One side of a comparison, opened.

    Attributes:
        label: What it is called in reports.
        batches: Streams its series; may be called more than once.
        environment: Facts by group; empty for a bare file of series.
        standard: The standard, if the side is one.
        incomplete_reasons: Why it does not hold a whole run.
        warnings: What may be wrong with its series.
    """

    label: str
    batches: Callable[[], Iterator[SeriesBatch]]
    environment: Mapping[str, Mapping[str, Any]]
    standard: Standard | None = None
    incomplete_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def open_side(path: Path, settings: Settings) -> Side:
    """Open a run directory, a ``.jsonl`` file or a Parquet standard.

    Raises:
        UsageError: There is no such path.
        InvalidRunError: The recording is damaged or contradicts itself.
        StorageError: It cannot be read.
    """
    if path.suffix == ".parquet":
        standard = Standard(path)
        return Side(str(path), standard.batches, standard.metadata.environment, standard)
    # Runs are read by the launcher's floor, which a comparison of two standards need not load.
    from e2e_registry.operations.running import load_run

    run = load_run(path, settings)
    if run.invalid is not None:
        raise run.invalid
    reasons = run.recording.incomplete_reasons if run.recording is not None else ()
    if run.has_failed:
        reasons = (f"the recipe {(run.outcome or {}).get('explanation', 'failed')}", *reasons)
    return Side(str(path), run.batches, run.environment, None, reasons, run.warnings)


def compare_sides(got: Side, want: Side, *, policies: Policies | None = None) -> Assessment:
    """Compare two recordings: every series strictly, or against a standard its series, minus those it observes.

    Raises:
        UsageError: Neither side holds a series to judge.
        StorageError: A side cannot be read.
    """
    comparison = compare(got.batches(), want.batches(), policies=policies or _policies(want))
    if not comparison.num_judged:
        raise UsageError(f"there is nothing to compare: neither {got.label} nor {want.label} holds a judged series")
    verdict = TestVerdict.of(comparison.verdict)
    incomplete = [f"{side.label}: {reason}" for side in (got, want) for reason in side.incomplete_reasons]
    return Assessment(
        subject=f"{got.label} against {want.label}",
        verdict=TestVerdict.INCOMPLETE if incomplete else verdict,
        reasons=incomplete,
        comparison=comparison,
        is_judged=not incomplete,
        compared_with=want.label,
        environment=_environment_difference(want, got),
        warnings=[f"{side.label}: {warning}" for side in (got, want) for warning in side.warnings],
    )


def compare_with_test(run: Path, against: Path | None, test: str, settings: Settings) -> Assessment:
    """Compare a recording under a test's policies, against the test's standard unless told otherwise.

    Raises:
        NoStandardError: Nothing was named to compare with, and the run's platform is unknown or has no standard.
        UsageError: There is no such path or test.
        RegistrationError: The test cannot be accepted, or a tolerance does not fit what was recorded.
        InvalidRunError: The recording is damaged or contradicts itself.
        StorageError: A file cannot be read.
    """
    from e2e_registry.operations.check import assess
    from e2e_registry.operations.running import load_run
    from e2e_registry.operations.standards import open_standard, pinned_metrics
    from e2e_registry.registration import find_test

    registration = find_test(settings, test)
    if against is None and run.is_dir():
        return assess(registration, load_run(run, settings), settings)
    got = open_side(run, settings)
    if against is None:
        platform = None if got.standard is None else got.standard.metadata.platform
        if platform is None:
            raise NoStandardError(
                f"{run} does not say what platform it is of", hint="name the standard: --against PATH.parquet"
            )
        against = settings.standard_path(registration.stem, platform)
        if not against.exists():
            raise NoStandardError(f"{registration.test_id} has no standard for {platform}")
        open_standard(against, platform)
    want = open_side(against, settings)
    assessment = compare_sides(got, want, policies=registration.policies(pinned_metrics(want.standard)))
    breaks = check_invariants(got.batches(), registration.invariant)
    faults = [] if assessment.comparison is None else _coverage_faults(registration, assessment.comparison)
    verdict = TestVerdict.MISMATCH if (breaks or faults) and assessment.is_judged else assessment.verdict
    return dataclasses.replace(assessment, breaks=breaks, verdict=verdict, reasons=[*assessment.reasons, *faults])


def _coverage_faults(registration: Registration, comparison: Comparison) -> list[str]:
    """Return why the run of a comparison cannot stand behind a verdict; without what the comparison says itself."""
    from e2e_registry.registration import coverage_faults, never_emitted_text

    emitted = {result.key.metric for result in comparison.series if result.presence is not Presence.ONLY_WANT}
    shown = [never_emitted_text(name) for name in comparison.never_emitted]
    return [fault for fault in coverage_faults(registration, emitted) if fault not in shown]


def _environment_difference(want: Side, got: Side) -> Any:
    if not want.environment or not got.environment:
        return ()
    from e2e_registry.environment import difference

    return difference(want.environment, got.environment)


def _policies(want: Side) -> Policies:
    if want.standard is None or not want.standard.metadata.policies:
        return Policies(judge_all=True)
    metadata = want.standard.metadata
    return Policies(observe=sorted(metadata.observed), pinned=metadata.judged)
