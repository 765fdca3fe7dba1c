"""Runs functions as tasks of a Ray cluster: each with its resources, its progress shown, and ended when asked.

What becomes of a task whose node is lost is Ray's own affair: it runs the task again elsewhere, and the task is told
which attempt it is. A cluster that was not started here is never stopped, only left.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from e2e_registry.errors import LostRunError, NotStartedError, RegistryError, UsageError
from e2e_registry.execution import supervisor
from e2e_registry.execution.capacity import available_cpus
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.execution.notice import Notice
from e2e_registry.execution.working_tree import WorkingTree

#: The address that starts a cluster on this machine.
LOCAL = "local"

#: Seconds between two looks at what the tasks print, and between two lines that one task sends.
_SHOW_S = 0.5
#: Seconds between two looks of a task at whether it was cancelled.
_CANCEL_S = 0.2
#: Seconds that a cluster, and the board in it, may take to answer at all.
_REACH_S = 10.0
#: Seconds between two looks at whether the nodes that are there have room for what waits.
_QUEUE_S = 5.0

_CALLED_OFF = "called off before a node had begun with it"

#: Read by Ray's processes when they start here: no usage reports, and no workers in advance.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


class NodeWork(Protocol):
    """What runs on a node: a function that can be imported there."""

    def __call__(self, order: Any, attempt: Attempt, on_line: Callable[[str], None], cancellation: Cancellation) -> Any:
        """Do what ``order`` says; both it and the result can be pickled."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where a task runs, and how often it was started.

    Attributes:
        number: 1, unless Ray lost the node or worker of an earlier attempt.
        node: Address of the node.
    """

    number: int
    node: str


@dataclass(slots=True)
class _Submitted:
    """A task that has not ended, as far as the driver knows.

    Attributes:
        on_line: Takes its lines.
        num_cpus: Cores that it asks for.
        num_gpus: GPUs that it asks for.
        has_begun: Whether some node has begun with it.
        told: What was last said of why it waits.
    """

    on_line: Callable[[str], None]
    num_cpus: int
    num_gpus: int
    has_begun: bool = False
    told: str = ""

    def say_why_it_waits(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Tell ``on_line``, once for each reason.

        Args:
            nodes: What each node has, in use or not.
        """
        needs = f"{self.num_cpus} CPU(s)" + (f" and {self.num_gpus} GPU(s)" if self.num_gpus else "")
        fits = any(node.get("CPU", 0) >= self.num_cpus and node.get("GPU", 0) >= self.num_gpus for node in nodes)
        reason = ""
        if not fits:  # so it runs nowhere, even if it had begun: its node is lost
            reason = Notice(f"waiting for a node: none that is left in the cluster has {needs}")
        elif not self.has_begun:
            reason = f"waiting until a node has {needs} free"
        if reason and reason != self.told:
            self.on_line(reason)
        self.told = reason


