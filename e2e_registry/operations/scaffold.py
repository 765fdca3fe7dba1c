"""Writes what another repository needs to start with: settings, an example, and what git and CI should know."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import importlib.resources
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e_registry.config import SLUG_RULE, Settings, is_slug, load_settings
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.storage import parse_json, replacing

EXAMPLE_SUITE = "short"
DEFAULT_PLATFORM = "cpu-x86_64-portable"
DEFAULT_RUNNER = "ubuntu-24.04"

RECIPE = "scripts/run_linear_model.py"
TEST_NAME = "test_linear_model.py"
WORKFLOW = ".github/workflows/e2e.yml"
PRE_COMMIT = ".pre-commit-config.yaml"

_ACTION_RULE = "OWNER/REPOSITORY@REF, such as a tag or, better, a commit id"
_ACTION = re.compile(r"[\w.-]+/[\w./-]+@[\w./-]+")


class FileState(enum.Enum):
    """What is to be done with a file."""

    CREATED = "created"
    APPENDED = "appended to"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    CONFLICT = "conflict"
    KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class ScaffoldOptions:
    """What the repository's owner decides.

    Attributes:
        platform: The slug of CI's platform.
        runners: The labels of the runner that offers it; None for those of the settings that are there, else the
            default.
        action: This project's composite action, as a workflow names it; None to write no workflow.
    """

    platform: str = DEFAULT_PLATFORM
    runners: Sequence[str] | None = None
    action: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file of the scaffold.

    Attributes:
        path: From the repository's root.
        state: What is to be done with it.
        content: What it will hold; what it holds where it stays as it is.
        note: What its owner should know.
    """

    path: str
    state: FileState
    content: bytes = b""
    note: str | None = None

    @property
    def is_written(self) -> bool:
        """Whether the file is to be written."""
        return self.state in (FileState.CREATED, FileState.APPENDED, FileState.REPLACED)


def known_action() -> str | None:
    """Return this project's action at the very commit that is installed; None where the installation does not say.

    pip notes where a package from version control came from (PEP 610). A wheel from a folder or an index has no such
    note, and then nobody but the user knows where the action is published.
    """
    try:
        noted = importlib.metadata.distribution("e2e-registry").read_text("direct_url.json")
        origin = parse_json(noted or "{}")
        commit = origin["vcs_info"]["commit_id"]
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", origin["url"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    return None if match is None else f"{match[1]}@{commit}"


def has_settings(root: Path) -> bool:
    """Whether the repository has settings already; they hold, so nobody needs to be asked for them.

    Raises:
        UsageError: They cannot be accepted.
    """
    return root.is_dir() and load_settings(root, environ={}).source == (root / "pyproject.toml").resolve()


def plan_scaffold(root: Path, options: ScaffoldOptions) -> list[PlannedFile]:
    """Return what would be written, without writing it.

    Args:
        root: The repository's root.
        options: What its owner decides.

    Raises:
        UsageError: The root is no folder, the platform or the action cannot be one, or ``pyproject.toml`` cannot be
            read or extended.
        StorageError: A file cannot be read.
    """
    _check(root, options)
    pyproject = _plan_settings(root, options)
    settings = _settings(root, pyproject)
    attributes = f"{settings.standards_folder}/*.parquet"
    planned = [
        pyproject,
        *_plan_example(root, settings),
        _plan_line(
            root,
            ".gitattributes",
            f"{attributes} binary -merge",
            comment="# Two recordings cannot be merged: record again.",
            is_there=lambda line: line.split()[:1] == [attributes],
        ),
        _plan_line(
            root,
            ".gitignore",
            f"{settings.run_folder}/",
            is_there=lambda line: line.strip("/ ") == settings.run_folder,
        ),
        _plan_pre_commit(root),
    ]
    if options.action is not None:
        workflow = _template("workflow.yml").replace(b"OWNER/e2e_registry@REF", options.action.encode())
        runners = ", ".join(_runners(settings, options))
        planned.append(_plan_own(root, WORKFLOW, workflow.replace(b"ubuntu-24.04", runners.encode())))
    return planned


def write_scaffold(root: Path, planned: Sequence[PlannedFile]) -> None:
    """Write the files that are to be written; each is whole or not there.

    Raises:
        StorageError: One cannot be written; those before it are there, and another call goes on from there.
    """
    for file in planned:
        if file.is_written:
            with replacing(root / file.path) as temporary:
                temporary.write_bytes(file.content)


def resolved(file: PlannedFile, *, replace: bool) -> PlannedFile:
    """Return a file in conflict as one to replace, or one to keep."""
    return dataclasses.replace(file, state=FileState.REPLACED if replace else FileState.KEPT)


# ------------------------------------------------------------------------------------------------ one file


def _check(root: Path, options: ScaffoldOptions) -> None:
    if not root.is_dir():
        raise UsageError("there is no such folder", where=root)
    if not is_slug(options.platform):
        raise UsageError(f"{options.platform!r} is not a platform slug", where="--platform", hint=SLUG_RULE)
    runners = (DEFAULT_RUNNER,) if options.runners is None else options.runners
    if not runners or any(not re.fullmatch(r"[\w.-]+", label) for label in runners):
        raise UsageError(f"{', '.join(runners)!r} are no runner labels", where="--runner", hint="such as ubuntu-24.04")
    if options.action is not None and not _ACTION.fullmatch(options.action):
        raise UsageError(f"{options.action!r} names no action", where="--action", hint=_ACTION_RULE)


