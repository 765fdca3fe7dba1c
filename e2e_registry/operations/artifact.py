"""Reads what CI uploaded: a zip, a folder of such zips or of what was unpacked from them, or one run's folder.

An artifact may come from a stranger's pull request, so none of its names becomes a path: its members are found by the
names that a recording has, and copied under numbers into a temporary folder, each kind of file with a limit of its
own. Parquet files in it are not opened at all; a standard is made from the recording.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from e2e_registry.errors import ArtifactError, UsageError
from e2e_registry.operations.results import RESULTS_FILE, RESULTS_FORMAT
from e2e_registry.printable import STEERING
from e2e_registry.recording.layout import METRICS_FILE, PLAIN_FILE, RUN_FILE, STATE_FILE
from e2e_registry.storage import parse_json

_BLOCK = 1 << 20
# A single read of this size is a list of millions of names: zipfile reads the central directory at once.
_LONGEST_READ = 64 << 20
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1

_JSON_FILES = {RESULTS_FILE, RUN_FILE}

Parts = tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """How much of an artifact is taken.

    Attributes:
        members: Files that are looked at.
        json_bytes: Of one JSON file: results, the launcher's facts, a writer's state.
        total_bytes: Of all that is copied, unpacked.
    """

    members: int = 100_000
    json_bytes: int = 64 << 20
    total_bytes: int = 2 << 30


@dataclass(frozen=True)
class _Member:
    """One regular file of an artifact that has the name of a recording's file."""

    label: str
    open: Callable[[], contextlib.AbstractContextManager[IO[bytes]]]


class _NotJsonError(ArtifactError):
    """A file holds no JSON document, or one that nobody could work with."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run in an artifact.

    Attributes:
        label: Where it lies, for people: ``artifact.zip/test_stub/20261129T...``.
        at: Its place, which is no path.
        started_ns: When the run was started, by its own account; 0 if it does not say.
        test: Id of the test that was run, by its own account.
        fault: Why its own account cannot be read, if so: the run is refused, and the others are not.
    """

    label: str
    at: Parts
    started_ns: int
    test: str | None
    fault: str | None = None

    @property
    def run_id(self) -> str:
        """What names the run wherever its folder lies: the test's stem and the run's time and number."""
        return "/".join(self.at[-2:])


@dataclass(frozen=True)
class ArtifactEntry:
    """One test on one platform, as the newest attempt in the artifact left it.

    Attributes:
        subject: The test's id, as the artifact says.
        platform: The platform, as the artifact says; None if it does not.
        verdict: The verdict of CI; None where no check was made, as of a run that was only recorded.
        repeat: What CI says of the run's repetition: ``repeatable``, ``nondeterministic`` or None.
        folder: The run; None if the artifact does not hold it.
    """

    subject: str
    platform: str | None
    verdict: str | None
    repeat: str | None
    folder: RunFolder | None


