"""Lists tests and shows standards."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.config import Settings
from e2e_registry.errors import NoStandardError, UsageError
from e2e_registry.operations.run_facts import duration_s
from e2e_registry.operations.running import read_facts
from e2e_registry.operations.standards import display_path, open_standard, standard_paths
from e2e_registry.registration import Registration, find_test
from e2e_registry.reports.values import listed
from e2e_registry.series import Point, SeriesKey
from e2e_registry.standard import Standard

#: Of the kept runs of a test, as many of the newest say how long it takes.
_MEASURED_RUNS = 5


@dataclass(frozen=True, slots=True)
class MeasuredDuration:
    """How long a test took here, by its newest kept runs that succeeded.

    Attributes:
        runs: How many runs that were.
        median_s: Their median, seconds.
    """

    runs: int
    median_s: float


@dataclass(frozen=True, slots=True)
class ListedTest:
    """A test as ``list`` shows it.

    Attributes:
        registration: The test.
        platforms: The platforms that it has standards for.
        measured: How long it took; None without a kept run that succeeded.
    """

    registration: Registration
    platforms: tuple[str, ...]
    measured: MeasuredDuration | None


def list_tests(registrations: Sequence[Registration], settings: Settings) -> list[ListedTest]:
    """Return the tests with the platforms that they have standards for, and how long they took."""
    return [
        ListedTest(
            registration, tuple(standard_paths(registration, settings)), measured_duration(registration, settings)
        )
        for registration in registrations
    ]


def measured_duration(registration: Registration, settings: Settings) -> MeasuredDuration | None:
    """Return how long a test's recipe took, by the runs that are kept: no other record of it is needed."""
    durations: list[float] = []
    folder = settings.run_dir / registration.stem
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        facts = read_facts(path)
        outcome, is_ours = facts.get("outcome") or {}, (facts.get("recipe") or {}).get("test") == registration.test_id
        duration = duration_s(facts)
        if is_ours and outcome.get("status") == "exited" and outcome.get("exit_code") == 0 and duration is not None:
            durations.append(duration)
        if len(durations) == _MEASURED_RUNS:
            break
    return MeasuredDuration(len(durations), statistics.median(durations)) if durations else None


def listed_to_json(listed: ListedTest) -> dict[str, Any]:
    """Return the object that ``list --json`` prints for a test."""
    registration, measured = listed.registration, listed.measured
    return {
        "test": registration.test_id,
        "suite": registration.suite,
        "profile": registration.profile,
        "est_time": registration.est_time,
        "measured": None if measured is None else {"runs": measured.runs, "median_s": measured.median_s},
        "timeout": registration.timeout,
        "labels": list(registration.labels),
        "nightly": registration.nightly,
        "disabled": registration.disabled,
        "num_cpus": registration.num_cpus,
        "num_gpus": registration.num_gpus,
        "metrics": list(registration.metrics),
        "observe": list(registration.observe),
        "argv": list(registration.recorded_argv),
        "standards": list(listed.platforms),
    }


def standards_of(target: str, settings: Settings, *, platform: str | None = None) -> list[Standard]:
    """Open the standards that ``show`` was asked for.

    Args:
        target: A Parquet file, or a test by path or id.
        settings: The repository's settings.
        platform: Of a test's standards, the one to show; all of them without.

    Raises:
        NoStandardError: The test has none (for that platform).
        StandardError: A standard cannot be read.
        UsageError: There is no such test.
    """
    if target.endswith(".parquet"):
        return [Standard(Path(target))]
    registration = find_test(settings, target)
    paths = standard_paths(registration, settings)
    chosen = {slug: path for slug, path in paths.items() if platform in (None, slug)}
    if not chosen:
        have = f"; it has {', '.join(paths)}" if paths else ""
        raise NoStandardError(
            f"{registration.test_id} has no standard{'' if platform is None else f' for {platform}'}{have}",
            hint=f"e2e-registry record --test {registration.test_id}",
        )
    return [open_standard(path, slug) for slug, path in chosen.items()]


def points_of(standard: Standard, metric: str) -> Iterator[tuple[SeriesKey, int, Point]]:
    """Stream the points of one metric: series, step and value.

    Raises:
        UsageError: The standard has no such metric.
    """
    if metric not in standard.metrics:
        known = listed(sorted(standard.metrics))
        raise UsageError(f"{standard.path} has no metric {metric!r}", hint=f"it has {known}")
    for batch in standard.batches():
        if batch.key.metric == metric:
            for at in range(len(batch)):
                yield batch.key, int(batch.steps[at]), batch.point(at)


def standard_label(standard: Standard, settings: Settings) -> str:
    """Return how reports name a standard."""
    return display_path(standard.path.resolve(), settings)
