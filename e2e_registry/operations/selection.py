"""Chooses which tests a command works on."""

from __future__ import annotations

from collections.abc import Sequence

from e2e_registry.config import Settings, did_you_mean
from e2e_registry.errors import NothingSelectedError, UsageError
from e2e_registry.registration import Registration, discover, find_test


def select(
    settings: Settings,
    *,
    tests: Sequence[str] = (),
    suite: str | None = None,
    everything: bool = False,
    nightly: bool = False,
) -> list[Registration]:
    """Return the selected tests: named ones in the order given, a suite or all of them by id.

    Args:
        settings: The repository's settings.
        tests: Test files by path or id.
        suite: A suite's name.
        everything: Select all tests.
        nightly: Of a suite or of all, take also the tests that are registered as nightly.

    Raises:
        UsageError: No or more than one way to select, an unknown test, or an unknown suite.
        RegistrationError: A registration cannot be accepted.
        NothingSelectedError: There is no test at all.
    """
    if sum([bool(tests), suite is not None, everything]) != 1:
        raise UsageError("say what to work on: --test FILE, --suite NAME or --all (one of them)")
    if tests:
        found = [find_test(settings, test) for test in tests]
        return list(dict.fromkeys(found))
    registrations = discover(settings)
    if suite is not None:
        known = sorted({*settings.suites, *(registration.suite for registration in registrations)})
        if suite not in known:
            raise UsageError(f"there is no suite {suite!r}", hint=did_you_mean(suite, known) if known else None)
        registrations = [registration for registration in registrations if registration.suite == suite]
    registrations = [registration for registration in registrations if nightly or not registration.nightly]
    if not registrations:
        folders = ", ".join(settings.test_folders)
        raise NothingSelectedError("no test is selected", hint=f"tests are test_*.py in {folders}")
    return registrations
