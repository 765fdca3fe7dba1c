"""The benchmarks run and report every target; no time is asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

TARGETS = [
    "comparison: times faster than pandas.testing.assert_frame_equal",
    "comparison: times faster than a JSON loop",
    "comparison: time over reading both files whole",
    "comparison: peak memory, MB",
    "comparison: peak memory with all points in one series, MB",
    "comparison: peak memory over that at a quarter of the points",
    "a missing step: time over the aligned one",
    "row groups of 1,000: time over the aligned one",
    "row groups of 10,000: time over the aligned one",
    "row groups of 1,600: time over the aligned one",  # all rows of --smoke in one
    "permuted dictionaries: time over the aligned one",
    "recorder: microseconds a torch scalar",
    "recorder: times faster than SummaryWriter",
    "cold compare: time over importing pyarrow.parquet",
    "cold compare: packages loaded that are pandas",
    "3 small standards: seconds in one process",
]


@pytest.mark.slow
def test_every_target_is_measured_and_reported() -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["targets"]
    assert sorted(target["name"] for target in targets) == sorted(TARGETS)
    for target in targets:
        figure, bound = target["figure"], target["bound"]
        assert math.isfinite(figure)
        assert target["holds"] is (figure <= bound if target["at_most"] else figure >= bound)


def test_the_peak_memory_of_a_measurement_is_not_that_of_what_started_it() -> None:
    measured = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from measures import peak_mb; print(peak_mb())"
    starting = (
        "import subprocess, sys; held = bytearray(300_000_000); held[::4096] = held[::4096].replace(b'\\0', b'1');"
        f"print(subprocess.check_output([sys.executable, '-c', {measured!r}], text=True))"
    )
    done = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 100
