"""`MetricRecorder`: what a recipe calls. Needs the standard library alone."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e_registry.dtypes import DIGEST, INT64, INT64_MAX, INT64_MIN, UINT64
from e2e_registry.errors import RecordingError, StorageError
from e2e_registry.recording.layout import FORMAT, RANK_MAX, ROLE, RUN_DIR_VARIABLE, metrics_file, name_fault, state_file
from e2e_registry.recording.scalars import ENCODERS, encoder_for

_modules = sys.modules
_getpid = os.getpid
_time_ns = time.time_ns


class MetricRecorder:
    """Writes the series of one writer, named by role and rank, into a run directory.

    The writer's file is claimed when the recorder is constructed, and no second process, nor a second recorder, can
    claim it. Each :meth:`log` and :meth:`log_digest` call is one line, handed to the kernel whole by one write, so
    that a killed process loses no earlier call and tears at most the last line. Calls may come from several threads.
    Beside the values it leaves the process's determinism state, as read at opening, at the first line, when NumPy or
    torch was imported since, and at :meth:`close`.

    Args:
        role: What this process is in the recipe; letters, digits, ``_`` and ``-``. One metric belongs to one role.
        rank: The process's rank in its role, from 0.
        run_dir: Where to write; made if missing. By default ``$E2E_REGISTRY_RUN_DIR``, which the launcher sets.
            Without either, the recorder warns, and records nothing.

    Raises:
        RecordingError: Role or rank cannot name a writer, or the writer's file exists already.
        StorageError: The file cannot be created.
    """

    def __init__(self, *, role: str = "main", rank: int = 0, run_dir: str | Path | None = None) -> None:
        self.role = _checked_role(role)
        self.rank = _checked_rank(rank)
        self._owner = _getpid()
        self._lock = threading.RLock()  # re-entrant, because a signal handler may close() in the middle of a log()
        self._keys: dict[str, str] = {}
        self._seen_libraries: tuple[bool, bool] | None = None
        self._fd: int | None = None
        self._end: str | None = None
        directory = run_dir if run_dir is not None else os.environ.get(RUN_DIR_VARIABLE) or None
        # Absolute, because the state is written later, perhaps after a chdir().
        self.run_dir = None if directory is None else Path(directory).absolute()
        if self.run_dir is None:
            message = f"no run_dir given and {RUN_DIR_VARIABLE} is not set: this MetricRecorder records nothing"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        self._fd = self._claim_file(self.run_dir / metrics_file(self.role, self.rank))
        header = {"format": FORMAT, "role": self.role, "rank": self.rank, "pid": self._owner}
        self._write_line(json.dumps(header) + "\n")
        self._write_state()

    @property
    def path(self) -> Path | None:
        """The file that this writer's values go to; None if nothing is recorded."""
        return None if self.run_dir is None else self.run_dir / metrics_file(self.role, self.rank)

    def log(self, metrics: Mapping[str, object], *, step: int) -> None:
        """Record one value of each metric.

        Args:
            metrics: Name to value: bool, int, float, or a NumPy or torch value of shape ``()`` on any device. The
                dtype is kept: float64 (also Python's float), float32, float16, bfloat16, int64 (also Python's int),
                uint64, bool; narrower integers widen to int64.
            step: The step that the values belong to; an int64. It may not decrease inside a series.

        Raises:
            RecordingError: A name or value cannot be recorded (then nothing of this call is), the recorder is
                closed, or the process is a fork of the one that opened it.
            StorageError: The file cannot be written.
        """
        if self._fd is None:
            self._refuse_if_ended()
            return
        if type(step) is not int or not INT64_MIN <= step <= INT64_MAX:
            step = _whole_step(step)
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            raise RecordingError(f"log() takes a mapping of names to values, not a {type(metrics).__name__}")
        keys = self._keys
        groups: dict[str, list[str]] = {}
        for name, value in metrics.items():
            key = keys.get(name) or self._new_key(name)
            try:
                group, text = (ENCODERS.get(type(value)) or encoder_for(type(value)))(value)
            except RecordingError as error:
                raise RecordingError(error.message, where=f"metric {name!r}, step {step}", hint=error.hint) from None
            if group in groups:
                groups[group].append(key + text)
            else:
                groups[group] = [key + text]
        self._write_groups(step, groups)

    def log_digest(self, name: str, value: object, *, step: int) -> None:
        """Record the SHA-256 of ``value``, for what must be equal but is no number.

        Args:
            name: The metric's name.
            value: A tensor or array of any shape, numeric dtype, stride and device, bytes, a string, a mapping such
                as a ``state_dict``, or a list or tuple such as sample ids. :func:`~e2e_registry.recording.digest_of`
                states the exact bytes that are digested.
            step: As for :meth:`log`.

        Raises:
            RecordingError: As for :meth:`log`; or the value holds something that has no such bytes.
            StorageError: The file cannot be written.
        """
        if self._fd is None:
            self._refuse_if_ended()
            return
        from e2e_registry.recording.digests import digest_of

        if type(step) is not int or not INT64_MIN <= step <= INT64_MAX:
            step = _whole_step(step)
        key = self._new_key(name)
        try:
            digest = digest_of(value)
        except RecordingError as error:
            raise RecordingError(error.message, where=f"metric {name!r}, step {step}", hint=error.hint) from None
        self._write_groups(step, {DIGEST.name: [f'{key}"{digest}"']})

    def close(self) -> None:
        """Write the determinism state once more and close the file; later calls do nothing."""
        if _getpid() != self._owner:  # a fork: the file stays its parent's, and so does the lock's state
            self._shut("closed")
            return
        with self._lock:
            if self._fd is not None:
                self._write_state()
                self._shut("closed")

    def __enter__(self) -> MetricRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MetricRecorder(role={self.role!r}, rank={self.rank}, run_dir={self.run_dir and str(self.run_dir)!r})"

    # --- writing ------------------------------------------------------------------------------------------------------

    def _claim_file(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o644)
        except FileExistsError as error:
            if error.filename != str(path):  # the run directory's name belongs to a file
                raise StorageError("the run directory is a file", where=path.parent) from None
            raise RecordingError(
                f"the file of role {self.role!r}, rank {self.rank} exists already{_claimant(path)}",
                where=path,
                hint="give each process its own role or rank, and each run its own directory",
            ) from None
        except OSError as error:
            raise StorageError(f"cannot create the file: {error.strerror}", where=path) from error

    def _new_key(self, name: str) -> str:
        """Return the JSON text of ``"name": `` and remember it."""
        fault = name_fault(name)
        if fault is not None:
            raise RecordingError(fault)
        key = self._keys[name] = f"{json.dumps(name, ensure_ascii=False)}: "
        return key

    def _write_groups(self, step: int, groups: dict[str, list[str]]) -> None:
        if _getpid() != self._owner:
            raise RecordingError(
                f"process {_getpid()} was forked from process {self._owner}, whose file this is",
                where=self.path,
                hint="construct a MetricRecorder with a role or rank of its own in the forked process",
            )
        line = f'{{"step": {step}, "time_ns": {_time_ns()}'
        for group, items in groups.items():
            line += f', "{group}": {{{", ".join(items)}}}'
        self._write_line(line + "}\n")
        if self._seen_libraries != ("numpy" in _modules, "torch" in _modules):
            with self._lock:
                self._seen_libraries = ("numpy" in _modules, "torch" in _modules)
                self._write_state()

    def _write_line(self, line: str) -> None:
        data = line.encode()
        with self._lock:
            if self._fd is None:  # closed by another thread meanwhile
                self._refuse_if_ended()
                return
            try:
                written = os.write(self._fd, data)
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError as error:
                # Nothing may follow a torn line: readers salvage a tear at the end only.
                self._shut(f"ended by a failed write ({error.strerror})")
                raise StorageError(
                    f"cannot write: {error.strerror}", where=self.path, hint="the recording ends here; run it again"
                ) from error

    def _shut(self, end: str) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._end = end
            os.close(fd)

    def _refuse_if_ended(self) -> None:
        if self._end is not None:
            raise RecordingError(f"this MetricRecorder was {self._end}", where=self.path)

    def _write_state(self) -> None:
        """Leave the determinism state of this process; whatever fails in that must not end the training."""
        if self.run_dir is None:
            return
        path = self.run_dir / state_file(self.role, self.rank)
        try:
            from e2e_registry.determinism.state import read_state

            text = json.dumps(read_state(), indent=1, sort_keys=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader is told instead of the training
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        try:
            _replace_atomically(path, text + "\n")
        except OSError as error:
            warnings.warn(
                f"cannot write {path}: {error.strerror}; the state stays unknown", RuntimeWarning, stacklevel=3
            )


def _checked_role(role: object) -> str:
    if isinstance(role, str) and ROLE.fullmatch(role):
        return role
    raise RecordingError(f"role {role!r} cannot name a file", hint="use letters, digits, _ and - only")


def _checked_rank(rank: object) -> int:
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= RANK_MAX:
        return rank
    raise RecordingError(f"rank {rank!r} must be an int from 0 to {RANK_MAX}")


def _whole_step(step: Any) -> int:
    """Return a step that is not a plain int64: an integer of NumPy or torch, or a subclass of int."""
    try:
        group, text = encoder_for(type(step))(step)
    except RecordingError:
        group, text = "", ""
    if group not in (INT64.name, UINT64.name) or int(text) > INT64_MAX:
        raise RecordingError(f"step {step!r} is not an int64", hint="pass the step as an int")
    return int(text)


def _claimant(path: Path) -> str:
    """Return who wrote the file, for a message; empty if its header does not say."""
    try:
        with path.open("rb") as file:
            return f", claimed by process {int(json.loads(file.readline())['pid'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _replace_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader finds the former content or all of ``text``, though this process be killed.

    Not flushed to the disk, as the values are not either: a recording need not survive the machine, and a log() call
    must not wait for a disk.
    """
    temporary = path.with_name(f".{path.name}.{_getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