@dataclass
class Artifact:
    """An artifact, opened by :func:`open_artifact`.

    Attributes:
        label: What the user called it.
        entries: Its tests, by id and platform.
    """

    label: str
    limits: Limits
    _staging: Path
    _prefix: Parts = ()  # of a run's own folder, given alone: the two parts of its path that name the run
    _members: dict[Parts, _Member] = field(default_factory=dict)
    _names: dict[Parts, list[str]] = field(default_factory=lambda: defaultdict(list))
    _num_seen: int = 0
    _num_copied: int = 0
    _staged: dict[Parts, Path] = field(default_factory=dict)
    _folders: dict[Parts, RunFolder] = field(default_factory=dict)
    _folders_by_id: dict[str, RunFolder] = field(default_factory=dict)
    _folders_in: dict[Parts, list[RunFolder]] = field(default_factory=lambda: defaultdict(list))
    entries: tuple[ArtifactEntry, ...] = ()

    # -------------------------------------------------------------------------------------------- what is in it

    def _count(self) -> None:
        self._num_seen += 1
        if self._num_seen > self.limits.members:
            raise ArtifactError(
                f"it holds more than {self.limits.members:,} files",
                where=self.label,
                hint="give the artifact alone, not a folder that holds more",
            )

    def _add(self, at: Parts, member: _Member) -> None:
        if at in self._members:
            raise ArtifactError("two files have one name", where=member.label, hint=_NOT_OURS)
        self._members[at] = member
        self._names[at[:-1]].append(at[-1])

    def _read_json(self, at: Parts) -> Any:
        member = self._members[at]
        with member.open() as file:
            raw = file.read(self.limits.json_bytes + 1)
        if len(raw) > self.limits.json_bytes:
            raise ArtifactError(f"it is larger than {self.limits.json_bytes:,} bytes", where=member.label)
        try:
            data = parse_json(raw)
        except ValueError as error:
            raise _NotJsonError(f"it is not JSON: {error}", where=member.label) from None
        unprintable = _first_unprintable(data)
        if unprintable is not None:
            raise ArtifactError(f"it holds control characters: {unprintable!a:.80}", where=member.label, hint=_NOT_OURS)
        return data

    def _find_folders(self) -> None:
        for at in self._members:
            if at[-1] != RUN_FILE:
                continue
            facts, fault = {}, None
            try:
                facts = self._read_json(at)
            except _NotJsonError as error:
                fault = f"{RUN_FILE}: {error.message}"
            facts = facts if isinstance(facts, dict) else {}
            started, recipe = facts.get("started_ns"), facts.get("recipe")
            test = recipe.get("test") if isinstance(recipe, dict) else None
            folder = self._folders[at[:-1]] = RunFolder(
                label=self._place(at[:-1]),
                at=at[:-1],
                started_ns=started if type(started) is int else 0,
                test=test if isinstance(test, str) else None,
                fault=fault,
            )
            self._folders_by_id.setdefault(folder.run_id, folder)
            self._folders_in[folder.at[:-1]].append(folder)

    def _find_entries(self) -> None:
        results = sorted(at for at in self._members if at[-1] == RESULTS_FILE and at[:-1] not in self._folders)
        found = [entry for at in results for entry in self._entries_of(at)]
        if not results:
            found = [
                ArtifactEntry(folder.test or folder.label, None, None, None, folder)
                for folder in self._folders.values()
                if folder.test is not None or folder.fault is not None
            ]
        newest: dict[tuple[object, ...], ArtifactEntry] = {}
        for entry in sorted(found, key=_attempt):
            # Without results only the recording says of which platform a run is, and a part holds one job's.
            part = entry.folder.at[:-2] if entry.folder is not None and entry.verdict is None else ()
            newest[entry.subject, entry.platform, part] = entry
        self.entries = tuple(newest[key] for key in sorted(newest, key=str))

    def _entries_of(self, at: Parts) -> Iterator[ArtifactEntry]:
        """Read one ``results.json``; what lies in it decides nothing but which runs are looked at."""
        label = self._members[at].label
        data = self._read_json(at)
        tests = data.get("tests") if isinstance(data, dict) else None
        if not isinstance(tests, list):
            raise ArtifactError("it holds no results of tests", where=label, hint=_NOT_OURS)
        if data.get("format") != RESULTS_FORMAT:
            raise ArtifactError(
                f"results format {data.get('format')!r} is unknown",
                where=label,
                hint=f"this version reads format {RESULTS_FORMAT}; accept it with the version that wrote it",
            )
        for test in tests:
            entry = test if isinstance(test, dict) else {}
            subject, platform, verdict = (entry.get(name) for name in ("subject", "platform", "verdict"))
            if not isinstance(subject, str) or not isinstance(verdict, str):
                raise ArtifactError("a test in it has no id or no verdict", where=label, hint=_NOT_OURS)
            yield ArtifactEntry(
                subject,
                platform if isinstance(platform, str) else None,
                verdict,
                _repeat_label(entry.get("repeat")),
                self._folder_of(entry.get("run"), at[:-1]),
            )

    def _folder_of(self, run: object, beside: Parts) -> RunFolder | None:
        """Find the run that results name, beside them or in another part of the artifact; only names are compared."""
        if not isinstance(run, str):
            return None
        tail = tuple(run.split("/")[-2:])
        return self._folders.get((*beside, *tail)) or self._folders_by_id.get("/".join(tail))

    def others_beside(self, folder: RunFolder) -> list[RunFolder]:
        """Return the other runs of the same test in the same part of the artifact, newest first."""
        beside = self._folders_in[folder.at[:-1]]
        others = [other for other in beside if other.test == folder.test and other is not folder]
        return sorted(others, key=lambda other: other.started_ns, reverse=True)

    # -------------------------------------------------------------------------------------------- copying

    def stage(self, folder: RunFolder) -> Path:
        """Copy a run's recording into a folder of our own, and return that.

        Raises:
            ArtifactError: A file is damaged, or the artifact is larger than its limit.
        """
        if folder.at in self._staged:
            return self._staged[folder.at]
        target = self._staging / str(len(self._staged))
        target.mkdir()
        self._staged[folder.at] = target
        with _os_errors(folder.label):
            for name in self._names[folder.at]:
                self._copy(self._members[*folder.at, name], target / name)
                if _is_json(name):
                    self._read_json((*folder.at, name))  # for its checks
        return target

    def _copy(self, member: _Member, target: Path) -> None:
        limit = self.limits.json_bytes if _is_json(target.name) else self.limits.total_bytes
        copied = 0
        with member.open() as source, target.open("xb") as file:
            while block := source.read(_BLOCK):
                copied += len(block)
                self._num_copied += len(block)
                if copied > limit or self._num_copied > self.limits.total_bytes:
                    raise ArtifactError(
                        f"it unpacks to more than {min(limit, self.limits.total_bytes):,} bytes",
                        where=member.label,
                        hint="a run that large: unpack it yourself, and `e2e-registry adopt --run FOLDER`",
                    )
                file.write(block)

    def named(self, text: str) -> str:
        """Return a message with the artifact's places where it names our copies of them."""
        for at, target in self._staged.items():
            text = text.replace(str(target), self._place(at))
        return text

    def _place(self, at: Parts) -> str:
        return "/".join((self.label, *at[len(self._prefix) :]))


