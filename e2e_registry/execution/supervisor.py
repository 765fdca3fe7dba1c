"""The process that stands between the launcher and one recipe, so that the end of either ends the whole run.

It is started by path, as ``python -I -S supervisor.py``, reads one order from the socket that is its standard input,
and becomes two processes::

    launcher ── guard ── supervisor ── recipe ── whatever the recipe starts, in any session or process group

Both are child subreapers, so an orphan of the recipe comes to the supervisor, and if that was killed, to the guard.
The supervisor runs the recipe: it keeps its output, its time and its end. The guard waits. Each notices at once
when the other, or the launcher, is gone (a reaped child, the end of a pipe, a pidfd), and ends everything that is
left. The recipe itself asks the kernel to be killed with its parent, should both be killed in one blow. The launcher
need not be a subreaper for this: that is a state of the whole process, which may be somebody's pytest.

The orders after the first are single bytes: :data:`END` (SIGTERM, then SIGKILL after the grace period) and
:data:`KILL` (without the grace period). The end of the stream means :data:`END`. The answer is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

if __name__ == "__main__":  # behind the standard library: nothing next to this package may take its place
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from e2e_registry.execution import processes

END = b"e"
KILL = b"k"

#: At most so many processes left behind are listed in the answer.
_LISTED = 20

_READ_BYTES = 1 << 20
#: After a read smaller than this the supervisor naps, so that a recipe that prints a line at a time wakes it five
#: hundred times a second at most, while one that prints as fast as it can is read as fast as it prints.
_SMALL_READ_BYTES = 1 << 16
_NAP_S = 0.002

#: A longer log than its limit is brought up to date on disk so often.
_REFRESH_S = 1.0
_MARKER_BYTES = 128

Order = dict[str, Any]


def pack(text: str) -> str:
    """Return the operating system's bytes of ``text`` as characters that JSON carries whatever the locale is."""
    return os.fsencode(text).decode("latin-1")


def unpack(text: str) -> bytes:
    """Return the bytes that :func:`pack` packed."""
    return text.encode("latin-1")


