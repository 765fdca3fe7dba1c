"""Runs many tasks at the same time, as far as the machine has room for them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from e2e_registry.errors import RegistryError
from e2e_registry.execution.capacity import Capacity, Lease
from e2e_registry.execution.launcher import SIGNAL_LATENCY_S, Cancellation

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a task needs while it runs."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class _End(Generic[T, R]):
    task: T
    lease: Lease | None
    result: R | None = None
    error: BaseException | None = None


class Schedule(Generic[T, R]):
    """Tasks of one run, each in a thread of its own.

    Its methods are called by one thread, the main one, whose KeyboardInterrupt may come at any point: a task that
    has ended stays in ``_ended`` until its result was taken, so that none is lost; it may be yielded twice.

    Args:
        tasks: In the order in which they start if there is room; one that does not fit yet lets later ones pass.
        work: Does one task with what it was given; ends early once the cancellation says so.
        demand: What a task needs.
        capacity: What there is; None if another scheduler sees to that.
        jobs: How many tasks run at the same time at most.
        cancellation: What ``work`` obeys.
    """

    def __init__(
        self,
        tasks: Sequence[T],
        work: Callable[[T, Lease | None], R],
        *,
        demand: Callable[[T], Demand],
        capacity: Capacity | None,
        jobs: int,
        cancellation: Cancellation,
    ) -> None:
        self._waiting = list(tasks)
        self._work = work
        self._demand = demand
        self._capacity = capacity
        self._jobs = jobs
        self._cancellation = cancellation
        self._running: dict[T, threading.Thread] = {}
        self._ended: deque[_End[T, R]] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def stop_starting(self) -> None:
        """Start no further task, and have those give up that wait for something; those that run come to their end."""
        self._waiting.clear()
        self._cancellation.stop_starting()

    def results(self) -> Iterator[tuple[T, R]]:
        """Yield each task with its result as it ends.

        Raises:
            BaseException: What ``work`` raised.
            RegistryError: What still waits does not fit though nothing runs: it never would.
        """
        self._start_what_fits()
        while self._running:
            end = self._wait()
            if end.error is not None:
                raise end.error
            yield end.task, end.result  # type: ignore[misc]  # without an error there is a result
            self._forget(end)
            self._start_what_fits()
        if self._waiting:
            first = self._demand(self._waiting[0])
            raise RegistryError(
                f"{len(self._waiting)} test(s) cannot start though nothing runs: the first needs "
                f"{first.num_cpus} core(s) and {first.num_gpus} GPU(s)",
                hint="this is a fault of e2e-registry: what does not fit should have been skipped",
            )

    def drain(self) -> Iterator[tuple[T, R]]:
        """End what runs, start nothing, and yield what still came to a result.

        A signal here (CI systems send SIGTERM some seconds after SIGINT) makes the tasks end faster; a second one
        leaves them to their supervisors, and what its handler raises passes.
        """
        self.stop_starting()
        has_hastened = False
        try:
            self._cancellation.cancel()
        except BaseException:  # noqa: BLE001  # whatever a signal handler raises, as below
            has_hastened = True
            self._cancellation.cancel(hasten=True)
        self._running = {task: thread for task, thread in self._running.items() if thread.ident is not None}
        while self._running:
            try:
                end = self._wait()
            except BaseException:  # whatever a signal handler raises
                if has_hastened:
                    raise
                has_hastened = True
                self._cancellation.cancel(hasten=True)
                continue
            if end.error is None:
                yield end.task, end.result  # type: ignore[misc]
            self._forget(end)

    def _start_what_fits(self) -> None:
        for task in list(self._waiting):
            if len(self._running) >= self._jobs:
                return
            demand = self._demand(task)
            lease = None if self._capacity is None else self._capacity.lease(demand.num_cpus, demand.num_gpus)
            if lease is not None or self._capacity is None:
                self._waiting.remove(task)
                thread = threading.Thread(target=self._do, args=(task, lease), daemon=True)
                self._running[task] = thread  # before the start: what runs must be known to drain()
                thread.start()

    def _do(self, task: T, lease: Lease | None) -> None:
        end: _End[T, R]
        try:
            end = _End(task, lease, self._work(task, lease))
        except BaseException as error:  # noqa: BLE001  # the thread that waits raises it
            end = _End(task, lease, error=error)
        self._ended.append(end)
        self._wake.put(None)

    def _wait(self) -> _End[T, R]:
        while not self._ended:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=SIGNAL_LATENCY_S)
        return self._ended[0]

    def _forget(self, end: _End[T, R]) -> None:
        del self._running[end.task]
        self._ended.popleft()
        if end.lease is not None and self._capacity is not None:
            self._capacity.release(end.lease)