class RayPool:
    """A connection to a cluster, with the working tree on every node that needs it.

    Args:
        address: As for ``ray.init``; ``local`` starts a cluster on this machine, which ends with the pool.
        tree: The working directory of the tasks.

    Raises:
        UsageError: When entered: Ray is not installed, there is no cluster, or the tree is too large.
    """

    def __init__(self, address: str, tree: WorkingTree) -> None:
        self._address = address
        self._tree = tree
        self._submitted: dict[str, _Submitted] = {}
        self._is_closed = threading.Event()
        self._board: Any = None
        self._redirection = contextlib.ExitStack()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RayPool:
        """Connect."""
        ray = _import_ray()
        if ray.is_initialized():
            raise UsageError("this process is connected to a Ray cluster already", where="--ray")
        self._scratch = tempfile.TemporaryDirectory(prefix="e2e-registry-")
        # Ray prints what happens to nodes to standard output, where results belong.
        self._redirection.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            self._connect(ray, Path(self._scratch.name) / "tree.zip")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        threading.Thread(target=self._show_lines, daemon=True).start()
        return self

    def _connect(self, ray: Any, archive: Path) -> None:
        self._tree.write_zip(archive)
        _require_reachable(self._address)
        own = {}
        if self._address == LOCAL:
            os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
            own = {"num_cpus": available_cpus(), "include_dashboard": False}
        try:
            with _keeping_sigterm():
                ray.init(
                    address=self._address,
                    runtime_env={"working_dir": str(archive)},
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    **own,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(self._address, str(error).strip().splitlines()[0]) from error
        # Not soft: on another node the counts of attempts could be lost with it. The loss of this one ends the driver.
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
        self._board = board.remote()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cluster; one that was started here ends."""
        self._is_closed.set()
        if self._scratch is not None:
            self._scratch.cleanup()
        _import_ray().shutdown()
        self._redirection.close()

    def greatest(self, resource: str, *, num_gpus: int = 0) -> int:
        """Return the most that one node has of ``CPU`` or ``GPU``, among the nodes with ``num_gpus`` GPUs at least."""
        nodes = (node for node in _nodes() if node.get("GPU", 0) >= num_gpus)
        return max((int(node.get(resource, 0)) for node in nodes), default=0)

    def run(
        self,
        work: NodeWork,
        order: Any,
        *,
        name: str,
        num_cpus: int,
        num_gpus: int,
        on_line: Callable[[str], None] | None,
        cancellation: Cancellation | None,
    ) -> Any:
        """Run ``work`` on a node with room for it, and wait; from any thread.

        Args:
            work: What runs.
            order: Given to it.
            name: Of the task, in Ray's own lists.
            num_cpus: Cores that the task is given.
            num_gpus: GPUs that the task is given, by ``CUDA_VISIBLE_DEVICES``.
            on_line: Called with the latest line now and then.
            cancellation: Ends the task; what it started on the node is ended first.

        Raises:
            NotStartedError: It was called off before a node had begun with it.
            LostRunError: It was cancelled, or its node was lost more often than Ray tries again.
            UsageError: The node could not be prepared, as without this package on it.
            RegistryError: What ``work`` raised.
        """
        ray = _import_ray()
        key = secrets.token_hex(8)
        remote = ray.remote(_do).options(num_cpus=num_cpus, num_gpus=num_gpus, name=name)
        self._submitted[key] = _Submitted(on_line or (lambda line: None), num_cpus, num_gpus)
        cancellation = cancellation or Cancellation()
        try:
            ref = remote.remote(work, order, self._board, key)

            def cancel(how: bytes) -> None:
                self._board.close.remote()  # else a core that this frees is given to a test that still waited
                ray.cancel(ref, force=how == supervisor.KILL, recursive=True)

            with cancellation.calling(cancel):
                return self._follow(ray, ref, key, cancellation)
        finally:
            self._submitted.pop(key, None)

    def _follow(self, ray: Any, ref: Any, key: str, cancellation: Cancellation) -> Any:
        """Wait for a task; withdraw it if it has not begun by the time that nothing may start any more."""
        while not ray.wait([ref], timeout=_SHOW_S)[0]:
            if not cancellation.allows_start and not cancellation.is_cancelled and self._withdraw(key):
                ray.cancel(ref)
                raise NotStartedError(_CALLED_OFF)
        try:
            return _result(ray, ref)
        except NotStartedError:
            raise
        except Exception as error:
            if not cancellation.is_cancelled:  # Ray has several ways to say that it was
                raise
            if self._withdraw(key):
                raise NotStartedError(_CALLED_OFF) from error
            raise LostRunError("the task was cancelled") from error

    def _withdraw(self, key: str) -> bool:
        """Have the board let no node begin with a task; return False if one has, or may have."""
        ray = _import_ray()
        if self._submitted[key].has_begun:
            return False
        try:
            return bool(ray.get(self._board.withdraw.remote(key), timeout=_REACH_S))
        except ray.exceptions.RayError:
            return False

    def _show_lines(self) -> None:
        ray = _import_ray()
        next_look = time.monotonic() + _QUEUE_S
        while not self._is_closed.wait(_SHOW_S):
            try:
                lines, begun = ray.get(self._board.take.remote(), timeout=_REACH_S)
                nodes = _nodes() if time.monotonic() >= next_look else None
            except Exception:  # noqa: BLE001, S112  # progress that is not shown is no reason to fail
                continue
            for key, task in tuple(self._submitted.items()):
                task.has_begun |= key in begun
                if key in lines:
                    task.on_line(lines[key])
                if nodes is not None:
                    task.say_why_it_waits(nodes)
            if nodes is not None:
                next_look = time.monotonic() + _QUEUE_S


class Board:
    """Where tasks leave their latest line, and count their attempts; an actor beside the driver."""

    def __init__(self) -> None:
        self._attempts: Counter[str] = Counter()
        self._withdrawn: set[str] = set()
        self._is_closed = False
        self._lines: dict[str, str] = {}

    def begin(self, key: str) -> int:
        """Count an attempt of a task and return its number; 0 if it may not begin."""
        if key in self._withdrawn or (self._is_closed and self._attempts[key] == 0):
            return 0
        self._attempts[key] += 1
        return self._attempts[key]

    def withdraw(self, key: str) -> bool:
        """Let no attempt of a task begin; return False if one has."""
        if self._attempts[key] == 0:
            self._withdrawn.add(key)
        return key in self._withdrawn

    def close(self) -> None:
        """Let no further task begin."""
        self._is_closed = True

    def show(self, key: str, line: str) -> None:
        """Take a task's latest line."""
        self._lines[key] = line

    def take(self) -> tuple[dict[str, str], list[str]]:
        """Return the latest line of each task that has printed since the last time, and all tasks that have begun."""
        lines, self._lines = self._lines, {}
        return lines, [key for key, attempts in self._attempts.items() if attempts]


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the process's SIGTERM handler: Ray's own would end a driver before what it has started is ended."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _require_reachable(address: str) -> None:
    """Refuse an address that nobody listens at: Ray would try for minutes.

    Raises:
        UsageError: No connection can be made.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # a word such as auto, which Ray looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error


def _no_cluster(address: str, reason: str) -> UsageError:
    return UsageError(
        f"cannot connect to Ray at {address!r}: {reason}",
        where="--ray",
        hint="give the address of a running cluster, auto, or local to start one",
    )


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UsageError("Ray is not installed", where="--ray", hint="pip install 'e2e-registry[recipes]'") from error
    return ray


def _nodes() -> list[Mapping[str, float]]:
    """Return what each node has that is alive, in use or not."""
    return [node["Resources"] for node in _import_ray().nodes() if node["Alive"]]


def _result(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, KeyboardInterrupt):
            raise LostRunError("the task was cancelled") from error
        if isinstance(error.cause, RegistryError):
            raise error.cause from None
        if isinstance(error.cause, ImportError) or "failed to import" in str(error):
            hint = "every node needs e2e-registry and what the recipes import, in the version that is here"
            raise UsageError(f"a node cannot run tests: {_last_line(error)}", where="--ray", hint=hint) from error
        if isinstance(error.cause, ray.exceptions.RayError):
            raise LostRunError(f"Ray gave the task up: {_last_line(error)}") from error
        raise
    except ray.exceptions.TaskCancelledError as error:
        raise LostRunError("the task was cancelled") from error
    except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.TaskUnschedulableError) as error:
        raise UsageError(f"a node could not be prepared: {_last_line(error)}", where="--ray") from error
    except ray.exceptions.RayError as error:
        raise LostRunError(f"Ray gave the task up: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _do(work: NodeWork, order: Any, board: Any, key: str) -> Any:
    """Run on a node. The work has a thread of its own: Ray interrupts the main thread of a task that is cancelled.

    That interrupt is seen between two instructions of Python alone, so the main thread must not sleep in a call.
    """
    ray = _import_ray()
    number = _wait_holding_cores(board.begin.remote(key))
    if number == 0:
        raise NotStartedError(_CALLED_OFF)
    attempt = Attempt(number, ray.util.get_node_ip_address())
    cancellation = Cancellation()
    outcome: list[Any] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()  # Thread.join() takes a thread for ended once it was interrupted (Python 3.11, 3.12)

    def run() -> None:
        try:
            outcome.append(work(order, attempt, _Throttle(lambda line: board.show.remote(key, line)), cancellation))
        except BaseException as error:  # noqa: BLE001  # raised again by the main thread
            errors.append(error)
        finally:
            has_ended.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while not has_ended.wait(_CANCEL_S):
            pass
    except KeyboardInterrupt:
        cancellation.cancel()
        while not has_ended.wait(_CANCEL_S) and thread.ident is not None:  # None: interrupted before it had started
            pass
        if errors and isinstance(errors[0], NotStartedError):  # it still waited for its GPUs
            raise errors[0] from None
        raise
    if errors:
        raise errors[0]
    return outcome[0]


def _wait_holding_cores(ref: Any) -> Any:
    """Return what ``ref`` will hold. ``ray.get`` would lend this task's cores to another task while it waits."""
    future = ref.future()
    while not future.done():
        concurrent.futures.wait([future], timeout=_CANCEL_S)
    return future.result()


class _Throttle:
    """Passes on one line in :data:`_SHOW_S` at most, and every notice."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send = send
        self._next = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if isinstance(line, Notice):  # said once
            self._send(line)
        elif line.strip() and now >= self._next:
            self._next = now + _SHOW_S
            self._send(line[:400])
