"""Finds tests: all of them below the test folders, or one by path or id."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from e2e_registry.config import DEFAULT_TEST_FOLDERS, Settings, did_you_mean
from e2e_registry.errors import RegistrationError, UsageError
from e2e_registry.registration.declaration import Registration
from e2e_registry.registration.place import Location, locate
from e2e_registry.registration.source import read_registration


def discover(settings: Settings) -> list[Registration]:
    """Return the tests of all ``test_*.py`` below the test folders, sorted by id.

    Raises:
        RegistrationError: A file declares no test or one that cannot be accepted (all such files are listed), or two
            files share a stem and so would share their standards.
        UsageError: A test folder that the settings name does not exist, or cannot be read.
    """
    locations = test_locations(settings)
    registrations: list[Registration] = []
    errors: list[RegistrationError] = []
    for location in locations:
        try:
            registrations.append(read_registration(location.file, settings))
        except RegistrationError as error:
            errors.append(error)
    if len(errors) > 1:
        listed = "".join(f"\n{error}" for error in errors)
        raise RegistrationError(f"{len(errors)} test files cannot be accepted:{listed}") from errors[0]
    if errors:
        raise errors[0]
    for location in locations:
        _refuse_shared_stem(location, locations)
    return registrations


def find_test(
    settings: Settings, path_or_id: str | Path, *, locations: Sequence[Location] | None = None
) -> Registration:
    """Return one test, given by a path from the current folder, an absolute path, or its id.

    A file outside the test folders is accepted, as pytest accepts a file that it would not collect; only
    :func:`discover` and what is built on it pass it by (see :func:`is_discovered`).

    Args:
        settings: The repository's settings.
        path_or_id: The test.
        locations: What :func:`test_locations` returned a moment ago, for who finds many tests one by one.

    Raises:
        UsageError: There is no such file.
        RegistrationError: It declares no test or one that cannot be accepted, or shares its stem with another test.
    """
    candidates = [Path.cwd() / path_or_id, settings.root / path_or_id]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None and any(candidate.is_dir() for candidate in candidates):
        raise UsageError(f"{path_or_id} is a folder, not a test", hint="name one file, or select with --suite or --all")
    if locations is None:
        locations = test_locations(settings)
    if file is None:
        known = [location.test_id for location in locations]
        raise UsageError(
            f"there is no test {path_or_id}", hint=did_you_mean(Path(path_or_id).as_posix(), known) if known else None
        )
    registration = read_registration(file, settings)
    _refuse_shared_stem(Location(registration.file, registration.test_id), locations)
    return registration


def is_discovered(registration: Registration, settings: Settings) -> bool:
    """Whether :func:`discover` would find the test; if not, no suite runs it."""
    return any(location.test_id == registration.test_id for location in test_locations(settings))


def test_locations(settings: Settings) -> list[Location]:
    """Return all ``test_*.py`` below the test folders, each once, sorted by id; whether they declare a test or not.

    Raises:
        UsageError: A test folder that the settings name does not exist, or cannot be read.
    """
    found: dict[str, Location] = {}
    for folder in settings.test_dirs:
        if not folder.is_dir():
            if settings.test_folders == DEFAULT_TEST_FOLDERS:
                continue  # a repository that has no test yet
            raise UsageError(
                f"test folder {folder} does not exist", where=settings.source, hint="create it, or correct test_folders"
            )
        for file in _walk(folder, settings.run_dir):
            location = locate(file, settings)
            found[location.test_id] = location
    return [found[test_id] for test_id in sorted(found)]


def _walk(folder: Path, run_dir: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        # os.walk would pass the folder by, and its tests would be missed by nobody.
        raise UsageError(f"test folder cannot be read: {error.strerror}", where=error.filename) from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [
            name for name in folders if not name.startswith((".", "__pycache__")) and Path(parent, name) != run_dir
        ]
        yield from (Path(parent, name) for name in files if name.startswith("test_") and name.endswith(".py"))


def _refuse_shared_stem(location: Location, others: Iterable[Location]) -> None:
    for other in others:
        # Case is folded because some file systems hold `test_A` and `test_a` to be one name.
        if other.test_id != location.test_id and other.file.stem.casefold() == location.file.stem.casefold():
            first, second = sorted((location.test_id, other.test_id))
            raise RegistrationError(
                f"has the stem of {first}: standards are named by stem, so the two would share them",
                where=second,
                hint="rename one of the two files",
            )
