"""Merges the ``results.json`` of several machines, and says whether every verdict that must be there is.

The files are artifacts of jobs that ran a pull request's code: nothing in them is trusted to have a type, a size or
an honest exit code.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.comparison import TestVerdict
from e2e_registry.comparison.merged import MergedResults, MergedVerdict, MergeProblem, Standing, exit_code_of
from e2e_registry.config import Settings
from e2e_registry.errors import (
    EXIT_CODE_PRECEDENCE,
    ExitCode,
    NothingSelectedError,
    StorageError,
    UsageError,
    worst_exit_code,
)
from e2e_registry.operations.plan import Plan
from e2e_registry.operations.results import RESULTS_FILE, RESULTS_FORMAT
from e2e_registry.operations.running import UNKNOWN_PLATFORM
from e2e_registry.registration import Registration, discover
from e2e_registry.reports.values import listed
from e2e_registry.storage import read_json_object

#: Beside ``results.json``: which job of which attempt wrote it, for which platform it was planned, and what its
#: command ended with; null until it has.
JOB_FILE = "job.json"
#: A results file holds a few kilobytes a test.
MAX_RESULTS_BYTES = 64 << 20
_MAX_NAMES = 80
_MAX_TESTS = 3

_JobKey = tuple[str | None, ...]
#: Test and platform; None where neither the run nor the job says which.
_Pair = tuple[str, str | None]

#: Verdicts after which a new standard may be what is wanted.
RECORDABLE = frozenset({TestVerdict.MISMATCH, TestVerdict.NO_STANDARD, TestVerdict.INCOMPARABLE})


@dataclass(frozen=True)
class JobResults:
    """The results of one job.

    Attributes:
        name: What the job is called, or the folder that its results came in.
        platform: The platform that it was planned for; None where nobody said.
        attempt: Which attempt of the workflow's run it was of, from 1.
        tests: The tests' objects, each with a string ``subject`` and a known ``verdict``.
        not_run: The tests that it did not come to.
        problem: Why the results are not all that the job should have brought; None if they are.
        artifact: What its artifact is called but for the attempt; None where nobody said.
    """

    name: str
    platform: str | None
    attempt: int
    tests: tuple[Mapping[str, Any], ...]
    not_run: tuple[str, ...] = ()
    problem: str | None = None
    artifact: str | None = None

    @property
    def key(self) -> _JobKey:
        """What the attempts at one job have in common.

        Artifacts of one attempt differ in their names: GitHub sees to it. All jobs of a matrix may have one name.
        """
        return (self.name, self.platform) if self.artifact is None else (self.artifact,)


def find_results(paths: Sequence[Path]) -> list[Path]:
    """Return the ``results.json`` that paths hold: themselves, directly in them, or in a folder of each artifact.

    A folder with a job's facts and without its results is one that a job failed to fill: it counts as well.

    Raises:
        UsageError: A path is not there.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}", hint="name results.json files, or folders of downloaded artifacts")
        if path.is_file():
            found.append(path)
            continue
        folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.is_symlink())]
        found += [
            folder / RESULTS_FILE
            for folder in folders
            if _is_there(folder / RESULTS_FILE) or _is_there(folder / JOB_FILE)
        ]
    return list(dict.fromkeys(found))


def read_results(path: Path) -> JobResults:
    """Read one ``results.json``, and the job's facts beside it.

    Raises:
        StorageError: It cannot be read, or is not what a check writes.
    """
    job_file = path.with_name(JOB_FILE)
    job = _read_job(job_file) if _is_there(job_file) else {}
    # Recording writes no results: those beside it are of a check before it.
    data = None if job and (job.get("command") == "record" or not _is_there(path)) else _read_results(path)
    return JobResults(
        name=job.get("name", path.parent.name),
        platform=job.get("platform"),
        attempt=job.get("attempt", 1),
        tests=() if data is None else tuple(data["tests"]),
        not_run=() if data is None else tuple(data.get("not_run", ())),
        problem=_problem_without_results(job) if data is None else _problem_with_results(job, data),
        artifact=job.get("artifact"),
    )


