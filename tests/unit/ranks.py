"""Ranks of a process group as processes of their own, started afresh."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from typing import Any

#: Each process imports torch and the test's module first, on a machine that others use too.
_TIMEOUT_S = 600.0


def run_ranks(work: Callable[..., None], world_size: int, *args: Any) -> list[Any]:
    """Return what each rank has put into its queue, in the order of ranks.

    Args:
        work: Called in each process with its rank, ``args``, and a queue, into which it puts its rank and a result.
        world_size: How many.
        args: For all of them.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    # Daemons, since a rank whose peer has died waits for it for half an hour, and this process would wait with it.
    ranks = [context.Process(target=work, args=(rank, *args, results), daemon=True) for rank in range(world_size)]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while len(found) < world_size:
            try:
                rank, result = results.get(timeout=1)
                found[rank] = result
            except queue.Empty:
                codes = [process.exitcode for process in ranks]
                assert set(codes) <= {None, 0}, f"a rank has died: {codes}"
                assert time.monotonic() < deadline, f"after {_TIMEOUT_S:g} s: {codes}"
        for process in ranks:
            process.join(timeout=60)
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(world_size)]
