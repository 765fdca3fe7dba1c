"""Linux processes: who descends from whom, and how to end all of them and nobody else.

What only Linux can do stands here and in :mod:`e2e_registry.execution.supervisor`. Both need the standard library
alone and import little of it, because every launch waits for the supervisor to start.

Three facts of the kernel carry this module (prctl(2), wait(2), pidfd_open(2)):

* A child subreaper becomes the parent of every orphaned descendant, whatever session or process group it has made
  for itself. So a subreaper that ``wait`` tells "no child" (ECHILD) has no descendant left at all: the answer is
  the kernel's, under its own lock, and needs no look into ``/proc``.
* A child keeps its pid until its parent reaps it. A process may therefore signal its own children by number.
* A pidfd keeps meaning one process, so any other descendant is signalled through one, after its start time and
  parent were read again: a reused pid is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from e2e_registry.printable import printable_line

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: How long between two looks for descendants that have come to be since the last: while they may still end by
#: themselves, and while they are being killed. The latter doubles: what SIGKILL does not end at once is stuck in the
#: kernel, and each look reads all of ``/proc``.
_TERM_INTERVAL_S = 0.2
_KILL_INTERVAL_S = (0.005, 0.25)

#: How long to go on when there is nothing that can be killed (see :attr:`Ending.is_hopeless`).
_IN_VAIN_S = 5.0

#: Signals to direct children in a row, between two looks at the whole tree (see :func:`kill_children`).
_KILL_ROUNDS = 50


def is_supported() -> bool:
    """Whether this system has what is needed to find and end every descendant of a process."""
    return sys.platform == "linux" and os.path.exists("/proc/self/stat")


class Process(NamedTuple):
    """One process as ``/proc/<pid>/stat`` showed it.

    Attributes:
        pid: Its number, which another process may get once this one is reaped.
        parent: The pid of its parent at that time.
        started: Clock ticks since boot. A number and a start time together are used once.
        state: ``R``, ``S``, ``D``, ``T``, ``Z``; a ``Z`` may still have running threads.
    """

    pid: int
    parent: int
    started: int
    state: str


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when the thread of ``parent`` that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call, and no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def watch(pid: int) -> int | None:
    """Return a file descriptor that polls readable once process ``pid`` has ended, or None if none can be had.

    Python builds against old kernel headers, kernels before 5.3 and some containers have no pidfd.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def try_lock(descriptor: int) -> bool:
    """Lock an open file, for whoever holds this descriptor of it; return False if it is locked by another, at once.

    The lock ends when the descriptor is closed: with its process at the latest, however that ends.

    Raises:
        OSError: The file's system has no locks.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_process(pid: int) -> Process | None:
    """Return what ``/proc`` says of ``pid``, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            data = file.read(4096)
    except OSError:
        return None
    fields = data[data.rindex(b")") + 2 :].split()  # the name before it may hold anything, blanks and ")" too
    return Process(pid, int(fields[1]), int(fields[19]), fields[0].decode())


