"""Standards that ordinary tests keep beside themselves: compared with, and written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_registry.comparison import (
    Assessment,
    InvariantBreak,
    StandardChange,
    TestVerdict,
    Verdict,
    check_invariants,
    compare,
)
from e2e_registry.config import SLUG_RULE, Settings, did_you_mean, is_slug, load_settings
from e2e_registry.determinism.holding import Holding, holding_profile
from e2e_registry.determinism.state import read_state
from e2e_registry.environment import (
    compose,
    difference,
    launch_facts,
    platform_facts,
    platform_slug,
    shared_software_equal,
    software_facts,
)
from e2e_registry.errors import RefusedError, StorageError, UsageError
from e2e_registry.operations.record import breaks_error, replace_if_changed, with_old_rows
from e2e_registry.operations.standards import (
    display_path,
    nearest_platform,
    open_standard,
    paths_by_platform,
    pinned_metrics,
    recorded_facts,
)
from e2e_registry.recording import MetricRecorder, RunRecording, gather
from e2e_registry.standard import Standard, StandardMetadata, write_standard
from e2e_registry.tolerance import Invariant, Policies, Tolerance, matches

if TYPE_CHECKING:
    from e2e_registry.assertion import RunningTest

KIND = "assertion"

#: Folder of the run folder that keeps what a failing assertion would have recorded. No test file has this stem.
CANDIDATES = "assertions"

#: Joins the platform of a process that holds no profile: its bits are less than reproducible.
UNPINNED = "unpinned"

_OVERRIDDEN = "unset what overrides the profile"
_NOT_FINITE = "if NaN or infinity is right there, pass finite=False"

# No dot: `<name>.<platform>.parquet` must be read one way, and a platform may hold dots.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


# ------------------------------------------------------------------------------------------------ the assertion


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """What a test asserts: that series are those of the standard it keeps.

    Attributes:
        test: The test that asserts.
        name: Names the standard among those of the test file.
        settings: Of the repository of the test file.
        recording: The series.
        tolerances: Metric name or glob to tolerance.
        is_finite: Whether NaN and infinities are refused.
        stated_platform: The platform, where the test states it.
    """

    test: RunningTest
    name: str
    settings: Settings
    recording: RunRecording
    tolerances: Mapping[str, Tolerance]
    is_finite: bool
    stated_platform: str | None

    @staticmethod
    def of(
        series: Mapping[str, Any] | MetricRecorder,
        name: str,
        test: RunningTest,
        *,
        tolerances: Mapping[str, Tolerance],
        is_finite: bool,
        platform: str | None,
    ) -> Assertion:
        """Check what a test gave, and gather its series.

        Raises:
            UsageError: Name, platform or a tolerance cannot be accepted.
            RecordingError: A value cannot be recorded.
            StorageError: A file cannot be written or read.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a standard", hint="use letters, digits, '_' and '-' only")
        if platform is not None and not (isinstance(platform, str) and is_slug(platform)):
            raise UsageError(f"{platform!r} is not a platform slug", hint=f"a slug holds {SLUG_RULE}")
        for key, tolerance in tolerances.items():
            if not isinstance(tolerance, Tolerance):
                raise UsageError(
                    f"tolerances[{key!r}] is {tolerance!r}", hint='write Tolerance(atol=..., reason="...")'
                )
        return Assertion(
            test=test,
            name=name,
            settings=load_settings(test.file),
            recording=gather(series),
            tolerances=tolerances,
            is_finite=is_finite,
            stated_platform=platform,
        )

    @property
    def folder(self) -> Path:
        """Where the standards of the test file are."""
        return self.test.file.parent / self.test.file.stem

    @property
    def path(self) -> Path:
        """The standard for this process's platform."""
        return self.folder / f"{self.name}.{self.platform}.parquet"

    @property
    def candidate_path(self) -> Path:
        """Where the run folder keeps the series when the assertion fails."""
        folder = display_path(self.folder.resolve(), self.settings).lstrip("/")
        return self.settings.run_dir / CANDIDATES / folder / self.path.name

    @property
    def subject(self) -> str:
        """How reports name the assertion."""
        return f"{self.test_id} [{self.name}]"

    @property
    def test_id(self) -> str:
        """The test's file from the root, and its name in it; the same under every way to run it."""
        return "::".join([display_path(self.test.file.resolve(), self.settings), *self.test.names])

    @cached_property
    def state(self) -> dict[str, Any]:
        """The determinism state of this process."""
        return read_state()

    @cached_property
    def holding(self) -> Holding:
        """The profile that this process holds."""
        return holding_profile(self.state, self.test.profile)

    @property
    def faults(self) -> list[str]:
        """Why nothing can be compared, and nothing recorded."""
        return [] if self.stated_platform is not None else self.holding.faults

    @property
    def remark(self) -> str | None:
        """What should be known of bits of a process that holds no profile."""
        if self.stated_platform is not None or self.holding.is_held or self.holding.is_asked:
            return None
        pins = ", ".join(pin.name for pin in self.holding.pins)
        return (
            f"this process holds no determinism profile, so its bits may not repeat (not pinned: {pins}); "
            "pytest --determinism-profile NAME holds one"
        )

    @cached_property
    def platform(self) -> str:
        """The slug that the bits belong to."""
        if self.stated_platform is not None:
            return self.stated_platform
        tags = [tag for tag in (None if self.holding.is_held else UNPINNED, self.settings.platform_tag) if tag]
        return platform_slug(
            self.holding.profile,
            platform=platform_facts(self.state),
            software={**_installed(self.settings.platform_axes), **software_facts(self.state)},
            axes=self.settings.platform_axes,
            tag="-".join(tags) or None,
        )

    @cached_property
    def environment(self) -> dict[str, dict[str, Any]]:
        """The facts of this process by group."""
        profile = self.holding.profile if self.holding.is_held else None
        facts = {
            **_launch_facts(self.settings.root, self.settings.standards_dir, self.settings.run_dir),
            "recipe": {"test": self.test_id},
            "profile": profile,
        }
        return compose(writer_states={("main", 0): self.state}, launch_facts=facts, root=self.settings.root)

    @property
    def owner_conflict(self) -> str | None:
        """The test that recorded the standard and is still there, if that is another one."""
        if self.old is None or self.old.metadata.test in (None, self.test_id):
            return None
        owner = str(self.old.metadata.test)
        file, *names = owner.split("::")
        is_here = file == self.test_id.split("::")[0]
        return owner if is_here and self.test.still_exists(tuple(names)) else None

    @cached_property
    def old(self) -> Standard | None:
        """The standard that is there for this platform."""
        return open_standard(self.path, self.platform) if self.path.exists() else None

    def other_standards(self) -> dict[str, Path]:
        """Return the standards of this name by platform."""
        return paths_by_platform(self.folder, self.name)

    def policies(self, standard: Standard | None) -> Policies:
        """Return how the series are judged: every one of them, and those that the standard pins.

        Raises:
            UsageError: A tolerance is for no series.
        """
        pinned = pinned_metrics(standard)
        known = {*self.recording.metrics, *pinned}
        for key in self.tolerances:
            if not any(matches(metric, key) for metric in known):
                raise UsageError(f"tolerances[{key!r}] is for no series", hint=did_you_mean(key, known))
        return Policies(("*",), self.tolerances, pinned=pinned)

    def metadata(self, policies: Policies) -> StandardMetadata:
        """Return what a standard of the series says about itself."""
        command = ["pytest", self.test.node_id, "--record-assertions"]
        return StandardMetadata(
            test=self.test_id,
            platform=self.platform,
            kind=KIND,
            policies={metric: policies.policy(metric).to_json() for metric in self.recording.metrics},
            environment=self.environment,
            recorded=recorded_facts(self.environment, command, agreed=None, reason=None),
        )

    def breaks(self) -> list[InvariantBreak]:
        """Return the values that are not finite, unless they are permitted."""
        return check_invariants(self.recording.batches(), lambda metric: Invariant(finite=self.is_finite))


