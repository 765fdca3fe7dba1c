"""Where a registration stands: the test's file and id, and the lines that errors name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

from e2e_registry.config import Settings
from e2e_registry.errors import RegistrationError, UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a registration stands, for errors about it.

    Attributes:
        file: The test's id, or the path as given if it has none.
        line: The line of the call.
        lines: Argument, such as ``metrics[1]`` or ``tolerances['train/loss']``, to the line of its expression;
            empty if the call was executed, because a frame knows the line of the call alone.
    """

    file: str
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, argument: str, message: str, hint: str | None = None) -> RegistrationError:
        """Return the error that blames ``argument``."""
        return RegistrationError(
            message, where=f"{self.file}:{self.lines.get(argument, self.line)}:{argument}", hint=hint
        )


@contextmanager
def blaming(place: Place, argument: str) -> Iterator[None]:
    """Turn what ``Tolerance`` and ``Invariant`` refuse into an error about ``argument``."""
    try:
        yield
    except RegistrationError:
        raise
    except UsageError as error:
        raise place.error(argument, error.message, error.hint) from error
    except (OverflowError, ValueError) as error:  # ValueError: too many digits to be written in the message
        raise place.error(argument, "a number is too large for a float64") from error


class Location(NamedTuple):
    """A test file, absolute, and its id."""

    file: Path
    test_id: str


def locate(file: Path, settings: Settings) -> Location:
    """Return the absolute path and the id of a test file, which need not exist.

    Raises:
        RegistrationError: It lies outside the root, or its name cannot name an id or a standard.
    """
    # The link, not its target, is the test: only the folder is resolved.
    absolute = Path(os.path.abspath(file))
    absolute = absolute.parent.resolve() / absolute.name
    test_id = id_below(settings.root.resolve(), absolute)
    if test_id is None:
        raise RegistrationError(
            f"lies outside the root {settings.root}", where=file, hint="run the tool from the repository of the test"
        )
    if not test_id.isprintable():
        # Control characters, and the surrogates that stand for bytes that are not UTF-8.
        raise RegistrationError("the path of a test file must be printable UTF-8", where=ascii(test_id))
    if "." in absolute.stem:
        # `test_a.b` on platform `c` and `test_a` on platform `b.c` would share a standard.
        raise RegistrationError(
            "the name of a test file may hold no dot but that of .py: its stem names its standards", where=test_id
        )
    return Location(absolute, test_id)


def id_below(root: PurePath, file: PurePath) -> str | None:
    """Return a file's path from ``root``, with ``/`` on every system; None if it lies elsewhere."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else None
