"""Runs one recipe to its end, and leaves no process of it behind, however it ends.

The recipe runs under a supervisor process (:mod:`e2e_registry.execution.supervisor`) in a session of its own. This
module composes what the supervisor needs, follows the run, and alone writes ``run.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from e2e_registry.errors import StorageError, UsageError
from e2e_registry.execution import processes, supervisor
from e2e_registry.printable import printable
from e2e_registry.recording.layout import (
    FORMAT,
    METRICS_FILE,
    PLAIN_FILE,
    PLAIN_FILE_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_FILE,
    STATE_FILE,
)
from e2e_registry.storage import write_json

Status = Literal["exited", "signaled", "timeout", "interrupted", "not-started"]

LOG_FILE = "output.log"

#: Drawn for each launch, so that processes whose supervisor and guard were both killed can still be told from others.
LAUNCH_ID_VARIABLE = "E2E_REGISTRY_LAUNCH_ID"

#: How long the main thread sleeps in one call at most while it waits for a test. A signal interrupts that call only in
#: the thread that the kernel hands it to, often one that is just starting a process; Python's handlers run in the main
#: thread alone, which would not learn of a Ctrl-C before the test has ended.
SIGNAL_LATENCY_S = 0.5

_LOG_LIMIT_MIN = 4096
_LAUNCHER_KEYS = frozenset({"format", "command", "cwd", "outcome", "started_ns", "ended_ns"})

#: A longer line reaches ``on_line`` in pieces, so that output without line ends needs bounded memory.
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What to launch, where, and how long it may take.

    Attributes:
        command: Program and arguments; a program without a slash is looked up in the ``PATH`` of ``environment``.
        cwd: Working directory of the recipe; made absolute.
        run_dir: Where the run is kept; made absolute, made if need be, and refused if it holds a run.
        environment: The complete environment; :func:`child_environment` says what is changed in it.
        keep_variables: Names of ``RAY_*`` variables that somebody stated for this run, so that they stay even if the
            launcher's own environment has the same value.
        timeout_s: Seconds until the recipe and all it has started are ended.
        grace_s: Seconds between SIGTERM and SIGKILL.
        settle_s: Seconds that the processes of a recipe which has ended may take to end by themselves. Those that
            are alive after that are *left behind*. A run that leaves none does not wait.
        log_limit: Greatest size of ``output.log`` in bytes.
        facts: What else ``run.json`` holds, as JSON values.
        shown_command: What ``run.json`` holds as the command, where the real one may hold secrets: expanded
            variables, passwords in arguments.

    Raises:
        UsageError: A value cannot be launched: an empty command, a NUL character, a limit that is no limit.
        ValueError: ``facts`` names a key of the launcher's own.
    """

    command: Sequence[str]
    cwd: Path
    run_dir: Path
    environment: Mapping[str, str]
    timeout_s: float
    keep_variables: frozenset[str] = frozenset()
    grace_s: float = 5.0
    settle_s: float = 5.0
    log_limit: int = 16 * 2**20
    facts: Mapping[str, Any] = field(default_factory=dict)
    shown_command: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse here, with a reason, what the system would refuse later without one."""
        if isinstance(self.command, str) or not self.command or not self.command[0]:
            raise UsageError(f"not a command: {self.command!r}", hint="give a program and its arguments, a string each")
        for text in (*self.command, str(self.cwd), str(self.run_dir), *self.environment, *self.environment.values()):
            if "\0" in text:
                raise UsageError(f"{text!r} holds a NUL character, which no program can be given")
        for name in self.environment:
            if not name or "=" in name:
                raise UsageError(f"{name!r} cannot name an environment variable")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if not (0 <= self.grace_s < float("inf") and 0 <= self.settle_s < float("inf")):
            raise UsageError(f"grace_s={self.grace_s!r} and settle_s={self.settle_s!r} must be numbers of seconds")
        if self.log_limit < _LOG_LIMIT_MIN:
            raise UsageError(f"log_limit={self.log_limit!r} is less than {_LOG_LIMIT_MIN} bytes")
        for name in ("cwd", "run_dir"):
            object.__setattr__(self, name, Path(os.path.abspath(getattr(self, name))))
        if taken := _LAUNCHER_KEYS & self.facts.keys():
            raise ValueError(f"facts may not hold {sorted(taken)}: the launcher writes them")


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A process that outlived the recipe and had to be ended.

    Attributes:
        pid: Its number.
        command: Its command line, cut at 200 characters.
        has_survived: Whether it is still there, because it runs as another user.
    """

    pid: int
    command: str
    has_survived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended.

    Attributes:
        status: ``exited`` and ``signaled`` if the recipe came to its own end; ``timeout``; ``interrupted`` if
            somebody ended it; ``not-started`` if its command could not be run.
        exit_code: Of the recipe's own process, if it exited: also after SIGTERM on a timeout.
        signal: Number of the signal that ended it, if one did.
        detail: What else there is to say, for people.
        timeout_s: What it was allowed.
        started_ns: Nanoseconds since the epoch, just before the launch.
        ended_ns: When the recipe's own process had ended; what it left behind may have taken longer.
        left_behind: The first twenty processes that outlived a recipe which came to its own end.
        log_path: The output, standard error merged into it.
        log_bytes: How many bytes the recipe printed.
        log_dropped: How many of them, between the first and the last, the log leaves out.
        log_error: Why the log could not be written in full, if it could not.
    """

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    detail: str | None = None
    timeout_s: float
    started_ns: int
    ended_ns: int
    left_behind: tuple[LeftBehind, ...] = ()
    log_path: Path
    log_bytes: int = 0
    log_dropped: int = 0
    log_error: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether the recipe came to its own end with exit code 0; it may still have left processes behind."""
        return self.status == "exited" and self.exit_code == 0

    @property
    def duration_s(self) -> float:
        """Seconds from the launch to the end of the recipe's own process."""
        return (self.ended_ns - self.started_ns) / 1e9

    @property
    def explanation(self) -> str:
        """One phrase for people, such as ``killed by SIGKILL`` or ``exceeded its timeout of 60 s``."""
        match self.status:
            case "exited":
                text = f"exited with code {self.exit_code}"
            case "signaled":
                text = f"killed by {_signal_name(self.signal)}"
            case "timeout":
                text = f"exceeded its timeout of {self.timeout_s:g} s"
            case "interrupted":
                text = "interrupted"
            case "not-started":
                return self.detail or "could not be started"
        return text if self.detail is None else f"{text}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Return what ``run.json`` holds as ``outcome``; the times stand beside it."""
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "explanation": self.explanation,
            "left_behind": [
                {"pid": child.pid, "command": child.command, "has_survived": child.has_survived}
                for child in self.left_behind
            ],
            "log": self.log_path.name,
            "log_bytes": self.log_bytes,
            "log_dropped": self.log_dropped,
            "log_error": self.log_error,
        }


