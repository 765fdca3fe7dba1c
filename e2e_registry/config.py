"""Settings of a repository: ``[tool.e2e_registry]`` in its ``pyproject.toml``, checked once when they are read.

Folders are kept as the user wrote them, POSIX and relative to the root, because ids and recordings must not depend
on where a checkout lies; the ``*_dir`` properties give the absolute paths.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from e2e_registry.errors import UsageError

DEFAULT_TEST_FOLDERS = ("tests/e2e",)
DEFAULT_STANDARDS_FOLDER = "tests/ci/fixtures/e2e_standards"
DEFAULT_RUN_FOLDER = ".e2e_runs"

#: Version facts that a repository may add to its platform slugs, beside the ones that every slug carries.
PLATFORM_AXES = ("cuda", "cudnn", "diffusers", "driver", "nccl", "numpy", "python", "ray", "torch", "transformers")

PLATFORM_TAG_VARIABLE = "E2E_REGISTRY_PLATFORM_TAG"

_SLUG = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
SLUG_RULE = "letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"


def is_slug(text: str) -> bool:
    """Whether ``text`` can stand in a file name on every system (see :data:`SLUG_RULE`)."""
    return _SLUG.fullmatch(text) is not None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a hint that names the closest known name, or all of them if none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


@dataclass(frozen=True)
class Settings:
    """What a repository says about its tests.

    Attributes:
        root: Absolute folder that test ids, scripts and all folders below are relative to.
        test_folders: Folders that are searched for ``test_*.py``.
        standards_folder: Folder of the committed standards.
        run_folder: Folder of kept runs.
        suites: Known suite names; empty if any name will do.
        labels: Known labels; empty if any label will do.
        platform_axes: Which of :data:`PLATFORM_AXES` join the platform slug.
        platforms: Platform slug to the CI runner labels that offer it.
        platform_tag: Suffix of the platform slug, from ``E2E_REGISTRY_PLATFORM_TAG``.
        source: The file the settings were read from; None if they are all defaults.
    """

    root: Path
    test_folders: tuple[str, ...] = DEFAULT_TEST_FOLDERS
    standards_folder: str = DEFAULT_STANDARDS_FOLDER
    run_folder: str = DEFAULT_RUN_FOLDER
    suites: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    platform_axes: tuple[str, ...] = ()
    platforms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    platform_tag: str | None = None
    source: Path | None = None

    @property
    def test_dirs(self) -> tuple[Path, ...]:
        """The test folders as absolute paths."""
        return tuple(self.root / folder for folder in self.test_folders)

    @property
    def standards_dir(self) -> Path:
        """The standards folder as an absolute path."""
        return self.root / self.standards_folder

    @property
    def run_dir(self) -> Path:
        """The folder of kept runs as an absolute path; one run is a folder below it."""
        return self.root / self.run_folder

    def standard_path(self, stem: str, platform: str) -> Path:
        """Return where the standard of the test file ``<stem>.py`` on ``platform`` lies.

        Raises:
            UsageError: The slug cannot stand in a file name, or the stem holds a dot, which would make
                ``<stem>.<platform>.parquet`` ambiguous.
        """
        if not is_slug(platform):
            raise UsageError(f"{platform!r} is not a platform slug", hint=f"a slug holds {SLUG_RULE}")
        if not stem or any(char in stem for char in "./\\"):
            raise UsageError(f"{stem!r} is not the stem of a test file", hint="a stem holds no dot and no separator")
        return self.standards_dir / f"{stem}.{platform}.parquet"


def load_settings(start: Path, *, environ: Mapping[str, str] | None = None) -> Settings:
    """Find and read the settings that hold for ``start``.

    The root is the folder of the nearest ``pyproject.toml`` with ``[tool.e2e_registry]``, else of the nearest
    ``pyproject.toml``, else the top of the git work tree, else ``start`` itself. The search does not leave the git
    work tree, so that a stray file in a home folder cannot move the root out of the repository.

    Args:
        start: A folder, or a file in it.
        environ: Where ``E2E_REGISTRY_PLATFORM_TAG`` is looked up; the process's environment by default.

    Raises:
        UsageError: A file cannot be read, or a key is unknown, of the wrong type, or out of its range; ``where``
            names the file and the key.
    """
    tag = _platform_tag(os.environ if environ is None else environ)
    start = start.resolve()
    folder = start.parent if start.is_file() else start
    nearest: Path | None = None
    for candidate in _enclosing_folders(folder):
        file = candidate / "pyproject.toml"
        if not os.path.isfile(file):
            continue
        nearest = nearest or candidate
        section = _read_section(file)
        if section is not None:
            return _Section(file, section).settings(tag)
    root = nearest or _git_top_level(folder) or folder
    return Settings(root=root, platform_tag=tag)


def _enclosing_folders(folder: Path) -> Iterator[Path]:
    for candidate in (folder, *folder.parents):
        yield candidate
        if _is_git_top_level(candidate):
            return


def _git_top_level(folder: Path) -> Path | None:
    return next((candidate for candidate in (folder, *folder.parents) if _is_git_top_level(candidate)), None)


def _is_git_top_level(folder: Path) -> bool:
    # A linked work tree or a submodule holds a `.git` file, not a folder. `os.path` answers False where a folder
    # above may not be searched, `Path.exists` would raise.
    return os.path.exists(folder / ".git")


def _platform_tag(environ: Mapping[str, str]) -> str | None:
    tag = environ.get(PLATFORM_TAG_VARIABLE, "")
    if not tag:
        return None
    if not is_slug(tag):
        raise UsageError(
            f"{tag!r} cannot end a platform slug", where=PLATFORM_TAG_VARIABLE, hint=f"use {SLUG_RULE}, or unset it"
        )
    return tag


def _read_section(file: Path) -> object:
    """Return ``tool.e2e_registry`` of a ``pyproject.toml``, None if it has none."""
    try:
        # tomllib refuses the byte order mark that some editors write, with a message that does not name it.
        document = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=file) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}", where=file) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"is not valid TOML: {error}", where=file) from error
    tool = document.get("tool", {})
    return tool.get("e2e_registry") if isinstance(tool, dict) else None


class _Section:
    """``[tool.e2e_registry]`` of one file, being checked."""

    def __init__(self, file: Path, section: object) -> None:
        self.file = file
        if not isinstance(section, dict):
            raise UsageError(
                f"expected a table, not {_describe(section)}",
                where=f"{file}:tool.e2e_registry",
                hint="write [tool.e2e_registry]",
            )
        self.section: dict[str, Any] = section

    def settings(self, platform_tag: str | None) -> Settings:
        """Check every key and return the settings."""
        known = ("test_folders", "standards_folder", "run_folder", "suites", "labels", "platform_axes", "platforms")
        for key in self.section:
            if key not in known:
                raise self.error(key, "unknown key", did_you_mean(key, known))
        settings = Settings(
            root=self.file.parent,
            test_folders=self.test_folders(),
            standards_folder=self.folder("standards_folder", DEFAULT_STANDARDS_FOLDER),
            run_folder=self.folder("run_folder", DEFAULT_RUN_FOLDER),
            suites=self.names("suites"),
            labels=self.names("labels"),
            platform_axes=self.platform_axes(),
            platforms=self.platforms(),
            platform_tag=platform_tag,
            source=self.file,
        )
        self.check_overlaps(settings)
        return settings

    def error(self, key: str, message: str, hint: str) -> UsageError:
        return UsageError(message, where=f"{self.file}:tool.e2e_registry.{key}", hint=hint)

    def names(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return a list of distinct, non-empty strings."""
        value = self.section.get(key, list(default))
        hint = f'expected a list of strings: {key} = ["..."]'
        if not isinstance(value, list):
            raise self.error(key, f"must be a list of strings, not {_describe(value)}", hint)
        for at, item in enumerate(value):
            if not isinstance(item, str):
                raise self.error(f"{key}[{at}]", f"must be a string, not {_describe(item)}", hint)
            if not item.strip() or item != item.strip():
                raise self.error(
                    f"{key}[{at}]", f"{item!r} is empty or has spaces around it", "remove the spaces or the entry"
                )
            if item in value[:at]:
                raise self.error(f"{key}[{at}]", f"{item!r} is listed twice", "remove one of the two")
        return tuple(value)

    def test_folders(self) -> tuple[str, ...]:
        folders = self.names("test_folders", DEFAULT_TEST_FOLDERS)
        if not folders:
            raise self.error("test_folders", "is empty: no test would ever be found", 'expected e.g. ["tests/e2e"]')
        return tuple(self.relative(f"test_folders[{at}]", folder) for at, folder in enumerate(folders))

    def folder(self, key: str, default: str) -> str:
        value = self.section.get(key, default)
        if not isinstance(value, str) or not value.strip():
            raise self.error(
                key, f"must be a folder, not {_describe(value)}", f'expected a string: {key} = "{default}"'
            )
        return self.relative(key, value)

    def relative(self, key: str, text: str) -> str:
        """Return ``text`` normalised if it names a folder below the root."""
        problem = escape_from_root(text)
        if problem is not None:
            raise self.error(key, f"{text!r} {problem}", "expected a path below the folder of this file, with '/'")
        return PurePosixPath(text).as_posix()

    def platform_axes(self) -> tuple[str, ...]:
        axes = self.names("platform_axes")
        for at, axis in enumerate(axes):
            if axis not in PLATFORM_AXES:
                raise self.error(
                    f"platform_axes[{at}]", f"unknown platform axis {axis!r}", did_you_mean(axis, PLATFORM_AXES)
                )
        return axes

    def platforms(self) -> dict[str, tuple[str, ...]]:
        """Return the runner labels by slug; one label may be written without its list."""
        table = self.section.get("platforms", {})
        if not isinstance(table, dict):
            raise self.error(
                "platforms", f"must be a table, not {_describe(table)}", 'expected slug = ["runner-label"]'
            )
        return {slug: self.runner_labels(slug, value) for slug, value in table.items()}

    def runner_labels(self, slug: str, value: object) -> tuple[str, ...]:
        key = f"platforms.{slug}"
        if not is_slug(slug):
            raise self.error(key, f"{slug!r} is not a platform slug", f"a slug holds {SLUG_RULE}")
        if isinstance(value, dict):
            raise self.error(
                key, "is a table", f'a slug that holds a dot needs quotes: "{slug}...." = ["runner-label"]'
            )
        labels = [value] if isinstance(value, str) else value
        if not isinstance(labels, list) or not labels or not all(isinstance(x, str) and x.strip() for x in labels):
            raise self.error(
                key,
                f"must be runner labels, not {_describe(value)}",
                f'expected a list of strings: {slug} = ["ubuntu-24.04"]',
            )
        return tuple(labels)

    def check_overlaps(self, settings: Settings) -> None:
        """Refuse folders in one another where that would lose files, or hide sources from a run's source tree."""
        standards, runs = PurePosixPath(settings.standards_folder), PurePosixPath(settings.run_folder)
        if standards.is_relative_to(runs) or runs.is_relative_to(standards):
            raise self.error(
                "run_folder",
                f"{str(runs)!r} overlaps standards_folder {str(standards)!r}",
                "kept runs are pruned; choose apart",
            )
        for test_folder in settings.test_folders:
            for key, outer in (("standards_folder", standards), ("run_folder", runs)):
                if PurePosixPath(test_folder).is_relative_to(outer):
                    raise self.error(
                        key,
                        f"{str(outer)!r} contains test folder {test_folder!r}, whose files would not count as sources",
                        "choose a folder apart from the tests, or below them",
                    )


def escape_from_root(text: str) -> str | None:
    """Say why a path is not a POSIX path below the root, as a predicate of it; None if it is one."""
    windows = PureWindowsPath(text)
    if text.startswith(("/", "~")) or windows.drive:
        return "is not relative"
    if "\\" in text or "\0" in text:
        return "holds a backslash or a NUL"
    if ".." in PurePosixPath(text).parts:
        return "leaves the root through '..'"
    return None


def _describe(value: object) -> str:
    """Name a value from a TOML file and its TOML type."""
    if isinstance(value, bool | int | float | str):
        names = {bool: "boolean", int: "integer", float: "float", str: "string"}
        return f"the {names[type(value)]} {value!r}"
    return "an array" if isinstance(value, list) else "a table" if isinstance(value, dict) else "a date or time"
