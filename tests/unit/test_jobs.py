"""Tests that run at the same time: cores and GPUs are admitted, devices handed out, busy GPUs waited for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository
from test_results import read_results

from e2e_registry.comparison import Assessment
from e2e_registry.config import load_settings
from e2e_registry.errors import RegistryError
from e2e_registry.execution import capacity, supervisor
from e2e_registry.execution import gpus as gpus_module
from e2e_registry.execution.capacity import Capacity, Lease
from e2e_registry.execution.gpus import GpuLock
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.execution.suite import Demand, Schedule
from e2e_registry.operations.machines import LocalMachine
from e2e_registry.operations.results import Results
from e2e_registry.operations.selection import Selection, select
from e2e_registry.operations.suite import check_suite
from e2e_registry.registration import Registration

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


def test_what_can_never_start_is_an_error_and_not_left_out(repository: Repository) -> None:
    """Reported: a GPU that was counted for admission and not for leasing left a check at 0, with tests not run."""
    schedule = Schedule(
        ["small", "large"],
        lambda task, lease: task,
        demand=lambda task: Demand(1, 0) if task == "small" else Demand(1, 1),
        capacity=Capacity(1, []),
        jobs=2,
        cancellation=Cancellation(),
    )
    with pytest.raises(RegistryError, match=r"1 test\(s\) cannot start though nothing runs: the first needs 1 core"):
        list(schedule.results())

    class Miscounting(LocalMachine):
        def lacks(self, registration: Registration) -> str | None:
            return None

    repository.write_test("test_gpu", num_gpus=2, profile="cuda")
    settings = load_settings(repository.root)
    tests = select(settings, everything=True)
    results = Results(settings, [test.test_id for test in tests], Selection(everything=True))
    with pytest.raises(RegistryError):
        check_suite(tests, settings, results, Silent(), machine=Miscounting(num_cpus=1, devices=("0",)))
    document = read_results(repository)
    assert (document["status"], document["why_partial"]) == ("partial", "internal-error")
    assert document["not_run"] == ["tests/e2e/test_gpu.py"]
    assert [test["verdict"] for test in document["tests"]] == ["no-standard"]


class Silent:
    def started(self, test_id: str) -> Callable[[str], None]:
        return lambda line: None

    def ended(self, assessment: Assessment) -> None:
        """Show nothing."""


def test_what_a_machine_has_is_counted_once(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.write_test("test_gpu", num_gpus=1, profile="cuda")
    repository.record()
    counts = iter([(), ("0",), ("0",), ("0",)])  # a device file that appears when a driver is first asked
    monkeypatch.setattr("e2e_registry.operations.machines.visible_gpus", lambda: next(counts))
    result = repository.cli("check", "--all")
    assert result.code == 0, result.err
    document = read_results(repository)
    assert (document["status"], document["not_run"]) == ("complete", [])
    assert [test["verdict"] for test in document["tests"]] == ["skipped", "match"]


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


#: Fails if another recipe is on its GPU; ends once as many run as should at the same time.
CLAIMING_RECIPE = """
    import os, pathlib, time
    from e2e_registry import MetricRecorder
    marks = pathlib.Path(os.environ["MARKS"])
    mark = marks / os.environ["CUDA_VISIBLE_DEVICES"]
    mark.touch(exist_ok=False)
    deadline = time.monotonic() + 60
    while (together := len(list(marks.iterdir()))) < int(os.environ["TOGETHER"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    with MetricRecorder() as recorder:
        recorder.log({"together": together}, step=0)
    time.sleep(2)
    mark.unlink()
"""


@pytest.fixture
def gpus(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A machine of GPUs 4 and 7, as far as the tool can tell: a stand-in for nvidia-smi answers."""
    tools, marks = tmp_path / "bin", tmp_path / "marks"
    tools.mkdir()
    marks.mkdir()
    # Nobody else's: runs of this machine lock their GPUs by these names.
    names = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
    (tools / "uuids").write_text("\n".join(names))
    (tools / "apps.csv").write_text("")
    script = tools / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f'  *query-gpu*) printf "4, {names[0]}\\n7, {names[1]}\\n" ;;\n'
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
    yield repository
    for name in names:
        Path(f"/tmp/e2e-registry-{name}.lock").unlink(missing_ok=True)


def check(repository: Repository, *options: str) -> dict[str, Any]:
    result = repository.cli("check", "--all", "--json", *options)
    assert result.out, result.err
    return {"code": result.code, "tests": result.json["tests"], "err": result.err}


def uuids_of(repository: Repository) -> list[str]:
    return (repository.root.parent / "bin/uuids").read_text().split()


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
        uuid_of_4, uuid_of_7 = uuids_of(gpus)
        apps.write_text(f"{uuid_of_4}, {other.pid}, /opt/a,b/train, 70000 MiB\n")
        assert [test["verdict"] for test in check(gpus)["tests"]] == ["no-standard", "no-standard"]
        assert devices_of(gpus) == ["7"]  # which is empty
        (gpus.root.parent / "marks/7").unlink()
        with apps.open("a") as file:
            file.write(f"{uuid_of_7}, {other.pid}, train, 12 MiB\n")
        refused = check(gpus, "--gpu-wait", "0.2")
        assert refused["code"] == 2
        one, two = refused["tests"]
        assert f"GPU 4: pid {other.pid} /opt/a,b/train (70000 MiB)" in one["error"]
        assert "--allow-busy-gpus" in one["error"]
        assert one["verdict"] == two["verdict"] == "error"
        assert devices_of(gpus) == []
        assert refused["err"].count(f"waiting for GPU 4: pid {other.pid} /opt/a,b/train (70000 MiB); GPU 7: ") == 2
        for command in ("record", "run", "repeat", "seeds", "doctor"):  # whatever runs a test waits as the check does
            busy = gpus.cli(command, "--test", "tests/e2e/test_one.py", "--gpu-wait", "0")
            assert busy.code == 2, command
            assert f"GPU 4: pid {other.pid}" in busy.err
        assert devices_of(gpus) == []
        assert gpus.cli("record", "--test", "tests/e2e/test_one.py", "--allow-busy-gpus").code == 0
        assert devices_of(gpus) == ["4"]
        shutil.rmtree(gpus.root / "tests/ci")
        allowed = check(gpus, "--allow-busy-gpus")
        assert [test["verdict"] for test in allowed["tests"]] == ["no-standard", "no-standard"]
        (apps.parent / "once").touch()
        assert check(gpus, "--gpu-wait", "60")["code"] == 3
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("num_gpus_here", [2, 1])
@pytest.mark.parametrize("how", ["two checks", "two runs", "pytest -n 2"])
def test_runs_that_know_nothing_of_each_other_share_no_gpu(
    gpus: Repository, monkeypatch: pytest.MonkeyPatch, how: str, num_gpus_here: int
) -> None:
    """Nor before their processes show on it. They run at the same time on two GPUs, one after the other on one."""
    monkeypatch.setenv("TOGETHER", str(num_gpus_here))
    gpus.write_recipe(body=CLAIMING_RECIPE)
    tests = [gpus.write_test(f"test_{name}", metrics=["together"], observe=None, num_gpus=1) for name in ("one", "two")]
    names = ["4,7", "4,7"] if num_gpus_here == 2 else ["4", uuids_of(gpus)[0]]
    environments = [{**os.environ, "CUDA_VISIBLE_DEVICES": devices} for devices in names]
    tool = [sys.executable, "-m"]
    commands = {
        "two checks": [[*tool, "e2e_registry", "check", "--test", test] for test in tests],
        "two runs": [[*tool, "e2e_registry", "run", "--test", test] for test in tests],
        "pytest -n 2": [[*tool, "pytest", "-p", "no:cacheprovider", "--e2e", "-n", "2", *tests]],
    }
    started = [
        subprocess.Popen(
            command, cwd=gpus.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, environment in zip(commands[how], environments, strict=False)
    ]
    output = "".join(text for process in started for text in process.communicate(timeout=120))
    recorded = [
        line
        for run in gpus.runs
        for line in (run / "metrics.main.rank0.jsonl").read_text().splitlines()
        if "together" in line
    ]
    assert len(recorded) == 2, output
    assert all(f'"together": {num_gpus_here}' in line for line in recorded), recorded
    if num_gpus_here == 1 and how != "pytest -n 2":
        assert "another run of e2e-registry, pid " in output


def test_a_locked_gpu_is_refused_by_whatever_name_and_its_holder_named(gpus: Repository) -> None:
    name = uuids_of(gpus)[0]
    lock = GpuLock.take("4", name)
    assert isinstance(lock, GpuLock)
    assert lock.is_held
    assert Path(f"/tmp/e2e-registry-{name}.lock").stat().st_mode & 0o777 == 0o666  # for other users
    for device in ("4", name, name[:12]):
        result = gpus.command(
            "run", "--test", "tests/e2e/test_one.py", "--gpu-wait", "0", env={"CUDA_VISIBLE_DEVICES": device}
        )
        assert result.code == 2, result.err
        assert f"still in use after 0 s: GPU {device}: another run of e2e-registry, pid {os.getpid()} (" in result.err
    lock.release()
    assert gpus.cli("run", "--test", "tests/e2e/test_one.py", "--gpu-wait", "0").code == 0


def test_a_look_at_the_gpus_is_no_part_of_the_wait_for_them(gpus: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = GpuLock.take("4", uuids_of(gpus)[0])
    assert isinstance(lock, GpuLock)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    query = gpus_module._query

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1)
        return query(*arguments, **options)

    monkeypatch.setattr(gpus_module, "_query", slow)
    result = gpus.cli("run", "--test", "tests/e2e/test_one.py", "--gpu-wait", "0.8")
    assert result.code == 2
    assert "waiting for GPU 4: another run of e2e-registry" in result.err
    lock.release()


def test_pytest_waits_for_a_gpu_as_long_as_it_is_told(gpus: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = GpuLock.take("4", uuids_of(gpus)[0])
    assert isinstance(lock, GpuLock)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")

    def run(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/e2e/test_one.py", *options]
        done = subprocess.run(command, cwd=gpus.root, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    for mode in ("--e2e", "--e2e-record"):
        code, shown = run(mode, "--e2e-gpu-wait", "0")
        assert (code, "still in use after 0 s: GPU 4: another run of e2e-registry" in shown) == (1, True), shown
    assert run("--e2e", "--e2e-gpu-wait", "nan")[0] == pytest.ExitCode.USAGE_ERROR
    assert gpus.cli("check", "--all", "--gpu-wait", "nan").code == 2
    assert devices_of(gpus) == []
    code, shown = run("--e2e", "--e2e-allow-busy-gpus")
    assert (code, "no-standard" in shown) == (1, True), shown
    assert devices_of(gpus) == ["4"]
    lock.release()


def test_what_waits_for_a_gpu_when_the_check_is_interrupted_was_not_run(gpus: Repository) -> None:
    lock = GpuLock.take("4", uuids_of(gpus)[0])
    assert isinstance(lock, GpuLock)
    check = subprocess.Popen(
        [sys.executable, "-m", "e2e_registry", "check", "--all", "--jobs", "2"],
        cwd=gpus.root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "4"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert check.stderr is not None
    shown = ""
    while "waiting for GPU 4: another run of e2e-registry, pid" not in shown:
        line = check.stderr.readline()
        assert line, shown
        shown += line
    check.send_signal(signal.SIGINT)
    assert check.wait(60) == 130
    lock.release()
    results = read_results(gpus)
    assert (results["why_partial"], results["tests"]) == ("interrupted", [])
    assert results["not_run"] == ["tests/e2e/test_one.py", "tests/e2e/test_two.py"]


@pytest.mark.parametrize("case", ["a link", "a folder", "nobody may write"])
def test_where_no_lock_can_be_had_processes_are_all_that_is_looked_at(
    gpus: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(gpus_module, "_LOCK_FOLDER", tmp_path)
    path = tmp_path / f"e2e-registry-{uuids_of(gpus)[0]}.lock"
    if case == "a link":
        path.symlink_to(tmp_path / "precious")
        (tmp_path / "precious").write_text("content")
    elif case == "a folder":
        path.mkdir()
    else:
        monkeypatch.setattr(gpus_module, "_LOCK_FOLDER", Path("/proc"))
    assert gpus.cli("run", "--test", "tests/e2e/test_one.py", "--gpu-wait", "0").code == 0
    assert devices_of(gpus) == ["4"]
    assert case != "a link" or (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize("named", ["", "-1", "none", "NoDevFiles", "void", "all", " ,0", "gpu0"])
def test_where_all_gpus_are_hidden_a_test_that_needs_one_is_skipped(
    gpus: Repository, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    result = check(gpus, "--allow-empty")
    assert [test["verdict"] for test in result["tests"]] == ["skipped", "skipped"]
    assert result["tests"][0]["reasons"] == ["needs 1 GPU(s), and 0 are here"]


def test_devices_are_named_by_number_in_a_container_that_was_given_another_than_the_first(
    gpus: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus_module, "_DEVICE_FOLDER", tmp_path)
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    check(gpus)
    assert devices_of(gpus) == ["0"]


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/ci/job", {"ci/cpu.max": "300000 100000", "ci/job/cpu.max": "max 100000"}, 3),
        (
            "5:cpuset:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "3:cpu:/ci/job",
            {"cpu/ci/job/cpu.cfs_quota_us": "50000", "cpu/ci/job/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("3:memory:/", {"cpu.max": "nonsense"}, 8),
    ],
)
def test_cores_are_those_that_the_quota_of_a_cgroup_of_either_version_leaves(
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str,
    files: dict[str, str],
    cpus: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(capacity, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own + "\n")
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    repository.write_test(num_cpus=64)
    assert f"num_cpus=64, and this machine has {cpus}:" in repository.cli("check", "--all").out


def test_a_test_with_more_cores_than_there_are_runs_alone_with_a_word(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e_registry.operations.machines.available_cpus", lambda: 2)
    repository.record()
    repository.write_test(num_cpus=64)
    result = repository.cli("check", "--all", "--jobs", "3")
    assert result.code == 0
    assert "warning: registered with num_cpus=64, and this machine has 2: it ran alone on those" in result.out