class Cancellation:
    """Ends launches that run in other threads, which no KeyboardInterrupt reaches.

    Give one object to several launches and call :meth:`cancel` from any thread: their outcome is ``interrupted``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel while this thread is in here
        self._actions: set[Callable[[bytes], None]] = set()
        self._is_cancelled = False
        self._allows_start = True

    @property
    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called; a launch that begins after that ends at once."""
        return self._is_cancelled

    @property
    def allows_start(self) -> bool:
        """Whether what still waits for its turn may begin."""
        return self._allows_start

    def stop_starting(self) -> None:
        """Have begin nothing that still waits for a device or a node; what runs comes to its end."""
        self._allows_start = False

    def cancel(self, *, hasten: bool = False) -> None:
        """End every launch that was given this object. Returns at once; each launch returns when all is ended.

        Args:
            hasten: Spare the recipes no time to end by themselves.
        """
        self.stop_starting()
        with self._lock:
            self._is_cancelled = True
            for action in tuple(self._actions):
                action(supervisor.KILL if hasten else supervisor.END)

    @contextlib.contextmanager
    def calling(self, action: Callable[[bytes], None]) -> Iterator[None]:
        """Call ``action`` with what the supervisor is to do once this is cancelled, while the context lasts."""
        with self._lock:
            self._actions.add(action)
            if self._is_cancelled:
                action(supervisor.END)
        try:
            yield
        finally:
            with self._lock:
                self._actions.discard(action)


