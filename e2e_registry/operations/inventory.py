"""Lists tests and shows standards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from e2e_registry.config import Settings
from e2e_registry.errors import NoStandardError, UsageError
from e2e_registry.operations.standards import display_path, standard_paths
from e2e_registry.registration import Registration, find_test
from e2e_registry.series import Point, SeriesKey
from e2e_registry.standard import Standard


def list_tests(registrations: Sequence[Registration], settings: Settings) -> list[tuple[Registration, list[str]]]:
    """Return the tests with the platforms that they have standards for."""
    return [(registration, list(standard_paths(registration, settings))) for registration in registrations]


def listed_to_json(registration: Registration, platforms: Sequence[str]) -> dict[str, Any]:
    """Return the object that ``list --json`` prints for a test."""
    return {
        "test": registration.test_id,
        "suite": registration.suite,
        "profile": registration.profile,
        "est_time": registration.est_time,
        "timeout": registration.timeout,
        "labels": list(registration.labels),
        "nightly": registration.nightly,
        "disabled": registration.disabled,
        "num_cpus": registration.num_cpus,
        "num_gpus": registration.num_gpus,
        "metrics": list(registration.metrics),
        "observe": list(registration.observe),
        "argv": list(registration.recorded_argv),
        "standards": list(platforms),
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
    chosen = [path for slug, path in paths.items() if platform in (None, slug)]
    if not chosen:
        have = f"; it has {', '.join(paths)}" if paths else ""
        raise NoStandardError(
            f"{registration.test_id} has no standard{'' if platform is None else f' for {platform}'}{have}",
            hint=f"e2e-registry record --test {registration.test_id}",
        )
    return [Standard(path) for path in chosen]


def points_of(standard: Standard, metric: str) -> Iterator[tuple[SeriesKey, int, Point]]:
    """Stream the points of one metric: series, step and value.

    Raises:
        UsageError: The standard has no such metric.
    """
    if metric not in standard.metrics:
        known = ", ".join(sorted(standard.metrics))
        raise UsageError(f"{standard.path} has no metric {metric!r}", hint=f"it has {known}")
    for batch in standard.batches():
        if batch.key.metric == metric:
            for at in range(len(batch)):
                yield batch.key, int(batch.steps[at]), batch.point(at)


def standard_label(standard: Standard, settings: Settings) -> str:
    """Return how reports name a standard."""
    return display_path(standard.path.resolve(), settings)