def _template(name: str) -> bytes:
    return importlib.resources.files("e2e_registry").joinpath("templates", name).read_bytes()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=path) from error


def _plan_own(root: Path, name: str, content: bytes) -> PlannedFile:
    """Plan a file that is ours alone: one of other content is in the way."""
    found = _read(root / name)
    state = FileState.CREATED if found is None else FileState.UNCHANGED if found == content else FileState.CONFLICT
    return PlannedFile(path=name, state=state, content=content)


def _plan_line(
    root: Path, name: str, line: str, *, is_there: Callable[[str], bool], comment: str | None = None
) -> PlannedFile:
    """Plan a line at the end of a file that others write to."""
    found = _read(root / name)
    if found is not None and any(is_there(old) for old in found.decode(errors="replace").splitlines()):
        return PlannedFile(path=name, state=FileState.UNCHANGED, content=found)
    text = f"{line}\n" if comment is None else f"{comment}\n{line}\n"
    state = FileState.CREATED if found is None else FileState.APPENDED
    return PlannedFile(path=name, state=state, content=_appended(found or b"", text))


def _plan_pre_commit(root: Path) -> PlannedFile:
    """Plan the hook. A file that holds other hooks is never replaced, and YAML is not edited blindly."""
    planned = _plan_own(root, PRE_COMMIT, _template("pre-commit-config.yaml"))
    if planned.state is not FileState.CONFLICT:
        return planned
    found = _read(root / PRE_COMMIT) or b""
    has_hook = b"e2e-registry" in found
    note = None if has_hook else f"add the hook yourself:\n{planned.content.decode()}"
    return PlannedFile(path=PRE_COMMIT, state=FileState.KEPT, content=found, note=note)


def _plan_settings(root: Path, options: ScaffoldOptions) -> PlannedFile:
    """Plan ``pyproject.toml``: settings at its end, unless it has some."""
    name = "pyproject.toml"
    found = _read(root / name)
    if found is not None and has_settings(root):
        return PlannedFile(path=name, state=FileState.UNCHANGED, content=found, note="it has settings, which hold")
    text = _settings_text(options)
    content = _appended(found or b"", f"\n{text}" if found else text)
    try:
        tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise UsageError(
            f"settings cannot be added at its end: {error}", where=root / name, hint=f"add them yourself:\n{text}"
        ) from None
    return PlannedFile(path=name, state=FileState.CREATED if found is None else FileState.APPENDED, content=content)


def _settings_text(options: ScaffoldOptions) -> str:
    runners = json.dumps(list(options.runners or (DEFAULT_RUNNER,)))
    platforms = {options.platform: runners}
    if not options.platform.startswith("cpu-"):
        # The example runs on the CPU, which every runner has.
        platforms[DEFAULT_PLATFORM] = runners
    defaults = Settings(root=Path())
    lines = [
        "[tool.e2e_registry]",
        f"test_folders = {json.dumps(list(defaults.test_folders))}",
        f'standards_folder = "{defaults.standards_folder}"',
        f'run_folder = "{defaults.run_folder}"',
        f'suites = ["{EXAMPLE_SUITE}"]',
        "",
        "# Platforms that CI offers, and the labels of the runners that do.",
        "[tool.e2e_registry.platforms]",
        *(f"{slug if '.' not in slug else json.dumps(slug)} = {labels}" for slug, labels in platforms.items()),
    ]
    return "\n".join(lines) + "\n"


def _settings(root: Path, pyproject: PlannedFile) -> Settings:
    """Return the settings that will hold: those that are there, else the defaults that are written."""
    return load_settings(root, environ={}) if pyproject.state is FileState.UNCHANGED else Settings(root=root)


def _runners(settings: Settings, options: ScaffoldOptions) -> Sequence[str]:
    """Return the labels of the workflow's runner: those asked for, those of the settings, or the default."""
    if options.runners is not None:
        return options.runners
    declared = settings.platforms.get(options.platform) or next(iter(settings.platforms.values()), None)
    return declared or (DEFAULT_RUNNER,)


def _plan_example(root: Path, settings: Settings) -> list[PlannedFile]:
    """Plan the example recipe and its test; none where there are tests, since they are its owner's by now."""
    if settings.source is not None and any(sorted(folder.rglob("test_*.py")) for folder in settings.test_dirs):
        return []
    return [
        _plan_own(root, RECIPE, _template("run_linear_model.py")),
        _plan_own(root, f"{settings.test_folders[0]}/{TEST_NAME}", _example(settings)),
    ]


def _example(settings: Settings) -> bytes:
    """Return the example test, in a suite that the settings know."""
    suites = settings.suites or (EXAMPLE_SUITE,)
    suite = EXAMPLE_SUITE if EXAMPLE_SUITE in suites else suites[0]
    return _template(TEST_NAME).replace(f'suite="{EXAMPLE_SUITE}"'.encode(), f"suite={json.dumps(suite)}".encode())


def _appended(found: bytes, text: str) -> bytes:
    """Return a file with text at its end, in its own line ends; what was there keeps its bytes."""
    line_end = "\r\n" if b"\r\n" in found else "\n"
    gap = "" if not found or found.endswith(b"\n") else line_end
    return found + (gap + text.replace("\n", line_end)).encode()