def all_processes() -> dict[int, Process]:
    """Return every process that ``/proc`` shows, by pid. Not one moment's picture: processes come and go."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int) -> list[Process]:
    """Return the processes below ``root``, parents before children.

    One that is reparented while ``/proc`` is read can be missing, so look again until there is none to be found.
    """
    table = all_processes()
    return _below([table[root]] if root in table else [], table)


def _below(roots: list[Process], table: dict[int, Process]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    seen = {root.pid for root in roots}
    level = roots
    while level:
        below = [
            child
            for parent in level
            for child in children.get(parent.pid, ())
            if child.started >= parent.started and child.pid not in seen  # a reused number is not a parent
        ]
        seen.update(child.pid for child in below)
        found += below
        level = below
    return found


def command_line(pid: int, limit: int = 200) -> str:
    """Return the command line of ``pid`` for people, on one line, cut at ``limit`` characters; ``""`` if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            text = file.read(4 * limit).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    text = printable_line(text)  # a process says of itself what it likes
    return text if len(text) <= limit else text[: limit - 1] + "…"


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; return False if it has ended, or has another parent than when it was found.

    Raises:
        PermissionError: It runs as another user.
    """
    handle = watch(process.pid)
    try:
        now = read_process(process.pid)
        if now is None or (now.started, now.parent) != (process.started, process.parent):
            return False
        if handle is not None:
            with contextlib.suppress(AttributeError, PermissionError):
                signal.pidfd_send_signal(handle, number)
                return True
        os.kill(process.pid, number)  # no pidfds here: the instant since the check is all that is left of the race
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def kill_children() -> None:
    """Kill every direct child of this process, which must have one thread and be the only one to reap them.

    A descendant that forks, ends, and forks again becomes a child of its subreaper at each turn, and is gone before
    a look through ``/proc`` comes to an end. This list of children takes microseconds; newest first, it hits.
    """
    with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN: the whole tree must do
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            children = file.read().split()
        for pid in reversed(children):
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def reap() -> tuple[dict[int, int], bool]:
    """Collect the children that have ended.

    Returns:
        Wait status by pid, and whether this process has any child left (for a subreaper: any descendant).
    """
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses, False
        if pid == 0:
            return statuses, True
        statuses[pid] = status


class Ending:
    """The end of a set of processes: SIGTERM to each, a grace period, then SIGKILL until there is none.

    It is driven by :meth:`step`, so that its caller can go on reading output and reaping between two steps.

    Args:
        find: Returns the processes that are left.
        grace_s: Seconds between SIGTERM and SIGKILL.
        kill_faster: Kills what ``find`` is too slow to see; returns whether any is left.
    """

    def __init__(
        self, find: Callable[[], Iterable[Process]], grace_s: float, kill_faster: Callable[[], bool] | None = None
    ) -> None:
        self._find = find
        self._kill_faster = kill_faster
        self._kill_at = time.monotonic() + grace_s
        self._kill_interval_s, self._longest_interval_s = _KILL_INTERVAL_S
        self._told: set[tuple[int, int]] = set()
        self._in_vain_since: float | None = None
        self.refusing: list[Process] = []

    @property
    def interval_s(self) -> float:
        """How long to wait until the next step, unless a process ends before."""
        until_kill_s = self._kill_at - time.monotonic()
        return min(until_kill_s, _TERM_INTERVAL_S) if until_kill_s > 0 else self._kill_interval_s

    @property
    def is_hopeless(self) -> bool:
        """Whether for seconds there was nothing that could be killed, though something is left.

        It is in :attr:`refusing` because it runs as another user, or ``/proc`` hides that user's processes. What is
        stuck in the kernel is not hopeless: it takes the signal, and acts on it some time.
        """
        return self._in_vain_since is not None and time.monotonic() - self._in_vain_since > _IN_VAIN_S

    def hasten(self) -> None:
        """Leave out the rest of the grace period."""
        self._kill_at = min(self._kill_at, time.monotonic())

    def step(self) -> None:
        """Signal what is there now."""
        if time.monotonic() < self._kill_at:
            for process in self._find():
                self._tell(process)
            return
        for _ in range(_KILL_ROUNDS):
            if self._kill_faster is None or not self._kill_faster():
                break
        self._kill()
        self._kill_interval_s = min(2 * self._kill_interval_s, self._longest_interval_s)

    def _tell(self, process: Process) -> None:
        identity = (process.pid, process.started)
        if identity in self._told:
            return
        with contextlib.suppress(PermissionError):
            if send_signal(process, signal.SIGTERM):
                self._told.add(identity)
                send_signal(process, signal.SIGCONT)  # a stopped process acts on nothing but SIGKILL

    def _kill(self) -> None:
        self.refusing = []
        is_any_hit = False
        for process in self._find():
            try:
                is_any_hit |= send_signal(process, signal.SIGKILL) and process.state != "Z"
            except PermissionError:
                self.refusing.append(process)
        if is_any_hit:
            self._in_vain_since = None
        elif self._in_vain_since is None:
            self._in_vain_since = time.monotonic()


def marked(marker: bytes) -> list[Process]:
    """Return the processes that were started with ``marker`` in their environment, and what descends from them.

    Environments pass from parent to child, so with a marker that was drawn for one launch this finds what belongs
    to that launch, however it was orphaned; except what cleared its environment. Subreapers miss nothing: this is
    for the case that they were killed.
    """
    table = all_processes()
    roots = [process for process in table.values() if _is_marked(process.pid, marker)]
    return roots + _below(roots, table)


def _is_marked(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False