def launch(
    spec: LaunchSpec,
    *,
    on_line: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
) -> Outcome:
    """Run a recipe until no process of it is left, and write ``run.json`` and ``output.log``.

    May be called from several threads at once. Whatever is raised while the recipe runs (KeyboardInterrupt, what a
    signal handler or ``on_line`` raises) ends the run and then passes on; a second KeyboardInterrupt shortens the
    grace period, a third leaves the rest to the supervisor. Should this process be killed, all is ended too, and
    ``run.json`` keeps no outcome.

    Args:
        spec: What to launch.
        on_line: Called in this thread with each line the recipe prints, without its end; a slow one slows the recipe.
        cancellation: Ends the launch from another thread.

    Raises:
        UsageError: The run directory holds a run, or the system is not Linux.
        StorageError: The run directory cannot be made or written.
    """
    if not processes.is_supported():
        raise UsageError("recipes can be run on Linux only", hint="compare, show and accept work everywhere")
    record = _Record(spec)
    run = _SupervisedRun(spec, record.log_path)
    try:
        run.start(wants_lines=on_line is not None)
        with (cancellation or Cancellation()).calling(run.request_end):
            run.follow(on_line)
    except BaseException:
        run.end()
        raise
    finally:
        run.close()
        outcome = run.outcome(record.started_ns)
        record.finish(outcome)
    return outcome


