"""The benchmarks run and report every target; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
NAMED = [
    "pandas",
    "JSON",
    "reading both",
    "peak memory",
    "missing step",
    "row groups",
    "permuted",
    "recorder",
    "cold",
    "small",
]


def test_every_target_is_measured_and_reported() -> None:
    done = subprocess.run([sys.executable, str(RUN), "--smoke", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["targets"]
    for target in targets:
        assert target["holds"] == (
            target["figure"] <= target["bound"] if target["at_most"] else target["figure"] >= target["bound"]
        )
    for name in NAMED:
        assert any(name in target["name"] for target in targets), name