def _read_job(path: Path) -> dict[str, Any]:
    job = _read_object(path)
    is_job = all(isinstance(job.get(name, ""), str) for name in ("name", "command"))
    is_job = is_job and all(isinstance(job.get(name), str | None) for name in ("artifact", "platform"))
    is_job = is_job and type(job.get("attempt", 1)) is int and type(job.get("exit_code", 0)) in (int, type(None))
    if not is_job:
        raise StorageError("does not say name, artifact, command, platform, attempt and exit code", where=path)
    return job


def _read_results(path: Path) -> dict[str, Any]:
    data = _read_object(path)
    if data.get("format") != RESULTS_FORMAT:
        raise StorageError(f"is of format {data.get('format')!r}, not {RESULTS_FORMAT}", where=path)
    tests, not_run = data.get("tests"), data.get("not_run", [])
    if not isinstance(tests, list):
        raise StorageError("holds no list of tests", where=path)
    if not isinstance(not_run, list) or not all(isinstance(test, str) for test in not_run):
        raise StorageError("does not list by name what was not run", where=path)
    for at, test in enumerate(tests):
        _check_test(test, f"{path}:tests[{at}]")
    return data


def _problem_without_results(job: Mapping[str, Any]) -> str | None:
    """Say what went wrong in a job that wrote no results; recording never does, and has succeeded if it says so."""
    command, code = job.get("command", "check"), job.get("exit_code")
    if command == "record" and code == 0:
        return None
    if code is None:
        return f"{command:.40} did not come to its end"
    return f"{command:.40} ended with exit code {code!s:.10}" + ("" if command == "record" else " and no results")


def _problem_with_results(job: Mapping[str, Any], data: Mapping[str, Any]) -> str | None:
    """Say why results are not whole, or not those of the job's own check."""
    not_run = data.get("not_run")
    if data.get("status", "complete") != "complete" or not_run:
        which = f"; not run: {_listed(not_run)}" if not_run else ""
        return f"the results are partial ({data.get('why_partial') or 'unfinished'!s:.40}){which}"
    command, code = job.get("command", "check"), job.get("exit_code", ExitCode.OK)
    if code is None:
        return f"{command:.40} did not come to its end"
    implied = _implied_codes(data["tests"])
    if "exit_code" in job and code not in implied:
        return f"{command:.40} ended with exit code {code!s:.10}, and its results say {min(implied)}"
    return None