_NOT_OURS = "this is not what e2e-registry wrote and CI uploaded"


@contextlib.contextmanager
def open_artifact(path: Path, *, label: str | None = None, limits: Limits | None = None) -> Iterator[Artifact]:
    """Open an artifact; what is copied from it is gone on leaving.

    Args:
        path: A zip, a folder, or a run's folder.
        label: What to call it; its path by default.
        limits: How much of it is taken.

    Raises:
        UsageError: There is no such path, or it is neither a zip nor a folder.
        ArtifactError: It is damaged, larger than its limits, has names that leave it or links, or holds no run.
    """
    if not path.exists():
        raise UsageError("there is no such artifact", where=path, hint="give a zip, a folder, or a run's folder")
    with contextlib.ExitStack() as stack:
        staging = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-registry-")))
        artifact = Artifact(label=str(path) if label is None else label, limits=limits or Limits(), _staging=staging)
        with _os_errors(artifact.label):
            if path.is_dir():
                _index_folder(artifact, path, stack)
            else:
                _index_zip(artifact, path, (), stack)
            artifact._find_folders()
            artifact._find_entries()
        if not artifact.entries:
            raise ArtifactError(
                "it holds no results and no run of a test",
                where=artifact.label,
                hint=f"an artifact is the run folder, whole: {RESULTS_FILE}, and <test>/<run>/{RUN_FILE}",
            )
        yield artifact


@contextlib.contextmanager
def _os_errors(label: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"it cannot be read, or copied: {error.strerror or error}", where=label) from error


def _attempt(entry: ArtifactEntry) -> int:
    return -1 if entry.folder is None else entry.folder.started_ns


def _repeat_label(repeat: object) -> str | None:
    """Return what CI found when it ran the test again; None if it did not."""
    label = repeat.get("label") if isinstance(repeat, dict) else None
    return label if isinstance(label, str) else None


def _is_recorded(name: str) -> bool:
    return name == PLAIN_FILE or _is_json(name) or METRICS_FILE.fullmatch(name) is not None


def _is_json(name: str) -> bool:
    return name in _JSON_FILES or STATE_FILE.fullmatch(name) is not None


