"""One measurement a function. Each runs in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

import json
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What a table of metrics holds without this package: numbers, and neither bit patterns nor emission order.
VALUE_COLUMNS = ["metric", "role", "rank", "step", "dtype", "value"]
#: Repeats of each way of recording, by turns.
_BLOCKS = 20


def peak_mb() -> float:
    """Return the peak resident memory of this process in MB.

    ``ru_maxrss`` will not do: on Linux a child starts at the peak of the process that started it, and that one has
    just written files of many millions of rows.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except FileNotFoundError:
        found = None
    if found is not None:
        return int(found[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _timed(action: Callable[[], Any]) -> dict[str, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
    }


def compare(got: str, want: str, expected: str) -> dict[str, float]:
    """Time this package's comparison of two files, from opening them, verification included.

    Args:
        got: The run's file.
        want: The standard's file.
        expected: Points that differ and points missing, as ``1,0``; anything else is an error.
    """
    import e2e_registry.comparison as comparison
    from e2e_registry.standard import Standard
    from e2e_registry.tolerance import Policies

    found: list[str] = []

    def action() -> None:
        sides = Standard(Path(got)).batches(), Standard(Path(want)).batches()
        series = comparison.compare(*sides, policies=Policies(judge_all=True)).series
        found.append(f"{sum(one.num_failing for one in series)},{sum(one.missing.count for one in series)}")

    figures = _timed(action)
    if found != [expected]:
        raise SystemExit(f"{got} against {want}: {found[0]} points differ and miss, not {expected}")
    return figures


def read_both(got: str, want: str) -> dict[str, float]:
    """Time reading both files whole, comparing nothing."""
    import pyarrow.parquet as pq

    return _timed(lambda: [pq.read_table(path) for path in (got, want)])


def pandas_exact(got: str, want: str, what: str) -> dict[str, float]:
    """Time pandas' exact comparison of two files, from reading them.

    Args:
        got: The run's file.
        want: The standard's file; with one value in another.
        what: ``values`` for the columns that a table of metrics has without this package, ``all`` for all of them.
    """
    import pandas as pd

    columns = VALUE_COLUMNS if what == "values" else None

    def action() -> None:
        try:
            left, right = (pd.read_parquet(path, columns=columns) for path in (got, want))
            pd.testing.assert_frame_equal(left, right, check_exact=True)
        except AssertionError:
            return
        if got != want:
            raise SystemExit("pandas did not see the difference")

    return _timed(action)


def json_loop(got: str, want: str) -> dict[str, float]:
    """Time loading two golden JSON files and comparing value by value."""

    def action() -> None:
        a, b = (json.loads(Path(path).read_text()) for path in (got, want))
        differing = sum(a[metric][step] != value for metric, values in b.items() for step, value in values.items())
        if differing != 1:
            raise SystemExit(f"{differing} values differ, not 1")

    return _timed(action)


def small(folder: str, count: str) -> dict[str, float]:
    """Time opening, verifying and comparing many small standards in one process, imports included."""

    def action() -> None:
        import e2e_registry.comparison as comparison
        from e2e_registry.standard import Standard
        from e2e_registry.tolerance import Policies

        for number in range(int(count)):
            sides = (Standard(Path(folder) / f"{side}{number}.parquet").batches() for side in "ab")
            result = comparison.compare(*sides, policies=Policies(judge_all=True))
            if result.verdict.value != "match":
                raise SystemExit("a small standard does not match its twin")

    return _timed(action)


def recorder(calls: str) -> dict[str, float]:
    """Return microseconds a torch scalar, logged in batches of ten, of four ways to keep it.

    This recorder; ``json.dumps`` lines into a buffered file; ``item()``, which keeps nothing; TensorBoard's
    SummaryWriter. Medians over blocks that take turns.
    """
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from e2e_registry import MetricRecorder

    generator = torch.Generator().manual_seed(0)
    scalars = {f"train/metric_{number}": torch.randn((), generator=generator) for number in range(10)}
    with (
        tempfile.TemporaryDirectory() as folder,
        MetricRecorder(run_dir=Path(folder, "run")) as ours,
        SummaryWriter(str(Path(folder, "board"))) as board,
        Path(folder, "lines.jsonl").open("w") as lines,
    ):

        def log(step: int) -> None:
            ours.log(scalars, step=step)

        def dumps(step: int) -> None:
            line = {"step": step, **{name: scalar.item() for name, scalar in scalars.items()}}
            lines.write(json.dumps(line) + "\n")

        def items(step: int) -> None:
            for scalar in scalars.values():
                scalar.item()

        def add_scalars(step: int) -> None:
            for name, scalar in scalars.items():
                board.add_scalar(name, scalar, step)

        figures = _by_turns({"recorder_us": log, "json_dumps_us": dumps, "item_us": items}, int(calls))
        # Alone and last, since its thread goes on writing after a call has returned.
        figures |= _by_turns({"summary_writer_us": add_scalars}, int(calls) // 10)
    return {name: seconds / len(scalars) * 1e6 for name, seconds in figures.items()}


def _by_turns(ways: dict[str, Callable[[int], None]], calls: int) -> dict[str, float]:
    """Return the median seconds of one call of each way, over blocks of calls that take turns."""
    calls = max(calls // _BLOCKS, 1)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(_BLOCKS + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            for step in range(block * calls, (block + 1) * calls):
                way(step)
            times[name].append((time.perf_counter() - begin) / calls)
    return {name: statistics.median(found[1:]) for name, found in times.items()}  # the first block warms up


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function for function in (compare, read_both, pandas_exact, json_loop, small, recorder)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(MEASURES[sys.argv[1]](*sys.argv[2:])))
