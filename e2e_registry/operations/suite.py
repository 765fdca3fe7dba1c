"""Checks many tests, several at a time, and keeps the results current while it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from e2e_registry.comparison import Assessment, TestVerdict
from e2e_registry.config import Settings
from e2e_registry.errors import ExitCode, NotStartedError, StorageError, unusable_file
from e2e_registry.execution.capacity import Lease
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.execution.suite import Demand, Schedule
from e2e_registry.operations.check import check_test
from e2e_registry.operations.machines import LocalMachine, Machine, skip_reason
from e2e_registry.operations.results import Ending, Results
from e2e_registry.registration import Registration


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """How a suite is checked.

    Attributes:
        jobs: How many tests run at the same time at most; the machine's cores and GPUs limit it further.
        fail_fast: Start no further test once one has failed; those that run come to their end.
        repeats: How often a mismatching test is run again, to label the mismatch.
    """

    jobs: int = 1
    fail_fast: bool = False
    repeats: int = 0


class SuiteListener(Protocol):
    """Hears what happens; ``line`` from any thread, the others from the one that checks."""

    def started(self, test_id: str) -> Callable[[str], None]:
        """Take note that a test starts (in its own thread); return what takes each line its recipe prints."""

    def ended(self, assessment: Assessment) -> None:
        """Take what is concluded of a test."""


def check_suite(
    registrations: Sequence[Registration],
    settings: Settings,
    results: Results,
    listener: SuiteListener,
    *,
    options: SuiteOptions | None = None,
    machine: Machine | None = None,
) -> None:
    """Check tests, and keep ``results`` up to date in the run folder.

    With several jobs the longest start first. A test that mismatches is never retried. Whatever ends the check early,
    a signal among it, ends every recipe, and what was concluded by then is written and marked as partial.

    Args:
        registrations: The tests.
        settings: The repository's settings.
        results: Takes what is concluded.
        listener: Hears what happens.
        options: How to check.
        machine: Where the tests run; here by default.

    Raises:
        StorageError: ``results.json`` cannot be written: no result could be kept, so the check ends.
    """
    options = options or SuiteOptions()
    machine = machine or LocalMachine()
    cancellation = Cancellation()

    def work(registration: Registration, lease: Lease | None) -> Assessment | None:
        try:
            return check_test(
                registration,
                settings,
                on_line=listener.started(registration.test_id),
                cancellation=cancellation,
                machine=machine,
                lease=lease,
                repeats=options.repeats,
            )
        except NotStartedError:  # so that it stays among those that were not run
            return None

    schedule = Schedule(
        _in_starting_order(registrations, options.jobs),
        work,
        demand=lambda test: _demand(test, machine),
        capacity=machine.capacity,
        jobs=options.jobs,
        cancellation=cancellation,
    )
    is_stopped = False
    try:
        results.write()
        for _, assessment in schedule.results():
            if assessment is None:
                continue
            results.add(assessment)
            listener.ended(assessment)
            if options.fail_fast and assessment.exit_code is not ExitCode.OK and _has_run(assessment):
                schedule.stop_starting()
                is_stopped = True
        results.end(Ending.FAIL_FAST if is_stopped and results.not_run else None)
    except BaseException as error:
        _end_early(schedule, results, error)
        raise


def _in_starting_order(registrations: Sequence[Registration], jobs: int) -> list[Registration]:
    """Return one job's tests as they were selected; several jobs end soonest if the longest tests start first."""
    if jobs == 1:
        return list(registrations)
    return sorted(registrations, key=lambda test: (-test.est_time, test.test_id))


def _demand(registration: Registration, machine: Machine) -> Demand:
    """Return what a test is given while it runs: nothing if it will be skipped."""
    if skip_reason(registration, machine) is not None:
        return Demand(0, 0)
    return Demand(registration.num_cpus, registration.num_gpus)


def _has_run(assessment: Assessment) -> bool:
    return assessment.verdict is not TestVerdict.SKIPPED


def _end_early(schedule: Schedule[Registration, Assessment | None], results: Results, error: BaseException) -> None:
    """End every recipe and write what is known; what cannot be written is lost, and the first error stays the one."""
    for _, assessment in schedule.drain():
        try:
            if assessment is not None:
                results.add(assessment)
        except StorageError:
            continue
    try:
        results.end(_ending(error))
    except StorageError:
        return


def _ending(error: BaseException) -> Ending:
    if isinstance(error, StorageError) or (isinstance(error, OSError) and unusable_file(error) is not None):
        return Ending.STORAGE
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED
    return Ending.INTERNAL_ERROR if isinstance(error, Exception) else Ending.TERMINATED
