"""One measurement a function. Each runs in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _timed(action: Callable[[], Any]) -> dict[str, float]:
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def compare(got: str, want: str, verdict: str) -> dict[str, float]:
    """Time this package's comparison of two files, reading and verification included."""
    import e2e_registry.comparison as comparison
    from e2e_registry.standard import Standard
    from e2e_registry.tolerance import Policies

    found: list[str] = []

    def action() -> None:
        sides = Standard(Path(got)).batches(), Standard(Path(want)).batches()
        found.append(comparison.compare(*sides, policies=Policies(judge_all=True)).verdict.value)

    figures = _timed(action)
    if found != [verdict]:
        raise SystemExit(f"{got} against {want}: {found[0]}, not {verdict}")
    return figures


def read_both(got: str, want: str) -> dict[str, float]:
    """Time reading both files whole, comparing nothing."""
    import pyarrow.parquet as pq

    return _timed(lambda: [pq.read_table(path) for path in (got, want)])


def pandas_exact(got: str, want: str) -> dict[str, float]:
    """Time pandas' exact comparison of two frames that are in memory already."""
    import pandas as pd

    left, right = (pd.read_parquet(path) for path in (got, want))

    def action() -> None:
        try:
            pd.testing.assert_frame_equal(left, right, check_exact=True)
        except AssertionError:
            return
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


def small(folder: str, count: int) -> dict[str, float]:
    """Time opening, verifying and comparing many small standards in one process, imports not included."""
    import e2e_registry.comparison as comparison
    from e2e_registry.standard import Standard
    from e2e_registry.tolerance import Policies

    def action() -> None:
        for number in range(int(count)):
            sides = (Standard(Path(folder) / f"{side}{number}.parquet").batches() for side in "ab")
            result = comparison.compare(*sides, policies=Policies(judge_all=True))
            if result.verdict.value != "match":
                raise SystemExit("a small standard does not match its twin")

    return _timed(action)


def recorder(calls: int) -> dict[str, float]:
    """Return microseconds a torch scalar in batches of ten: this recorder, SummaryWriter, json.dumps, item() alone."""
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from e2e_registry import MetricRecorder

    generator = torch.Generator().manual_seed(0)
    scalars = {f"train/metric_{i}": torch.randn((), generator=generator) for i in range(10)}
    calls = int(calls)

    def per_scalar(action: Callable[[int], None], number: int) -> float:
        action(0)
        begin = time.perf_counter()
        for step in range(1, number + 1):
            action(step)
        return (time.perf_counter() - begin) / (number * len(scalars)) * 1e6

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink:
        with MetricRecorder(run_dir=Path(folder) / "run") as ours:
            figures = {"recorder_us": per_scalar(lambda step: ours.log(scalars, step=step), calls)}
        writer = SummaryWriter(str(Path(folder) / "board"))

        def board(step: int) -> None:
            for name, scalar in scalars.items():
                writer.add_scalar(name, scalar, step)

        def dumps(step: int) -> None:
            line = {"step": step, **{name: scalar.item() for name, scalar in scalars.items()}}
            sink.write(json.dumps(line) + "\n")

        def items(step: int) -> None:
            for scalar in scalars.values():
                scalar.item()

        figures["summary_writer_us"] = per_scalar(board, max(calls // 20, 10))
        figures["json_dumps_us"] = per_scalar(dumps, calls)
        figures["item_us"] = per_scalar(items, calls)
        writer.close()
    return figures


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function for function in (compare, read_both, pandas_exact, json_loop, small, recorder)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(MEASURES[sys.argv[1]](*sys.argv[2:])))