def _implied_codes(tests: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return what a check that left these tests may have ended with: where nothing ran, ``--allow-empty`` decides."""
    ran = [(TestVerdict(test["verdict"]), test) for test in tests if test["verdict"] != TestVerdict.SKIPPED.value]
    if not ran:
        return {int(ExitCode.OK), int(ExitCode.NOTHING_SELECTED)}
    return {int(worst_exit_code(exit_code_of(*each) for each in ran if not each[1].get("quarantine")))}


def _listed(tests: Sequence[str]) -> str:
    return listed([f"{test:.{_MAX_NAMES}}" for test in tests], _MAX_TESTS)


def _check_test(test: object, where: str) -> None:
    if not isinstance(test, dict) or not isinstance(test.get("subject"), str):
        raise StorageError("names no test", where=where)
    if test.get("verdict") not in [verdict.value for verdict in TestVerdict]:
        raise StorageError(f"has the unknown verdict {test.get('verdict')!r:.80}", where=where)
    if not isinstance(test.get("platform"), str | None):
        raise StorageError("has a platform that is no text", where=where)


def _is_there(path: Path) -> bool:
    """Whether a regular file is there. An artifact may hold links, which lead who knows where."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _read_object(path: Path) -> dict[str, Any]:
    hint = "unpack the artifact, and name the folder" if path.suffix == ".zip" else None
    return read_json_object(path, max_bytes=MAX_RESULTS_BYTES, hint=hint)


def select_recordable(
    settings: Settings, paths: Sequence[Path]
) -> tuple[list[Registration], frozenset[tuple[str, str | None]]]:
    """Return the tests whose results ask for a new standard, by id, and with them the platforms that ask.

    The results name tests; what is run is the checkout's registrations, so a name that is none of them is passed by.

    Args:
        settings: The repository's settings.
        paths: See :func:`find_results`.

    Raises:
        UsageError: A path is not there.
        StorageError: A file cannot be read, or is not what a check writes.
        RegistrationError: A registration cannot be accepted.
        NothingSelectedError: No result asks for a new standard.
    """
    latest = _latest([read_results(path) for path in find_results(paths)])[0]
    pairs = frozenset(pair for pair, (_, verdict, _) in latest.items() if verdict in RECORDABLE)
    asking = {test for test, _ in pairs}
    found = [registration for registration in discover(settings) if registration.test_id in asking]
    if not found:
        raise NothingSelectedError(
            "no result asks for a new standard", hint="those that do are mismatch, no-standard and incomparable"
        )
    return found, pairs


# -------------------------------------------------------------------------------------------------- merging


def merge(paths: Sequence[Path], *, plan: Plan | None = None, may_be_empty: bool = False) -> MergedResults:
    """Merge the results of several machines.

    Of the attempts at one job the latest counts for each test and platform; of the results of two jobs, or of one
    attempt, the worse.

    Args:
        paths: See :func:`find_results`.
        plan: What had to run. Without it every result is required, and nothing is missed.
        may_be_empty: Whether no result at all is success.

    Raises:
        UsageError: A path is not there.
    """
    jobs: list[JobResults] = []
    problems: list[MergeProblem] = []
    for path in find_results(paths):
        try:
            jobs.append(read_results(path))
        except StorageError as error:
            problems.append(MergeProblem(str(error), error.exit_code))
    latest, warnings = _latest(jobs)
    problems += [MergeProblem(message, ExitCode.RUN_FAILED) for message in (*_incomplete(jobs), *_lost(jobs))]
    verdicts = [_verdict(pair, found, plan) for pair, found in latest.items()]
    if plan is not None:
        verdicts += [
            MergedVerdict(
                test=expected.test,
                platform=expected.platform,
                verdict=None,
                standing=Standing.REQUIRED if expected.is_required else Standing.INFORMATIONAL,
                note="no job brought a result" if expected.is_required else expected.excuse,
                result={},
            )
            for expected in plan.expected
            if (expected.test, expected.platform) not in latest
        ]
        warnings = [*plan.warnings, *warnings]
    verdicts.sort(key=lambda verdict: (_urgency(verdict), verdict.test, verdict.platform or ""))
    is_nothing_planned = plan is not None and not plan.expected
    return MergedResults(
        verdicts=verdicts,
        problems=problems,
        warnings=[*warnings, *_displaced(_current(jobs))],
        num_jobs=len(jobs),
        may_be_empty=may_be_empty or is_nothing_planned,
    )


_Found = tuple[JobResults, TestVerdict, Mapping[str, Any]]


def _latest(jobs: Sequence[JobResults]) -> tuple[dict[_Pair, _Found], list[str]]:
    """Return the result that counts of each test and platform, and what was odd about finding it."""
    last: dict[tuple[_JobKey, _Pair], int] = {}
    found: list[tuple[_Pair, _Found]] = []
    for job, test in ((each, test) for each in jobs for test in each.tests):
        pair = (test["subject"], _platform_of(test, job))
        last[job.key, pair] = max(last.get((job.key, pair), job.attempt), job.attempt)
        found.append((pair, (job, TestVerdict(test["verdict"]), test)))
    latest: dict[_Pair, _Found] = {}
    warnings: list[str] = []
    for pair, one in found:
        job, verdict, _ = one
        if job.attempt < last[job.key, pair]:
            continue
        known = latest.get(pair)
        if known is not None:
            which = "" if known[1] is verdict else "; the worse one counts"
            warnings.append(f"{pair[0]} on {pair[1]}: two results ({known[1].value}, {verdict.value}){which}")
        if known is None or _badness(verdict) > _badness(known[1]):
            latest[pair] = one
    return latest, warnings


def _platform_of(test: Mapping[str, Any], job: JobResults) -> str | None:
    platform = test.get("platform")
    return job.platform if platform in (None, UNKNOWN_PLATFORM) else platform


def _badness(verdict: TestVerdict) -> int:
    """Order verdicts: a test that did not run, success, then the exit codes from mild to bad."""
    if verdict is TestVerdict.SKIPPED:
        return -2
    if verdict.is_success:
        return -1
    return len(EXIT_CODE_PRECEDENCE) - EXIT_CODE_PRECEDENCE.index(verdict.exit_code)


def _current(jobs: Sequence[JobResults]) -> Iterator[JobResults]:
    """Return the jobs that no later attempt at the same job replaced."""
    last: dict[_JobKey, int] = {}
    for job in jobs:
        last[job.key] = max(last.get(job.key, job.attempt), job.attempt)
    return (job for job in jobs if job.attempt == last[job.key])


def _incomplete(jobs: Sequence[JobResults]) -> Iterator[str]:
    """Say which jobs did not bring all that they should have."""
    return (f"{job.name}: {job.problem}" for job in _current(jobs) if job.problem is not None)


def _lost(jobs: Sequence[JobResults]) -> Iterator[str]:
    """Say which tests a job did not come to, and its later attempts did not run either."""
    for job in jobs:
        later = [other for other in jobs if other.key == job.key and other.attempt > job.attempt]
        run = {test["subject"] for other in later for test in other.tests}
        lost = [test for test in job.not_run if test not in run]
        if later and lost:
            yield f"{job.name}: attempt {job.attempt!s:.10} did not run {_listed(lost)}, and no later one did"


def _verdict(pair: _Pair, found: _Found, plan: Plan | None) -> MergedVerdict:
    (test, platform), (job, verdict, result) = pair, found
    expected = None if plan is None or platform is None else plan.by_pair.get((test, platform))
    excuse = None if expected is None else expected.excuse
    # A plan says itself what is quarantined; what an artifact says of that, its pull request's code may have written.
    quarantine = result.get("quarantine") if plan is None else None
    is_skipped_unasked = expected is None and verdict is TestVerdict.SKIPPED
    return MergedVerdict(
        test=test,
        platform=platform,
        verdict=verdict,
        standing=Standing.INFORMATIONAL if excuse or is_skipped_unasked else Standing.REQUIRED,
        note=excuse or _skip_reason(verdict, result),
        job=job.name,
        quarantine=(quarantine or None) if isinstance(quarantine, str) else None,
        result=result,
    )


def _skip_reason(verdict: TestVerdict, result: Mapping[str, Any]) -> str | None:
    reasons = result.get("reasons")
    if verdict is not TestVerdict.SKIPPED or not isinstance(reasons, list):
        return None
    return "; ".join(str(reason) for reason in reasons)


def _urgency(verdict: MergedVerdict) -> int:
    """Order what must be looked at first: what fails, what is missing, what is for information, what is fine."""
    if verdict.exit_code is not ExitCode.OK:
        return 1 if verdict.is_missing else 0
    is_success = verdict.verdict is not None and verdict.verdict.is_success
    return 3 if is_success else 2


def _displaced(jobs: Iterable[JobResults]) -> list[str]:
    """Say which jobs ran on another platform than the one that they were planned for."""
    warnings = []
    for job in jobs:
        seen = {str(test["platform"]) for test in job.tests if test.get("platform") not in (None, UNKNOWN_PLATFORM)}
        if job.platform is not None and seen - {job.platform}:
            others = ", ".join(sorted(seen - {job.platform}))[:_MAX_NAMES]
            warnings.append(
                f"{job.name}: planned for {job.platform}, and its runner is {others}: "
                "correct the runner's labels in [tool.e2e_registry.platforms]"
            )
    return warnings