def _first_unprintable(data: Any) -> str | None:
    """Return a string of a JSON document that a terminal would obey instead of show."""
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str) and STEERING.search(value):  # no recorded fact needs it
            return value
    return None


# ------------------------------------------------------------------------------------------------ folders


def _index_folder(artifact: Artifact, root: Path, stack: contextlib.ExitStack) -> None:
    """Find the files of recordings in a folder, and in the zips at its top; links are not followed."""
    if (root / RUN_FILE).is_file():
        artifact._prefix = root.resolve().parts[-2:]
    for parent, folders, names in os.walk(root):
        folders.sort()
        at = (*artifact._prefix, *Path(parent).relative_to(root).parts)
        for name in sorted(names):
            artifact._count()
            path = Path(parent, name)
            if not at and name.endswith(".zip"):
                _index_zip(artifact, path, (name,), stack)
            elif _is_recorded(name):
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise ArtifactError("it is a link or a device, not a file", where=path, hint=_NOT_OURS)
                artifact._add((*at, name), _Member(str(path), lambda path=path: _open_file(path)))  # type: ignore[misc]


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[IO[bytes]]:
    # Neither waits for the other end of a pipe nor goes through a link that was put there meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtifactError("it is not a file", where=path, hint=_NOT_OURS)
        yield file


# ------------------------------------------------------------------------------------------------ zips


class _BoundedFile(io.FileIO):
    """A file that is never read in one gulp: the size of the next read is what a zip's own header says."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        if size > _LONGEST_READ:
            raise zipfile.BadZipFile(f"its list of files is longer than {_LONGEST_READ:,} bytes")
        return super().read(size)


def _index_zip(artifact: Artifact, path: Path, prefix: Parts, stack: contextlib.ExitStack) -> None:
    """Find the files of recordings in a zip. Names that leave it, links and duplicates refuse the whole of it."""
    label = "/".join((artifact.label, *prefix))
    with _reading(label):
        file = stack.enter_context(_BoundedFile(path))
        archive = stack.enter_context(zipfile.ZipFile(file))
        seen: set[Parts] = set()
        for info in archive.infolist():
            artifact._count()
            at = _checked_name(info, label)
            if at in seen:
                raise ArtifactError("two files have one name", where=f"{label}/{'/'.join(at)}", hint=_NOT_OURS)
            seen.add(at)
            if not info.is_dir() and _is_recorded(at[-1]):
                _check_storage(info, f"{label}/{'/'.join(at)}")
                member_label = f"{label}/{'/'.join(at)}"
                opener = _zip_opener(archive, info, member_label)
                artifact._add((*prefix, *at), _Member(member_label, opener))


def _zip_opener(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, label: str
) -> Callable[[], contextlib.AbstractContextManager[IO[bytes]]]:
    @contextlib.contextmanager
    def opened() -> Iterator[IO[bytes]]:
        with _reading(label), archive.open(info) as file:
            yield file

    return opened


@contextlib.contextmanager
def _reading(label: str) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        text = str(error) or type(error).__name__
        raise ArtifactError(f"it is not a readable zip: {text!a:.120}", where=label, hint="download it again") from None


def _checked_name(info: zipfile.ZipInfo, label: str) -> Parts:
    """Return a member's name as parts.

    Raises:
        ArtifactError: It is absolute, leaves the archive, is no plain text, or the member is a link or a device.
    """
    name = info.orig_filename
    parts = tuple(name.removesuffix("/").split("/"))
    is_plain = name.isprintable() and not re.search(r'[\\:*?"<>|]', name)
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise ArtifactError(f"it holds the name {name!a:.120}, which is refused", where=label, hint=_NOT_OURS)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArtifactError(f"{name!a:.120} is a link or a device", where=label, hint=_NOT_OURS)
    return parts


def _check_storage(info: zipfile.ZipInfo, label: str) -> None:
    if info.flag_bits & _ENCRYPTED or info.compress_type not in _COMPRESSIONS:
        raise ArtifactError("it is encrypted or compressed in an unusual way", where=label, hint=_NOT_OURS)
