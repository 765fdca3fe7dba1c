"""Plans which tests run on which machines of CI, and which verdicts must come back.

A test is planned for every declared platform that its profile can run on. Where a verdict is not required the test
runs all the same: that is how a new platform gets its first standards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from e2e_registry.config import Settings, did_you_mean
from e2e_registry.environment import may_be_platform_of, source_tree_of_revision
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.operations.check import quarantine_text
from e2e_registry.operations.partition import Partition, partition
from e2e_registry.operations.standards import standard_paths
from e2e_registry.registration import Registration
from e2e_registry.storage import parse_json
from e2e_registry.tolerance import matches

PLAN_FORMAT = 1
#: GitHub runs no matrix of more jobs.
MAX_JOBS = 256

#: Test and platform.
Pair = tuple[str, str]


@dataclass(frozen=True)
class PlannedJob:
    """One machine's share.

    Attributes:
        platform: The platform that its runner is declared to offer.
        runs_on: The runner's labels.
        part: Which part of the platform's tests.
        tests: The ids of the tests.
        est_time: How long they are expected to take, in seconds.
    """

    platform: str
    runs_on: tuple[str, ...]
    part: Partition
    tests: tuple[str, ...]
    est_time: float

    @property
    def name(self) -> str:
        """What the job is called: the platform, and which part of it where there are several."""
        return self.platform if self.part.count == 1 else f"{self.platform} {self.part}"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the matrix; strings alone but for the labels, as job inputs are."""
        return {
            "name": self.name,
            "platform": self.platform,
            "runs_on": list(self.runs_on),
            "partition": str(self.part),
            "artifact": f"{self.platform}-{self.part.index}of{self.part.count}",
            "tests": "\n".join(self.tests),
            "est_time": self.est_time,
        }


@dataclass(frozen=True)
class ExpectedVerdict:
    """A verdict that must come back, or one that is welcome.

    Attributes:
        test: The test's id.
        platform: The platform.
        excuse: Why the verdict is not required; None if it is.
        is_run: Whether a job runs the test there.
    """

    test: str
    platform: str
    excuse: str | None = None
    is_run: bool = True

    @property
    def is_required(self) -> bool:
        """Whether the merge fails without the verdict."""
        return self.excuse is None

    def to_json(self) -> dict[str, Any]:
        """Return the object that the plan holds."""
        return {"test": self.test, "platform": self.platform, "excuse": self.excuse, "is_run": self.is_run}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What CI is to run.

    Attributes:
        jobs: A job a platform and part.
        expected: A verdict a test and platform.
        warnings: What should be known, such as tests that no platform can run.
        head_source_tree: The source tree of a pull request's head, if it was asked for.
    """

    jobs: Sequence[PlannedJob]
    expected: Sequence[ExpectedVerdict]
    warnings: Sequence[str] = ()
    head_source_tree: str | None = None

    @cached_property
    def by_pair(self) -> dict[Pair, ExpectedVerdict]:
        """The expected verdicts by test and platform."""
        return {(verdict.test, verdict.platform): verdict for verdict in self.expected}

    @property
    def matrix(self) -> dict[str, Any]:
        """The matrix of a GitHub job."""
        return {"include": [job.to_json() for job in self.jobs]}

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``plan`` prints."""
        return {
            "format": PLAN_FORMAT,
            "matrix": self.matrix,
            "count": len(self.jobs),
            "expected": [verdict.to_json() for verdict in self.expected],
            "warnings": list(self.warnings),
            "head_source_tree": self.head_source_tree,
        }

    def github_outputs(self) -> str:
        """Return the lines that set a step's outputs. JSON escapes line ends, so that no value begins a line."""
        outputs = {
            "matrix": json.dumps(self.matrix),
            "count": str(len(self.jobs)),
            "head-source-tree": self.head_source_tree or "",
        }
        return "".join(f"{name}={value}\n" for name, value in outputs.items())


def make_plan(
    registrations: Sequence[Registration],
    settings: Settings,
    *,
    platform: str | None = None,
    partitions: int = 1,
    head_revision: str | None = None,
    only: frozenset[tuple[str, str | None]] | None = None,
) -> Plan:
    """Plan the machines of CI.

    Args:
        registrations: The selected tests.
        settings: Name the platforms.
        platform: Plan for this one alone; for all that are declared by default.
        partitions: Into how many jobs a platform's tests are split; fewer where there are fewer tests.
        head_revision: A commit whose source tree the runs shall record, since CI checks out a merge commit.
        only: Of the tests, plan these on these platforms alone; on all of them where the platform is None.

    Raises:
        UsageError: No or an unknown platform, an unknown revision, or more jobs than GitHub takes.
    """
    jobs: list[PlannedJob] = []
    expected: list[ExpectedVerdict] = []
    established = _established_platforms(settings)
    chosen = _chosen_platforms(settings, platform)
    for slug, runs_on in chosen.items():
        tests = [
            test
            for test in registrations
            if may_be_platform_of(slug, profile=test.profile, num_gpus=test.num_gpus)
            and (only is None or {(test.test_id, slug), (test.test_id, None)} & only)
        ]
        expected += [_expected(test, slug, settings, is_established=slug in established) for test in tests]
        jobs += _jobs(slug, runs_on, [test for test in tests if not test.disabled], partitions)
    if len(jobs) > MAX_JOBS:
        raise UsageError(
            f"the plan has {len(jobs)} jobs, and GitHub takes a matrix of at most {MAX_JOBS}",
            where="--partitions",
            hint="take fewer partitions, or one platform a run",
        )
    return Plan(
        jobs=jobs,
        expected=expected,
        warnings=_unplanned(registrations, expected, chosen) if only is None else (),
        head_source_tree=None if head_revision is None else _head_source_tree(head_revision, settings),
    )


