"""Tests that run at the same time: cores and GPUs are admitted, devices handed out, busy GPUs waited for."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository

from e2e_registry.execution import supervisor
from e2e_registry.execution.capacity import Capacity, Lease
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.execution.suite import Demand, Schedule

DEMANDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=12)


@given(demands=DEMANDS, cpus=st.integers(1, 4), jobs=st.integers(1, 5))
def test_no_core_or_gpu_is_given_twice_and_every_task_runs(
    demands: list[tuple[int, int]], cpus: int, jobs: int
) -> None:
    lock, in_use, most = threading.Lock(), {"cpus": 0, "jobs": 0}, {"cpus": 0, "jobs": 0}
    gpus: list[str] = []

    def work(task: int, lease: Lease | None) -> int:
        assert lease is not None
        with lock:
            in_use["cpus"] += lease.cpus
            in_use["jobs"] += 1
            most.update({name: max(most[name], in_use[name]) for name in most})
            assert not set(lease.gpus) & set(gpus)
            gpus.extend(lease.gpus)
        time.sleep(0.0005)
        with lock:
            in_use["cpus"] -= lease.cpus
            in_use["jobs"] -= 1
            for gpu in lease.gpus:
                gpus.remove(gpu)
        return task

    schedule = Schedule(
        range(len(demands)),
        work,
        demand=lambda task: Demand(*demands[task]),
        capacity=Capacity(cpus, ["0", "1"]),
        jobs=jobs,
        cancellation=Cancellation(),
    )
    assert sorted(result for _, result in schedule.results()) == list(range(len(demands)))
    assert most["cpus"] <= cpus
    assert most["jobs"] <= jobs


def test_an_interrupt_at_any_point_loses_no_result() -> None:
    """What arrives while a result is being handled does not drop it, and drain() ends what runs."""
    cancellation = Cancellation()
    started = threading.Barrier(3)

    def work(task: str, lease: Lease | None) -> str:
        started.wait()
        while task != "quick" and not cancellation.is_cancelled:
            time.sleep(0.01)
        return task

    schedule = Schedule(
        ["quick", "slow", "never"],
        work,
        demand=lambda task: Demand(0, 0),
        capacity=None,
        jobs=2,
        cancellation=cancellation,
    )

    def handle_until_interrupted() -> None:
        for task, _ in schedule.results():
            assert task == "quick"
            raise KeyboardInterrupt

    threading.Thread(target=started.wait).start()
    with pytest.raises(KeyboardInterrupt):
        handle_until_interrupted()
    assert sorted(result for _, result in schedule.drain()) == ["quick", "slow"]


def test_a_signal_just_after_what_runs_was_told_hastens_it_too() -> None:
    cancellation = Cancellation()
    heard: list[bytes] = []
    started = threading.Event()

    def hear(how: bytes) -> None:
        heard.append(how)
        if how == supervisor.END:
            raise KeyboardInterrupt

    def work(task: str, lease: Lease | None) -> str:
        with cancellation.calling(hear):
            started.set()
            while supervisor.KILL not in heard:
                time.sleep(0.01)
        return task

    schedule = Schedule(
        ["task"], work, demand=lambda task: Demand(0, 0), capacity=None, jobs=1, cancellation=cancellation
    )
    schedule._start_what_fits()
    started.wait()
    assert list(schedule.drain()) == [("task", "task")]
    assert heard == [supervisor.END, supervisor.KILL]


@pytest.mark.parametrize("signals", [1, 2, 3])
def test_a_second_signal_hastens_what_is_being_ended_and_a_third_leaves(
    monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    cancellation = Cancellation()
    heard: list[bytes] = []
    started, told_enough = threading.Event(), threading.Event()

    def work(task: str, lease: Lease | None) -> str:
        with cancellation.calling(heard.append):
            started.set()
            told_enough.wait()
        return task

    schedule = Schedule(
        ["task"], work, demand=lambda task: Demand(0, 0), capacity=None, jobs=1, cancellation=cancellation
    )
    wait, to_come = schedule._wait, ["interrupt"] * signals

    def wait_until_a_signal_comes() -> object:
        started.wait()
        if to_come:
            raise KeyboardInterrupt(to_come.pop())
        told_enough.set()
        return wait()

    monkeypatch.setattr(schedule, "_wait", wait_until_a_signal_comes)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(schedule.results())
        with pytest.raises(KeyboardInterrupt) if signals == 3 else contextlib.nullcontext():
            assert list(schedule.drain()) == [("task", "task")]
    finally:
        told_enough.set()
    assert heard == [supervisor.END, supervisor.KILL][:signals]


# ------------------------------------------------------------------------------------------------ through the CLI

GPU_RECIPE = """
    import os, pathlib, time
    from e2e_registry import MetricRecorder
    marks = pathlib.Path(os.environ["MARKS"])
    (marks / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
    deadline = time.monotonic() + 50
    while len(list(marks.iterdir())) < int(os.environ["TOGETHER"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    with MetricRecorder() as recorder:
        recorder.log_digest("devices", os.environ["CUDA_VISIBLE_DEVICES"].encode(), step=0)
        recorder.log({"together": len(list(marks.iterdir()))}, step=0)
"""


@pytest.fixture
def gpus(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A machine of GPUs 4 and 7, as far as the tool can tell: a stand-in for nvidia-smi answers."""
    tools, marks = tmp_path / "bin", tmp_path / "marks"
    tools.mkdir()
    marks.mkdir()
    (tools / "apps.csv").write_text("")
    script = tools / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        '  *query-gpu*) printf "4, GPU-aaaa-1\\n7, GPU-bbbb-2\\n" ;;\n'
        f'  *) cat "{tools}/apps.csv"; [ -e "{tools}/once" ] && : > "{tools}/apps.csv" ;;\n'
        "esac\nexit 0\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("TOGETHER", "1")
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setattr("e2e_registry.execution.capacity.available_cpus", lambda: 2)
    monkeypatch.setattr("e2e_registry.operations.machines.available_cpus", lambda: 2)
    (repository.root / "tests/e2e/test_stub.py").unlink()
    repository.write_recipe(body=GPU_RECIPE)
    for name in ("test_one", "test_two"):
        repository.write_test(name, metrics=["devices", "together"], observe=None, num_gpus=1)
    return repository


def check(repository: Repository, *options: str) -> dict[str, Any]:
    result = repository.cli("check", "--all", "--json", *options)
    assert result.out, result.err
    return {"code": result.code, "tests": result.json["tests"], "err": result.err}


def devices_of(repository: Repository) -> list[str]:
    return sorted(path.name for path in (repository.root.parent / "marks").iterdir())


def test_gpus_are_handed_out_one_to_each_of_two_tests(gpus: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER", "2")
    together = check(gpus, "--jobs", "2")
    assert [test["verdict"] for test in together["tests"]] == ["no-standard", "no-standard"]
    assert devices_of(gpus) == ["4", "7"]
    for mark in (gpus.root.parent / "marks").iterdir():
        mark.unlink()
    monkeypatch.setenv("TOGETHER", "1")
    check(gpus)
    assert devices_of(gpus) == ["4"]
    assert gpus.cli("record", "--all", "--runs", "1").code == 0  # on the same devices as the check
    assert devices_of(gpus) == ["4"]
    assert check(gpus, "--jobs", "1")["code"] == 0
    gpus.write_test("test_two", metrics=["devices"], observe=None, num_gpus=3)
    lacking = check(gpus, "--jobs", "2")
    assert [test["verdict"] for test in lacking["tests"]] == ["match", "skipped"]
    assert lacking["tests"][1]["reasons"] == ["needs 3 GPU(s), and 2 are here"]


def test_a_busy_gpu_is_waited_for_and_then_refused_and_its_process_lives(
    gpus: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e_registry.execution.gpus._POLL_S", 0.05)
    apps = gpus.root.parent / "bin" / "apps.csv"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        apps.write_text(f"GPU-aaaa-1, {other.pid}, /opt/a,b/train, 70000 MiB\n")
        refused = check(gpus, "--gpu-wait", "0.2")
        assert refused["code"] == 2
        one, two = refused["tests"]
        assert f"GPU 4: pid {other.pid} /opt/a,b/train (70000 MiB)" in one["error"]
        assert "--allow-busy-gpus" in one["error"]
        assert one["verdict"] == two["verdict"] == "error"
        assert devices_of(gpus) == []
        beside = check(gpus, "--gpu-wait", "0", "--jobs", "2")
        assert [test["verdict"] for test in beside["tests"]] == ["error", "no-standard"]  # GPU 7 is empty
        assert devices_of(gpus) == ["7"]
        for command in ("record", "run", "repeat", "seeds", "doctor"):  # whatever runs a test waits as the check does
            busy = gpus.cli(command, "--test", "tests/e2e/test_one.py", "--gpu-wait", "0")
            assert busy.code == 2, command
            assert f"GPU 4: pid {other.pid}" in busy.err
        assert devices_of(gpus) == ["7"]
        assert gpus.cli("record", "--test", "tests/e2e/test_one.py", "--allow-busy-gpus").code == 0
        assert devices_of(gpus) == ["4", "7"]
        shutil.rmtree(gpus.root / "tests/ci")
        allowed = check(gpus, "--allow-busy-gpus")
        assert [test["verdict"] for test in allowed["tests"]] == ["no-standard", "no-standard"]
        (apps.parent / "once").touch()
        assert check(gpus, "--gpu-wait", "60")["code"] == 3
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_test_with_more_cores_than_there_are_runs_alone_with_a_word(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e_registry.execution.capacity.available_cpus", lambda: 2)
    monkeypatch.setattr("e2e_registry.operations.machines.available_cpus", lambda: 2)
    repository.record()
    repository.write_test(num_cpus=64)
    result = repository.cli("check", "--all", "--jobs", "3")
    assert result.code == 0
    assert "warning: registered with num_cpus=64, and this machine has 2: it ran alone on those" in result.out
