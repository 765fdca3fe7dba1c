"""Finds the standard of a test for a platform, and turns runs into standards."""

from __future__ import annotations

import datetime
import glob
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e_registry.comparison.change import REPEAT_UNPROVEN
from e2e_registry.config import Settings
from e2e_registry.dtypes import Kind
from e2e_registry.environment import redact_command, without_machine_paths
from e2e_registry.errors import StandardError
from e2e_registry.operations.running import ObservedRun
from e2e_registry.registration import Registration, check_digest_policies, check_ulp_policies
from e2e_registry.series import SeriesBatch
from e2e_registry.standard import Standard, StandardMetadata, write_standard
from e2e_registry.tolerance import Policies, PolicyKind


def display_path(path: Path, settings: Settings) -> str:
    """Return a path as people and files should see it: relative to the root where it lies below it."""
    return path.relative_to(settings.root).as_posix() if path.is_relative_to(settings.root) else str(path)


def standard_paths(registration: Registration, settings: Settings) -> dict[str, Path]:
    """Return the existing standards of a test by platform slug, sorted."""
    return paths_by_platform(settings.standards_dir, registration.stem)


def paths_by_platform(folder: Path, name: str) -> dict[str, Path]:
    """Return the standards of a name in a folder by platform slug, sorted."""
    prefix, suffix = f"{name}.", ".parquet"
    files = sorted(folder.glob(f"{glob.escape(prefix)}*{suffix}"))
    return {file.name[len(prefix) : -len(suffix)]: file for file in files}


def open_standard(path: Path, platform: str) -> Standard:
    """Open the standard that a path names for a platform.

    Raises:
        StandardError: It cannot be read, or it is of another platform than its name says: a file that was renamed or
            copied would be judged by bits that need not be equal.
    """
    standard = Standard(path)
    recorded = standard.metadata.platform
    if recorded != platform:
        raise StandardError(
            f"its name says {platform}, and it was recorded on {recorded}",
            where=path,
            hint=f"give it back its name, or delete it; a standard for {platform} is recorded there",
        )
    return standard


def nearest_platform(platform: str, available: Mapping[str, Path]) -> str | None:
    """Return the available platform whose slug shares the longest beginning with ``platform``, in whole words."""

    def shared(other: str) -> int:
        pairs = zip(platform.split("-"), other.split("-"), strict=False)
        count = 0
        for mine, theirs in pairs:
            if mine != theirs:
                break
            count += 1
        return count

    return max(sorted(available), key=shared, default=None)


def pinned_metrics(standard: Standard | None) -> frozenset[str]:
    """Return the names that a standard pins, those that it judges; empty without one.

    What was recorded as observed was never judged, and does not become so when its name leaves the registration.
    """
    return frozenset() if standard is None else standard.metadata.judged


def check_policies_fit(registration: Registration, run: ObservedRun) -> None:
    """Refuse tolerances that a metric's recorded dtype cannot have.

    Raises:
        RegistrationError: A tolerance on a digest, or ``ulp`` on whole numbers.
    """
    if run.recording is None:
        return
    kinds = {key.metric: {dtype.kind for dtype in dtypes} for key, dtypes in run.recording.dtypes.items()}
    check_digest_policies(registration, [name for name, kind in kinds.items() if Kind.DIGEST in kind])
    check_ulp_policies(registration, [name for name, kind in kinds.items() if kind & {Kind.INTEGER, Kind.BOOL}])


def kept_batches(run: ObservedRun, policies: Policies) -> Iterator[SeriesBatch]:
    """Stream what a standard of the run holds: its registered and observed series, and nothing else."""
    for batch in run.batches():
        if policies.policy(batch.key.metric).kind is not PolicyKind.UNREGISTERED:
            yield batch


def metadata_of(
    registration: Registration, run: ObservedRun, *, kind: str, agreed: int | None, reason: str | None
) -> StandardMetadata:
    """Return what a standard made of ``run`` says about itself.

    Args:
        registration: The test; its globs are pinned to the names that the run emitted.
        run: The run whose rows are written.
        kind: See :class:`StandardMetadata`.
        agreed: How many runs agreed; None for a run that nothing was compared with.
        reason: Why it was recorded, in the author's words.
    """
    policies = registration.policies()
    names = () if run.recording is None else run.recording.metrics
    return StandardMetadata(
        test=registration.test_id,
        platform=run.platform,
        kind=kind,
        policies={
            name: policies.policy(name).to_json()
            for name in names
            if policies.policy(name).kind is not PolicyKind.UNREGISTERED
        },
        environment=run.environment,
        recorded=recorded_facts(run.environment, ["e2e-registry", *sys.argv[1:]], agreed=agreed, reason=reason),
    )


def recorded_facts(
    environment: Mapping[str, Mapping[str, Any]], command: Sequence[str], *, agreed: int | None, reason: str | None
) -> dict[str, Any]:
    """Return what a standard says of its recording.

    Args:
        environment: The facts of the run by group.
        command: What recorded it; secrets and paths of this machine are masked.
        agreed: How many runs agreed; None for a run that nothing was compared with.
        reason: Why it was recorded, in the author's words.
    """
    source = environment.get("source", {})
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [without_machine_paths(word) for word in redact_command(command)],
        "head": source.get("head"),
        "dirty": source.get("dirty"),
        "source_tree": source.get("source_tree"),
        "head_source_tree": source.get("head_source_tree"),
        "runs_agreed": REPEAT_UNPROVEN if agreed is None or agreed < 2 else agreed,
        "reason": reason,
    }


def write_candidate(registration: Registration, run: ObservedRun) -> Path:
    """Write the run as a ready-to-commit standard into its own run directory."""
    path = run.path / f"{registration.stem}.{run.platform}.parquet"
    metadata = metadata_of(registration, run, kind="run", agreed=None, reason=None)
    write_standard(path, kept_batches(run, registration.policies()), metadata)
    return path