def _chosen_platforms(settings: Settings, platform: str | None) -> Mapping[str, tuple[str, ...]]:
    if not settings.platforms:
        raise UsageError(
            "no platform is declared",
            where=settings.source or settings.root,
            hint='say which runner offers which: [tool.e2e_registry.platforms] cpu-x86_64-portable = ["ubuntu-24.04"]',
        )
    if platform is None:
        return settings.platforms
    if platform not in settings.platforms:
        hint = did_you_mean(platform, settings.platforms)
        raise UsageError(f"no runner is declared for the platform {platform!r}", where="--platform", hint=hint)
    return {platform: settings.platforms[platform]}


def _established_platforms(settings: Settings) -> frozenset[str]:
    """Return the platforms that any standard is committed for."""
    files = settings.standards_dir.glob("*.*.parquet")
    return frozenset(file.name.split(".", 1)[1].removesuffix(".parquet") for file in files)


def _expected(test: Registration, platform: str, settings: Settings, *, is_established: bool) -> ExpectedVerdict:
    """Say whether a verdict is required.

    A platform that nothing was recorded for yet is being added: until its first standards land, only tests that
    name it need a verdict there. A test with no standard anywhere is new, and has to get one.
    """
    if test.disabled:
        return ExpectedVerdict(test.test_id, platform, f"disabled: {test.disabled}", is_run=False)
    quarantine = quarantine_text(test)
    if quarantine is not None:
        return ExpectedVerdict(test.test_id, platform, f"quarantined {quarantine}")
    if not test.requires_verdict(platform):
        return ExpectedVerdict(test.test_id, platform, "platforms= does not name it")
    is_named = any(pattern != "*" and matches(platform, pattern) for pattern in test.platforms)
    if not is_established and not is_named and standard_paths(test, settings):
        return ExpectedVerdict(test.test_id, platform, "a new platform: no standard has landed for it")
    return ExpectedVerdict(test.test_id, platform)


def _jobs(platform: str, runs_on: tuple[str, ...], tests: Sequence[Registration], partitions: int) -> list[PlannedJob]:
    count = min(partitions, len(tests))
    parts = partition(tests, count) if count else []
    return [
        PlannedJob(
            platform=platform,
            runs_on=runs_on,
            part=Partition(index, count),
            tests=tuple(test.test_id for test in part),
            est_time=sum(test.est_time for test in part),
        )
        for index, part in enumerate(parts, start=1)
    ]


def _unplanned(
    registrations: Sequence[Registration], expected: Sequence[ExpectedVerdict], platforms: Mapping[str, object]
) -> list[str]:
    planned = {verdict.test for verdict in expected}
    return [
        f"{test.test_id} runs nowhere: no run under the profile {test.profile!r}"
        f"{f' with {test.num_gpus} GPU(s)' if test.num_gpus else ''} is on {', '.join(platforms)}"
        for test in registrations
        if test.test_id not in planned
    ]


def _head_source_tree(revision: str, settings: Settings) -> str:
    tree = source_tree_of_revision(settings.root, revision, [settings.standards_dir, settings.run_dir])
    if tree is None:
        raise UsageError(
            f"git cannot check out {revision!r}",
            where="--head-rev",
            hint="fetch the commit first: actions/checkout takes fetch-depth: 0",
        )
    return tree


def read_plan(path: Path) -> Plan:
    """Read back the expected verdicts of a plan that ``plan`` printed; its jobs have run by then.

    Raises:
        StorageError: It cannot be read, or is no plan.
    """
    try:
        data = parse_json(path.read_bytes())
        if data["format"] != PLAN_FORMAT:
            raise StorageError(f"is a plan of format {data['format']}, not {PLAN_FORMAT}", where=path)
        expected = [ExpectedVerdict(**entry) for entry in data["expected"]]
        warnings = [str(warning) for warning in data["warnings"]]
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", where=path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"is no plan: {type(error).__name__}: {error}", where=path, hint="take the file that `plan` printed"
        ) from error
    return Plan(jobs=(), expected=expected, warnings=warnings)