class CappedLog:
    """A file with the first and the last bytes of what was written, which never grows beyond its limit.

    Up to the limit the file is the output. Beyond, it is the first half, a line that says how many bytes are left
    out, and the last half: exactly so when :meth:`finish` was called, and with a tail that is at most
    ``_REFRESH_S`` old and a quarter of the limit short while the run goes on or if it was killed. The newest
    output is also kept in memory that forked processes share, so that the guard can finish the log.

    Args:
        path: The file, overwritten.
        limit: Its greatest size in bytes.
    """

    def __init__(self, path: bytes, limit: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._limit = limit
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit - _MARKER_BYTES
        shared = memoryview(mmap.mmap(-1, 8 + self._tail_limit))
        self._count = shared[:8].cast("Q")
        self._ring = shared[8:]
        self._size = 0
        self._is_behind = False
        self._refresh_at = 0.0
        self.error: str | None = None

    @property
    def total(self) -> int:
        """How many bytes were written to the log, kept or not."""
        return self._count[0]

    @property
    def dropped(self) -> int:
        """How many of them a finished log leaves out."""
        return max(0, self._past_head - self._tail_limit)

    @property
    def refresh_at(self) -> float | None:
        """When (monotonic seconds) :meth:`refresh` is due, or None if the file is up to date."""
        return self._refresh_at if self._is_behind else None

    @property
    def _past_head(self) -> int:
        return max(0, self.total - self._head_limit)

    def write(self, data: memoryview) -> None:
        """Append ``data``."""
        at = max(0, self._head_limit - self.total)
        head, rest = data[:at], data[at:]
        self._put(head)
        self._remember(rest)
        if not self._is_behind and self._size + len(rest) <= self._limit:
            self._put(rest)
        else:
            self._is_behind = True
        self._count[0] += len(data)
        self.refresh()

    def refresh(self) -> None:
        """Bring the end of the file up to date, if that is due, and make room for more."""
        if self._is_behind and time.monotonic() >= self._refresh_at:
            self._rewrite_tail(self._tail_limit // 2)
            self._is_behind = False
            self._refresh_at = time.monotonic() + _REFRESH_S

    def resume(self) -> None:
        """Go on where another process, that wrote to the same log after a fork, was killed."""
        self._size = self.total
        if self._past_head:
            self._rewrite_tail(self._tail_limit // 2)

    def finish(self) -> None:
        """Bring the file into its final form."""
        if self._past_head:
            self._rewrite_tail(self._tail_limit)

    def _remember(self, data: memoryview) -> None:
        kept = data[-len(self._ring) :]
        start = (self._past_head + len(data) - len(kept)) % len(self._ring)
        first = min(len(kept), len(self._ring) - start)
        self._ring[start : start + first] = kept[:first]
        self._ring[: len(kept) - first] = kept[first:]

    def _rewrite_tail(self, length: int) -> None:
        length = min(length, self._past_head)
        with contextlib.suppress(OSError):  # a full disk still takes a shorter file
            os.ftruncate(self._file, self._head_limit)
        self._size = self._head_limit
        left_out = self._past_head - length
        if left_out:
            text = f"\n[{left_out} bytes of output left out here: the log is capped at {self._limit} bytes]\n"
            self._put(memoryview(text.encode()))
        start = left_out % len(self._ring)
        self._put(self._ring[start : start + length])
        self._put(self._ring[: max(0, start + length - len(self._ring))])

    def _put(self, data: memoryview) -> None:
        try:
            while data and self.error is None:
                written = os.pwrite(self._file, data, self._size)
                self._size += written
                data = data[written:]
        except OSError as error:  # the recipe goes on: what it prints is not what is judged
            self.error = error.strerror


class Forward:
    """A copy of the output for the launcher, which may be slow to read: then the recipe must wait, as with ``tee``.

    Args:
        descriptor: Write end of a pipe, or None if nobody wants the copy.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        self._pending = memoryview(b"")
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)
            _enlarge(descriptor)

    @property
    def is_clogged(self) -> bool:
        """Whether there is something that the launcher has not taken yet."""
        return bool(self._pending)

    def push(self, data: memoryview) -> None:
        """Take the next output; only when not clogged."""
        if self.descriptor is not None:
            self._pending = data
            self.flush()
            self._pending = memoryview(bytes(self._pending))  # the caller reuses the memory

    def flush(self) -> None:
        """Write what the pipe takes now."""
        try:
            while self._pending and self.descriptor is not None:
                self._pending = self._pending[os.write(self.descriptor, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:  # the launcher wants no more
            self.close()

    def close(self) -> None:
        """Forget what is pending, and forward nothing more."""
        self._pending = memoryview(b"")
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class StartError(Exception):
    """The recipe's command could not be run; the message says why."""


def start_recipe(order: Order, output: int) -> int:
    """Start the command in a session of its own, with nothing of this process but ``output``; return its pid.

    Raises:
        StartError: There is no such command or directory, or the system refuses.
    """
    parent = os.getpid()
    told, tell = os.pipe()  # closed by a successful exec
    try:
        pid = os.fork()
    except OSError as error:
        raise StartError(f"cannot start a process: {error.strerror}") from error
    if pid == 0:
        _become_recipe(order, output, tell, parent)
    os.close(tell)
    with open(told, "rb") as reader:
        reason = reader.read()
    if reason:
        os.waitpid(pid, 0)
        raise StartError(reason.decode())
    return pid


def _become_recipe(order: Order, output: int, tell: int, parent: int) -> NoReturn:
    try:
        os.setsid()
        processes.die_with_parent(parent)
        for number in signal.valid_signals():
            with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP are as they should be
                signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.write(tell, _exec(order).encode(errors="replace"))
    except BaseException as error:  # noqa: BLE001 (nothing may leave this function in the forked process)
        os.write(tell, f"cannot prepare the process: {error}".encode(errors="replace"))
    finally:
        os._exit(127)


def _exec(order: Order) -> str:
    command = [unpack(word) for word in order["command"]]
    name = os.fsdecode(command[0])
    cwd = unpack(order["cwd"])
    try:
        os.chdir(cwd)
    except OSError as error:
        return f"cannot enter the working directory {os.fsdecode(cwd)}: {error.strerror}"
    try:
        environment = {unpack(key): unpack(value) for key, value in order["environment"].items()}
        os.execvpe(command[0], command, environment)  # noqa: S606 (a recipe is a list of words, never a line for a shell)
    except FileNotFoundError:
        if os.path.dirname(name) and os.path.exists(name):
            return f"cannot run {name}: the interpreter that its first line names does not exist"
        return f"command not found: {name}"
    except PermissionError:
        return f"not executable: {name}"
    except OSError as error:
        return f"cannot run {name}: {error.strerror}"


class Supervision:
    """One run from its start until no process of it is left.

    The guard holds a copy too, made by the fork, and takes it over if the supervisor is killed.

    Args:
        order: What to run, from the launcher.
        channel: The socket to the launcher.
        launcher: A pidfd of the launcher, or None where there are none: then the end of ``channel`` must do.
    """

    def __init__(self, order: Order, channel: socket.socket, launcher: int | None) -> None:
        self._order = order
        self._channel = channel
        self._log = CappedLog(unpack(order["log"]), order["log_limit"])
        self._forward = Forward(order["lines"])
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._recipe = memoryview(mmap.mmap(-1, 8)).cast("q")  # its pid, for the guard too
        read_end, self._output_writer = os.pipe()
        self._output: int | None = read_end
        os.set_blocking(read_end, False)
        _enlarge(read_end)
        self._sources: dict[int, Callable[[], object]] = {channel.fileno(): self._take_requests}
        if launcher is not None:
            self._sources[launcher] = lambda: self._lose(launcher)
        self._is_end_requested = False
        self._ending: processes.Ending | None = None
        self._step_at = 0.0
        self._deadline = math.inf
        self._settled_at = math.inf
        self._answer: dict[str, Any] = {"status": None, "exit_code": None, "signal": None, "detail": None}
        self._has_recipe_ended = False
        self._left_behind: list[dict[str, Any]] = []

    def supervise(self, guard: int) -> None:
        """Start the recipe and stay until all is over; ``guard`` is a pipe that ends with the guard."""
        self._sources[guard] = lambda: self._lose(guard, "its guard process was killed")
        self._listen_to_signals()
        try:
            self._recipe[0] = start_recipe(self._order, self._output_writer)
        except StartError as error:
            self._answer.update(status="not-started", detail=str(error), ended_ns=time.time_ns())
        os.close(self._output_writer)
        self._deadline = time.monotonic() + self._order["timeout_s"]
        self._run()

    def stand_by(self) -> None:
        """Let go of what only the supervisor needs."""
        os.close(self._output_writer)
        self._forward.close()

    def take_over(self, reason: str) -> None:
        """End what a supervisor that was killed has left; only in the guard."""
        self._listen_to_signals()
        self._log.resume()
        self._answer.update(status="interrupted", detail=reason)
        self._is_end_requested = True
        self._run()

    def _run(self) -> None:
        while self._reap():
            self._decide()
            if self._ending is not None and self._ending.is_hopeless:
                survivors = [_describe(process, has_survived=True) for process in self._ending.refusing]
                self._left_behind = (survivors + self._left_behind)[:_LISTED]
                break
            self._listen(self._patience_s())
        self._drain()
        self._log.finish()
        self._send_answer()

    def _reap(self) -> bool:
        statuses, is_any_left = processes.reap()
        if self._recipe[0] in statuses:
            code = os.waitstatus_to_exitcode(statuses[self._recipe[0]])
            self._answer.update({"signal": -code} if code < 0 else {"exit_code": code}, ended_ns=time.time_ns())
            if self._answer["status"] is None:
                self._answer["status"] = "signaled" if code < 0 else "exited"
            self._has_recipe_ended = True
            self._settled_at = time.monotonic() + self._order["settle_s"]
        return is_any_left

    def _decide(self) -> None:
        now = time.monotonic()
        if self._ending is not None:
            if now >= self._step_at:
                self._ending.step()
                self._step_at = time.monotonic() + self._ending.interval_s
        elif self._is_end_requested:
            self._end("interrupted")
        elif self._has_recipe_ended:
            if now >= self._settled_at:
                alive = [process for process in self._find() if process.state != "Z"]
                self._left_behind = [_describe(process, has_survived=False) for process in alive[:_LISTED]]
                self._end("left-behind")
        elif now >= self._deadline:
            self._end("timeout")

    def _end(self, cause: str) -> None:
        if self._answer["status"] is None:  # else the recipe came to its own end, and this is about what it left
            self._answer["status"] = cause
        self._ending = processes.Ending(self._find, self._order["grace_s"], self._kill_children)
        self._step_at = 0.0
        self._decide()

    def _find(self) -> list[processes.Process]:
        return processes.descendants(os.getpid())

    def _kill_children(self) -> bool:
        processes.kill_children()
        return self._reap()

    def _patience_s(self) -> float | None:
        if self._ending is not None:
            due = self._step_at
        elif self._has_recipe_ended:
            due = self._settled_at
        else:
            due = self._deadline
        if self._log.refresh_at is not None:
            due = min(due, self._log.refresh_at)
        return None if math.isinf(due) else max(0.0, due - time.monotonic())

    def _listen(self, patience_s: float | None) -> None:
        sources = dict(self._sources)
        poll = select.poll()
        for descriptor in sources:
            poll.register(descriptor, select.POLLIN)
        if self._forward.is_clogged and self._forward.descriptor is not None:
            sources[self._forward.descriptor] = self._forward.flush
            poll.register(self._forward.descriptor, select.POLLOUT)
        elif self._output is not None:
            sources[self._output] = self._pump
            poll.register(self._output, select.POLLIN)
        # The kernel takes milliseconds; rounding down would spin until the due time.
        for descriptor, _ in poll.poll(None if patience_s is None else min(math.ceil(patience_s * 1000), 1 << 30)):
            sources[descriptor]()
        self._log.refresh()

    def _pump(self) -> int:
        """Read once from the recipe; return how many bytes."""
        if self._output is None:
            return 0
        try:
            size = os.readv(self._output, [self._buffer])
        except BlockingIOError:
            return 0
        if size == 0:  # every process of the run has closed it, or ended
            os.close(self._output)
            self._output = None
            return 0
        self._log.write(self._buffer[:size])
        self._forward.push(self._buffer[:size])
        if size < _SMALL_READ_BYTES and self._ending is None:
            time.sleep(_NAP_S)
        return size

    def _drain(self) -> None:
        """Take what is still in the pipe, and no more: a process outside the run may hold it open, and even print."""
        left = 2 * _READ_BYTES
        while left > 0 or self._forward.is_clogged:
            if not self._forward.is_clogged:
                left -= self._pump() or left
            elif self._is_end_requested:
                self._forward.close()
            else:
                self._listen(None)
        self._forward.close()

    def _take_requests(self) -> None:
        try:
            requests = self._channel.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            requests = b""
        self._is_end_requested = True
        if KILL in requests:
            self._decide()
            if self._ending is not None:
                self._ending.hasten()
                self._step_at = 0.0
        if not requests:
            self._lose(self._channel.fileno())

    def _lose(self, descriptor: int, reason: str | None = None) -> None:
        del self._sources[descriptor]  # it would poll readable forever
        self._is_end_requested = True
        self._answer["detail"] = self._answer["detail"] or reason

    def _listen_to_signals(self) -> None:
        wake, write_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._sources[wake] = lambda: _empty(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_end_requested", True))

    def _send_answer(self) -> None:
        self._answer.update(
            left_behind=self._left_behind,
            log_bytes=self._log.total,
            log_dropped=self._log.dropped,
            log_error=self._log.error,
        )
        send(self._channel, self._answer)


def _describe(process: processes.Process, *, has_survived: bool) -> dict[str, Any]:
    return {"pid": process.pid, "command": processes.command_line(process.pid), "has_survived": has_survived}


def _enlarge(pipe: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # beyond the user's share: smaller reads, nothing worse
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _READ_BYTES)


def _empty(pipe: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(pipe, 4096):
            pass


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON line; a peer that is gone is no error."""
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n", socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for one JSON line, taking nothing behind it; None if the peer is gone."""
    line = b""
    while not line.endswith(b"\n"):
        ahead = channel.recv(1 << 16, socket.MSG_PEEK)
        if not ahead:
            return None
        line += channel.recv(ahead.find(b"\n") + 1 or len(ahead))
    message: dict[str, Any] = json.loads(line)
    return message


def main() -> None:
    """Run one order as guard and supervisor."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # what the launcher's thread had blocked; the recipe's too
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # the launcher's to handle
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    order = receive(channel)
    if order is None:
        return
    launcher = processes.watch(order["launcher"])
    if os.getppid() != order["launcher"]:  # it ended before it could be watched
        return
    try:
        _fork_and_run(order, channel, launcher)
    except BaseException:
        send(channel, {"fault": traceback.format_exc()})
        raise


def _fork_and_run(order: Order, channel: socket.socket, launcher: int | None) -> None:
    supervision = Supervision(order, channel, launcher)
    processes.become_subreaper()
    guard_ends, guard_lives = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(guard_lives)
        os.setsid()  # a signal to the guard's process group is not one to both
        processes.become_subreaper()
        supervision.supervise(guard_ends)
        os._exit(0)
    supervision.stand_by()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(supervisor, signal.SIGTERM))
    os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before it is reaped: then its number may become another's
    _, status = os.waitpid(supervisor, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
        supervision.take_over(f"its supervisor process {how}")


if __name__ == "__main__":
    main()