def _installed(axes: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages among platform axes.

    What a process has loaded depends on the tests that ran in it before; the platform must not.
    """
    versions = {}
    for axis in axes:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[axis] = importlib.metadata.version(axis)
    return versions


@functools.cache
def _launch_facts(root: Path, *excluded: Path) -> dict[str, Any]:
    """Return the facts of the checkout, once a session: git reads all of it."""
    return launch_facts(root, exclude=excluded)


# ------------------------------------------------------------------------------------------------ comparing


def check_assertion(assertion: Assertion) -> Assessment:
    """Compare the series with the standard; keep them as a candidate in the run folder if that does not go well.

    Raises:
        UsageError: A tolerance is for no series, or does not fit its dtype.
        StandardError: A standard cannot be read.
    """
    others = assertion.other_standards()
    near = assertion.platform if assertion.old is not None else nearest_platform(assertion.platform, others)
    standard = assertion.old if assertion.old is not None or near is None else open_standard(others[near], near)
    policies = assertion.policies(standard)
    comparison = None
    if standard is not None:
        comparison = compare(assertion.recording.batches(), standard.batches(), policies=policies)
    breaks = assertion.breaks()
    faults = assertion.faults
    is_judged = assertion.old is not None and not faults
    if faults:
        verdict = TestVerdict.INCOMPARABLE
    elif comparison is None:
        verdict = TestVerdict.NO_STANDARD
    elif not is_judged:
        verdict = TestVerdict.INCOMPARABLE
    else:
        verdict = TestVerdict.of(comparison.verdict)
    if breaks and not faults:
        verdict = TestVerdict.MISMATCH
    assessment = Assessment(
        subject=assertion.subject,
        verdict=verdict,
        platform=assertion.platform,
        reasons=faults,
        comparison=comparison,
        is_judged=is_judged,
        compared_with=None if standard is None else display_path(standard.path.resolve(), assertion.settings),
        breaks=breaks,
    )
    return assessment if verdict.is_success else _explained(assertion, assessment, standard, policies)


def _explained(
    assertion: Assertion, assessment: Assessment, standard: Standard | None, policies: Policies
) -> Assessment:
    """Add what helps with an assertion that fails."""
    reasons, warnings, kept = list(assessment.reasons), [], None
    if assessment.comparison is None and not assertion.faults:
        reasons.append(f"there is no {display_path(assertion.path.resolve(), assertion.settings)}")
    elif assessment.verdict is TestVerdict.INCOMPARABLE and not reasons:
        reasons.append(
            f"no standard for {assertion.platform}; there is one for {', '.join(assertion.other_standards())}"
        )
    if assertion.remark is not None:
        warnings.append(assertion.remark)
    if assertion.owner_conflict is not None:
        warnings.append(f"the standard was recorded by {assertion.owner_conflict}: do two tests share the name?")
    try:
        write_standard(assertion.candidate_path, assertion.recording.batches(), assertion.metadata(policies))
        kept = display_path(assertion.candidate_path, assertion.settings)
    except StorageError as error:  # such as a checkout that cannot be written
        warnings.append(f"the series were not kept: {error}")
    return dataclasses.replace(
        assessment,
        reasons=reasons,
        warnings=warnings,
        environment=() if standard is None else difference(standard.metadata.environment, assertion.environment),
        run_path=kept,
        candidate=kept,
        next_steps=_next_steps(assertion, assessment),
    )


def _next_steps(assertion: Assertion, assessment: Assessment) -> list[str]:
    """Return what to do; recording is no way out of what it would refuse."""
    if assertion.faults:
        return [_OVERRIDDEN]
    steps = [f"correct what is not finite; {_NOT_FINITE}"] if assessment.breaks else []
    if not assessment.breaks or not assessment.is_judged:
        aim = "if the change is intended" if assessment.is_judged else "then record it" if steps else "record it"
        steps.append(f"{aim}: pytest {shlex.quote(assertion.test.node_id)} --record-assertions")
    return steps


# ------------------------------------------------------------------------------------------------ recording


def record_assertion(assertion: Assertion) -> StandardChange:
    """Write the standard, unless that would change nothing that counts.

    Raises:
        RefusedError: The standard is another test's, or a pin of the profile asked for does not hold.
        MismatchError: A value is not finite.
        UsageError: A tolerance is for no series, or does not fit its dtype.
        StorageError: The old standard cannot be read, or the new one not written.
    """
    if assertion.owner_conflict is not None:
        raise RefusedError(
            f"the standard {assertion.name!r} is kept by {assertion.owner_conflict}",
            where=assertion.test_id,
            hint="name it apart, by the parameters too; if that test is gone, delete the file and record again",
        )
    if assertion.faults:
        raise RefusedError("; ".join(assertion.faults), where=assertion.subject, hint=_OVERRIDDEN)
    breaks = assertion.breaks()
    if breaks:
        raise breaks_error(breaks, where=assertion.subject, hint=f"correct it; {_NOT_FINITE}")
    old, recording = assertion.old, assertion.recording
    policies = assertion.policies(old)
    # Against itself where there is no other: a tolerance that does not fit its dtype is refused before it is written.
    against = recording if old is None else old
    change = compare(recording.batches(), against.batches(), policies=policies)
    accepted = [result.key for result in change.series if result.verdict is Verdict.WITHIN_TOLERANCE]
    batches = list(with_old_rows(recording.batches(), old, accepted))
    action, changes = replace_if_changed(
        assertion.path,
        batches,
        assertion.metadata(policies),
        old,
        comparison=None if old is None else change,
        is_same_software=shared_software_equal,
    )
    return StandardChange(
        subject=assertion.subject,
        platform=assertion.platform,
        action=action,
        path=display_path(assertion.path.resolve(), assertion.settings),
        change=None if old is None else change,
        environment=() if old is None else difference(old.metadata.environment, assertion.environment),
        metadata_changes=changes,
        kept_old=accepted,
        num_points=sum(len(batch) for batch in batches),
    )


# ------------------------------------------------------------------------------------------------ housekeeping


@dataclass(frozen=True, slots=True)
class FinishedTest:
    """A test that has run, and the names of the standards that it used.

    Attributes:
        file: The test file.
        name: Its name in the file.
        has_passed: Whether it came to its end.
        used: The names of its assertions.
    """

    file: Path
    name: str
    has_passed: bool
    used: frozenset[str]


def unused_standards(tests: Iterable[FinishedTest]) -> list[tuple[Path, str | None]]:
    """Return the standards beside the test files that no test used, with the test that recorded each.

    Those of a test that ran and failed are left out: it may not have come to its assertion. Those of a test that did
    not run are there: nobody can tell whether it was left out of the selection or is gone.

    Raises:
        StandardError: A standard cannot be read.
    """
    ran: defaultdict[Path, list[FinishedTest]] = defaultdict(list)
    for test in tests:
        ran[test.file.parent / test.file.stem].append(test)
    found = []
    for folder, those in sorted(ran.items()):
        used = {name for test in those for name in test.used}
        failed = {test.name for test in those if not test.has_passed}
        for path in sorted(folder.glob("*.parquet")):
            if path.name.partition(".")[0] in used:
                continue
            metadata = Standard(path).metadata
            if metadata.kind == KIND and (metadata.test or "").partition("::")[2] not in failed:
                found.append((path, metadata.test))
    return found