def child_environment(spec: LaunchSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the recipe gets.

    Variables that begin with ``RAY_`` go if they are only inherited: a recipe must not join the cluster, or take the
    settings, of a Ray worker that happens to run the launcher. The run directory and the plain metrics file are set,
    and ``PYTHONUNBUFFERED`` unless it is there: what a recipe had printed before it was killed must be in its log.

    Args:
        spec: What is launched.
        inherited: The launcher's own environment.
    """
    stated = {
        name: value
        for name, value in spec.environment.items()
        if not name.startswith("RAY_") or name in spec.keep_variables or inherited.get(name) != value
    }
    own = {RUN_DIR_VARIABLE: str(spec.run_dir), PLAIN_FILE_VARIABLE: str(spec.run_dir / PLAIN_FILE)}
    return {"PYTHONUNBUFFERED": "1", **stated, **own}


class _Record:
    """The run directory, claimed for one run, and its ``run.json``."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._run_dir = spec.run_dir
        self.log_path = self._run_dir / LOG_FILE
        self.started_ns = time.time_ns()
        self._data = {
            "format": FORMAT,
            **spec.facts,
            "command": list(spec.command if spec.shown_command is None else spec.shown_command),
            "cwd": str(spec.cwd),
            "outcome": None,
            "started_ns": self.started_ns,
            "ended_ns": None,
        }
        json.dumps(self._data, allow_nan=False)  # what run.json cannot hold is raised before anything is written
        self._claim()

    def _claim(self) -> None:
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            held = sorted(name for name in os.listdir(self._run_dir) if _belongs_to_a_run(name))
            if not held:
                self.log_path.touch(exist_ok=False)  # of two launches at the same time, one gets past this
        except FileExistsError:
            held = [LOG_FILE]
        except OSError as error:
            hint = "give a run directory that can be written"
            raise StorageError(
                f"cannot use as run directory: {error.strerror}", where=self._run_dir, hint=hint
            ) from error
        if held:
            hint = "give a directory of its own to each run, so that two recordings are never mixed"
            raise UsageError(f"already holds a run ({held[0]})", where=self._run_dir, hint=hint)
        try:
            write_json(self._run_dir / RUN_FILE, self._data)
        except StorageError:
            self.log_path.unlink(missing_ok=True)  # nothing ran: the directory can be used again
            raise

    def finish(self, outcome: Outcome) -> None:
        """Write how the run ended."""
        self._data |= {"outcome": outcome.to_json(), "started_ns": outcome.started_ns, "ended_ns": outcome.ended_ns}
        write_json(self._run_dir / RUN_FILE, self._data)


def _belongs_to_a_run(name: str) -> bool:
    return name in (RUN_FILE, LOG_FILE, PLAIN_FILE) or bool(METRICS_FILE.fullmatch(name) or STATE_FILE.fullmatch(name))


class _SupervisedRun:
    """The launcher's end of one supervisor: its orders, and what it answers."""

    def __init__(self, spec: LaunchSpec, log_path: Path) -> None:
        self._spec = spec
        self._log_path = log_path
        self._launch_id = secrets.token_hex(16)
        self._channel, self._supervisors_end = socket.socketpair()
        self._lines: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ordered = False
        self._received = b""
        self._answer: dict[str, Any] = {}

    def start(self, *, wants_lines: bool) -> None:
        """Start the supervisor and send it the order."""
        lines: int | None = None
        try:
            if wants_lines:
                self._lines, lines = os.pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__],
                stdin=self._supervisors_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=() if lines is None else (lines,),
            )
        except OSError as error:
            self._answer = {"status": "not-started", "detail": f"cannot start the supervisor: {error.strerror}"}
        finally:
            self._supervisors_end.close()
            if lines is not None:
                os.close(lines)
        supervisor.send(self._channel, self._order(lines))
        self._is_ordered = True

    def _order(self, lines: int | None) -> supervisor.Order:
        spec = self._spec
        environment = child_environment(spec, os.environ) | {LAUNCH_ID_VARIABLE: self._launch_id}
        return {
            "command": [supervisor.pack(word) for word in spec.command],
            "cwd": supervisor.pack(str(spec.cwd)),
            "environment": {supervisor.pack(name): supervisor.pack(value) for name, value in environment.items()},
            "log": supervisor.pack(str(self._log_path)),
            "log_limit": spec.log_limit,
            "timeout_s": spec.timeout_s,
            "grace_s": spec.grace_s,
            "settle_s": spec.settle_s,
            "launcher": os.getpid(),
            "lines": lines,
        }

    def follow(self, on_line: Callable[[str], None] | None) -> None:
        """Pass lines on until the supervisor and its guard have ended."""
        splitter = _LineSplitter(on_line) if on_line is not None else None
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if self._lines is not None:
            poll.register(self._lines, select.POLLIN)
        is_open = True
        while is_open or self._lines is not None:
            # A signal is seen between two calls, whichever thread got it.
            for descriptor, _ in poll.poll(SIGNAL_LATENCY_S * 1000):
                if descriptor == self._lines and splitter is not None:
                    if not splitter.feed(os.read(descriptor, 1 << 20)):
                        poll.unregister(descriptor)
                        self._close_lines()
                elif not self._hear():
                    poll.unregister(self._channel)
                    is_open = False
        self._conclude()

    def request_end(self, how: bytes = supervisor.END) -> None:
        """Ask the supervisor to end the run; from any thread, and without waiting."""
        with contextlib.suppress(OSError):
            self._channel.send(how, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def end(self) -> None:
        """End the run and wait for it, the faster the more often this is interrupted."""
        for how in (supervisor.END, supervisor.KILL):
            with contextlib.suppress(KeyboardInterrupt):
                self._close_lines()
                if self._is_ordered:
                    self.request_end(how)
                else:  # half an order may be on its way: nothing but the end of the stream is understood
                    self._channel.shutdown(socket.SHUT_WR)
                self.follow(None)
                return
        self._answer = {"detail": "its processes were still being ended when the launcher left"}

    def _hear(self) -> bool:
        """Take what the supervisor says; return False once it and its guard have ended."""
        try:
            part = self._channel.recv(1 << 16)
        except ConnectionResetError:  # killed before it had read the whole order
            return False
        self._received += part
        return bool(part)

    def _conclude(self) -> None:
        for line in self._received.split(b"\n")[:-1]:
            self._answer |= json.loads(line)
        self._received = b""
        if self._process is not None:
            code = self._process.wait()
            if "log_bytes" not in self._answer:  # the last thing that a supervisor, or else its guard, tells
                how = f"ended with code {code}" if code > 0 else "and its guard were killed"
                self._answer["detail"] = f"its supervisor {how}"
                self._end_what_is_marked()
        if fault := self._answer.pop("fault", "").strip():
            self._answer["detail"] = f"its supervisor failed: {fault.splitlines()[-1]}"

    def _end_what_is_marked(self) -> None:
        marker = f"{LAUNCH_ID_VARIABLE}={self._launch_id}".encode()
        ending = processes.Ending(lambda: processes.marked(marker), self._spec.grace_s)
        while processes.marked(marker) and not ending.is_hopeless:
            ending.step()
            time.sleep(min(ending.interval_s, 0.02))

    def close(self) -> None:
        """Close what is open; a supervisor that still runs takes it as the order to end everything."""
        self._close_lines()
        self._channel.close()

    def _close_lines(self) -> None:
        if self._lines is not None:
            os.close(self._lines)
            self._lines = None

    def outcome(self, started_ns: int) -> Outcome:
        """Return how the run ended, as far as it is known."""
        answer = self._answer
        return Outcome(
            status=answer.get("status") or "interrupted",
            exit_code=answer.get("exit_code"),
            signal=answer.get("signal"),
            detail=answer.get("detail"),
            timeout_s=self._spec.timeout_s,
            started_ns=started_ns,
            ended_ns=answer.get("ended_ns") or time.time_ns(),
            left_behind=tuple(LeftBehind(**child) for child in answer.get("left_behind", ())),
            log_path=self._log_path,
            log_bytes=answer["log_bytes"] if "log_bytes" in answer else _size(self._log_path),
            log_dropped=answer.get("log_dropped", 0),
            log_error=answer.get("log_error"),
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _LineSplitter:
    """Cuts a stream of bytes into lines of text of bounded length."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        """Pass on the lines that are whole now; ``b""`` is the end. Return whether there may be more."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._pass_on(line)
        while len(self._rest) > _LINE_BYTES or (self._rest and not data):
            self._pass_on(self._rest[:_LINE_BYTES])
            self._rest = self._rest[_LINE_BYTES:]
        return bool(data)

    def _pass_on(self, line: bytes) -> None:
        self._on_line(line.removesuffix(b"\r").decode(errors="replace"))


_ANSI_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def log_tail(path: Path, lines: int = 20, max_bytes: int = 16 * 1024) -> str:
    r"""Return the last lines of a log as text that a terminal can show without being steered by it.

    What a progress bar has overwritten is left out, colours are dropped, other control characters are shown as
    escapes (``\x07``), and bytes that are not UTF-8 as U+FFFD.

    Args:
        path: The log; one that does not exist has no lines.
        lines: How many lines at most.
        max_bytes: How many bytes of the log are looked at, at most; a line cut by this begins with an ellipsis.

    Raises:
        StorageError: The log cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=path) from error
    found = data.removesuffix(b"\n").split(b"\n") if data else []
    if start:
        found[0] = b"\xe2\x80\xa6" + found[0].lstrip(bytes(range(0x80, 0xC0)))  # the cut may fall into a character
    return "\n".join(_printable(line) for line in found[max(0, len(found) - lines) :])


def _printable(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    return printable(_ANSI_SEQUENCE.sub("", text))


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
