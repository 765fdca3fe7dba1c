"""The one typed hierarchy of errors, and the exit codes that commands answer with.

Every error that a user can cause is a :class:`RegistryError`: its message says what is wrong and where, its
``hint`` what to do next, and its class which exit code the command ends with. Anything else that reaches the
command line is a fault of this package and ends with :attr:`ExitCode.INTERNAL`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar

from e2e_registry.printable import printable


class ExitCode(enum.IntEnum):
    """What a command tells the shell. Part of the contract: scripts branch on these."""

    OK = 0
    MISMATCH = 1
    USAGE = 2
    NO_STANDARD = 3
    RUN_FAILED = 4
    NOTHING_SELECTED = 5
    STORAGE = 6
    INTERNAL = 70
    INTERRUPTED = 130
    TERMINATED = 143


#: When several tests end differently, the command answers with the first of these that occurred.
EXIT_CODE_PRECEDENCE: tuple[ExitCode, ...] = (
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.STORAGE,
    ExitCode.RUN_FAILED,
    ExitCode.MISMATCH,
    ExitCode.NO_STANDARD,
)


def worst_exit_code(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code for a command that ran several tests; ``OK`` when none failed.

    A failure with a code that no test can end with is a fault of this package, and never success.
    """
    seen = set(codes) - {ExitCode.OK}
    if not seen <= set(EXIT_CODE_PRECEDENCE):
        return ExitCode.INTERNAL
    for code in EXIT_CODE_PRECEDENCE:
        if code in seen:
            return code
    return ExitCode.OK


class RegistryError(Exception):
    """Base of all errors that a user can cause.

    Args:
        message: What is wrong, in one sentence.
        where: The place: ``file``, ``file:line``, or ``file:line:argument``.
        hint: What to do next, as commands or edits.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __init__(self, message: str, *, where: str | Path | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        """Render as ``where: message`` and the hint on a line of its own; a terminal shows it and obeys none of it."""
        text = self.message if self.where is None else f"{self.where}: {self.message}"
        return printable(text if self.hint is None else f"{text}\n  {self.hint}")


class UsageError(RegistryError):
    """The command line or the settings ask for something that does not exist."""

    exit_code = ExitCode.USAGE


class RegistrationError(UsageError):
    """A ``register_e2e_ci(...)`` call that cannot be accepted; ``where`` holds file, line and argument."""


class RefusedError(UsageError):
    """A refusal that an option lifts; the hint names the option."""


class MismatchError(RegistryError):
    """The numbers say no: a broken invariant, a registered metric never emitted, runs that do not repeat."""

    exit_code = ExitCode.MISMATCH


class NoStandardError(RegistryError):
    """There is nothing to compare with."""

    exit_code = ExitCode.NO_STANDARD


class RecordingError(RegistryError):
    """What a recipe logged cannot be taken: the base of the run-side errors."""

    exit_code = ExitCode.RUN_FAILED


class InvalidRunError(RecordingError):
    """A run whose recording contradicts itself or is damaged anywhere but at its torn end."""


class RecipeError(RecordingError):
    """The recipe failed: non-zero exit, signal, timeout, or nothing logged."""


class LostRunError(RecordingError):
    """A run that was ended with its machine, or cancelled there: nobody knows how it would have ended."""


class NotStartedError(LostRunError):
    """A run that was called off before its recipe began: there is nothing to know of it."""


class NothingSelectedError(RegistryError):
    """A selection that is empty, or in which everything was skipped."""

    exit_code = ExitCode.NOTHING_SELECTED


class StorageError(RegistryError):
    """A file cannot be read or written."""

    exit_code = ExitCode.STORAGE


def unusable_file(error: OSError) -> StorageError | None:
    """Return what a user is told of an error of the system that names a file; None if it names none.

    A path that cannot be looked at (its folder may not be searched, its name is too long, a link leads in a circle)
    fails wherever it is first touched. An error without a file is no user's doing.
    """
    if error.filename is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return StorageError(f"cannot be used: {error.strerror or error}", where=name)


@contextlib.contextmanager
def usable_files() -> Iterator[None]:
    """Raise what :func:`unusable_file` makes of an error: where one of several things may fail, and the rest go on."""
    try:
        yield
    except OSError as error:
        unusable = unusable_file(error)
        if unusable is None:
            raise
        raise unusable from error


class ArtifactError(StorageError):
    """An artifact is damaged, expired, larger than its limits, or not what this package wrote and CI uploaded."""


class StandardError(StorageError):
    """A file that should be a standard is damaged, foreign, or of another format version."""


def exit_if_script(error: RegistryError, caller: FrameType) -> None:
    """End the process as a command would, if ``caller`` is a test file that runs as a script; else return.

    An uncaught exception would end it with 1, which says "mismatch". An interactive session has no file, and a program
    that makes tolerances for itself does not register a test: both get the exception.
    """
    is_script = caller.f_globals.get("__name__") == "__main__" and "__file__" in caller.f_globals
    if is_script and "register_e2e_ci" in caller.f_code.co_names:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(int(error.exit_code)) from error
