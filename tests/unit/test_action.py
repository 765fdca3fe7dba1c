"""The step of ``action.yml`` that runs the command line, and what ``merge`` makes of what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from repositories import Repository

ROOT = Path(__file__).resolve().parents[2]
TEST = "tests/e2e/test_stub.py"
#: Says that it runs, and does for as long as nobody ends it.
ENDLESS = """
import os, time
open("started", "w").write(str(os.getpid()))
time.sleep(600)
"""


def run_step() -> dict[str, Any]:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    (found,) = [step for step in steps if step.get("id") == "run"]
    return found


@dataclass(frozen=True)
class Job:
    """A job of a runner that keeps its workspace."""

    repository: Repository
    outputs_file: Path

    def start(self, **inputs: str) -> subprocess.Popen[str]:
        """Start the step as a runner does: its shell is what signals go to."""
        given = dict.fromkeys(run_step()["env"], "") | {"COMMAND": "check", "NAME": "e2e", "ARTIFACT": "part1"}
        given |= {"PYTHON": sys.executable, "EXPORT": str(self.repository.root.parent / "export"), **inputs}
        given |= {"GITHUB_ACTION_PATH": str(ROOT), "GITHUB_OUTPUT": str(self.outputs_file)}
        self.outputs_file.unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", run_step()["run"]],
            cwd=self.repository.root,
            env=os.environ | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **inputs: str) -> int:
        """Run the step to its end; return the shell's exit code."""
        step = self.start(**inputs)
        step.communicate(timeout=120)
        return step.returncode

    @property
    def outputs(self) -> dict[str, str]:
        lines = self.outputs_file.read_text().splitlines() if self.outputs_file.exists() else []
        return dict(line.split("=", 1) for line in lines)

    def file(self, name: str) -> Path:
        return self.repository.root / ".e2e_runs" / name

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file("job.json").read_text())
        return found


@pytest.fixture
def job(repository: Repository) -> Job:
    repository.record()
    return Job(repository, repository.root.parent / "outputs.txt")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_check_leaves_its_results_and_the_facts_of_its_job(job: Job) -> None:
    assert job.run(PLATFORM="cpu-x86_64-portable") == 0
    assert job.outputs == {"run-folder": ".e2e_runs", "exit-code": "0"}
    assert job.facts == {
        "name": "e2e",
        "artifact": "part1",
        "command": "check",
        "platform": "cpu-x86_64-portable",
        "attempt": 1,
        "exit_code": 0,
    }
    assert job.repository.cli("merge", ".e2e_runs").code == 0
    job.repository.write_recipe("SCALE = 2.0")
    assert job.run() == 0
    assert job.outputs["exit-code"] == "1"
    assert job.repository.cli("merge", ".e2e_runs").code == 1
    job.repository.write_test(quarantine={"reason": "flaky", "until": "2999-01-01"})
    assert job.run(NAME="", ARTIFACT="another") == 0
    assert (job.facts["name"], job.outputs["exit-code"]) == ("another", "0")
    assert job.repository.cli("merge", ".e2e_runs").code == 0


@pytest.mark.parametrize("command", ["check", "record"])
def test_results_of_an_earlier_step_are_not_those_of_one_that_could_not_begin(job: Job, command: str) -> None:
    assert job.run() == 0
    job.repository.write_test(metrics=[])
    job.run(COMMAND=command)
    assert job.facts["exit_code"] == 2
    assert not job.file("results.json").exists()
    assert not job.file("junit.xml").exists()
    merged = job.repository.cli("merge", ".e2e_runs", "--json")
    assert merged.code == 4
    assert f"{command} ended with exit code 2" in merged.json["problems"][0]


@pytest.fixture
def endless(job: Job) -> Iterator[Job]:
    """A job whose recipe does not come to its end by itself; whatever is left of it is ended."""
    job.repository.write_recipe(ENDLESS)
    yield job
    started = job.repository.root / "started"
    if started.exists() and is_alive(int(started.read_text())):
        os.kill(int(started.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code", "why"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_cancelled_step_ends_its_check_which_keeps_what_it_knows(
    endless: Job, number: signal.Signals, code: int, why: str
) -> None:
    step, started = endless.start(), endless.repository.root / "started"
    wait_for(lambda: started.exists() and bool(started.read_text()))
    # What the uploads need is said before the run: a step that is killed says nothing at its end.
    assert endless.outputs == {"run-folder": ".e2e_runs"}
    assert endless.facts["exit_code"] is None
    step.send_signal(number)
    step.communicate(timeout=60)
    assert endless.outputs["exit-code"] == str(code)
    assert endless.facts["exit_code"] == code
    results = json.loads(endless.file("results.json").read_text())
    assert (results["why_partial"], [test["verdict"] for test in results["tests"]]) == (why, ["incomplete"])
    assert not is_alive(int(started.read_text()))
    assert endless.repository.cli("merge", ".e2e_runs").code == 4


def test_settings_that_cannot_be_read_are_said_without_a_traceback(job: Job) -> None:
    (job.repository.root / "pyproject.toml").write_text("[tool.e2e_registry]\nno_such_setting = 1\n")
    step = job.start()
    said = step.communicate(timeout=60)[0]
    assert step.returncode == 2
    assert "no_such_setting" in said
    assert "Traceback" not in said
