"""``check --ray`` on a cluster of two nodes: verdicts as here, a lost node, signals, and what is left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from repositories import Repository
from test_cli_check import processes_running
from test_results import comparable, outcomes, read_results

pytestmark = pytest.mark.slow

#: In the environment of the nodes and not in the caller's: had a recipe one of them, its run would be incomparable.
OF_THE_NODES = {"MKL_CBWR": "AUTO", "OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "77", "ATEN_CPU_CAPABILITY": "avx2"}

#: Logs what its environment is: what the caller stated, what the profile pins, and nothing of Ray.
ENVIRONMENT_RECIPE = """
    import os
    from e2e_registry import MetricRecorder
    ours = ("E2E_", "PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    with MetricRecorder() as recorder:
        for name in ("OMP_NUM_THREADS", "MKL_CBWR", "PYTHONHASHSEED", "STATED", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
            variables.setdefault(name, "unset")
        recorder.log_digest("env/names", repr(sorted(variables)).encode(), step=0)
        for name, value in variables.items():  # one by one, so that a difference has a name
            recorder.log_digest(f"env/{name}", value.encode(), step=0)
        recorder.log_digest("file/link", open("data/link.txt", "rb").read(), step=0)
        recorder.log({"file/executable": os.access("data/tool.sh", os.X_OK), "ignored": os.path.exists("big")}, step=0)
"""


@contextlib.contextmanager
def environment_of_nodes() -> Iterator[None]:
    # Ray would end tasks where the machine is short of memory, whoever has taken it.
    variables = {**OF_THE_NODES, "RAY_memory_monitor_refresh_ms": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


_NUMBERS = itertools.count()


def add_node(cluster: Any, *, num_cpus: int) -> Any:
    """Add a node with a folder of its own for what is sent to it.

    Nodes of one machine share one otherwise, and each clears away what another has just unpacked and runs a test in.
    """
    return cluster.add_node(num_cpus=num_cpus, runtime_env_dir_name=f"runtime_resources_{next(_NUMBERS)}")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one core each, and a head that runs no test. Each test has its own, since tests end nodes."""
    from ray.cluster_utils import Cluster

    with environment_of_nodes():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            cluster.names_of_variables = frozenset(os.environ)
            add_node(cluster, num_cpus=1)
            add_node(cluster, num_cpus=1)
            cluster.wait_for_nodes()
        except BaseException:
            cluster.shutdown()
            raise
    yield cluster
    cluster.shutdown()


class Check:
    """A check in a process of its own, whose output can be read while it runs."""

    def __init__(self, repository: Repository, *arguments: str) -> None:
        folder = repository.root.parent
        self._paths = folder / "check.out", folder / "check.err"
        command = [sys.executable, "-m", "e2e_registry", "check", "--all", *arguments]
        with self._paths[0].open("w") as out, self._paths[1].open("w") as err:
            self.process = subprocess.Popen(command, cwd=repository.root, stdout=out, stderr=err)

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    def ends(self, seconds: float = 180) -> tuple[int, str, str]:
        """Wait for its end; return its exit code and what it printed."""
        self.wait_for(lambda: self.process.poll() is not None, seconds)
        return self.process.returncode, self._paths[0].read_text(), self.err

    def wait_for(self, condition: Callable[[], object], seconds: float = 180) -> None:
        """Wait until something holds; what the check has printed says why it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                shown = "\n".join(path.read_text() for path in self._paths)
                pytest.fail(f"it did not come to be; exit code {self.process.poll()}, and the check printed:\n{shown}")
            time.sleep(0.1)


@contextlib.contextmanager
def checking(repository: Repository, *arguments: str) -> Iterator[Check]:
    check = Check(repository, *arguments)
    try:
        yield check
    finally:
        check.process.kill()
        check.process.wait()


def test_verdicts_are_those_of_this_machine(
    repository: Repository, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set in this process by an earlier test, or by Ray, which also takes its debugger's hook from what nodes inherit.
    for name in os.environ.keys() - (cluster.names_of_variables - {"PYTHONBREAKPOINT"}):
        monkeypatch.delenv(name)
    monkeypatch.setenv("STATED_BY_THE_CALLER", "a value")
    data = repository.root / "data"
    data.mkdir()
    (data / "file.txt").write_text("content")
    (data / "link.txt").symlink_to("file.txt")
    (data / "tool.sh").write_text("#!/bin/sh\n")
    (data / "tool.sh").chmod(0o755)
    repository.commit()
    (repository.root / ".gitignore").write_text(".e2e_runs/\n__pycache__/\nbig\n")
    (repository.root / "big").write_bytes(b"0" * 2**20)
    repository.write_recipe(body=ENVIRONMENT_RECIPE, name="environment.py")
    stated = {"STATED": "${STATED_BY_THE_CALLER}"}
    judged, observed = ["env/*", "file/*"], ["ignored"]
    repository.write_test(
        "test_environment", script="scripts/environment.py", metrics=judged, observe=observed, env=stated
    )
    repository.write_test("test_changed", script="scripts/changed.py")
    repository.write_recipe(name="changed.py")
    assert repository.command("record", "--all", "--runs", "1").code == 0
    repository.write_recipe("SCALE = 2.0", name="changed.py")
    repository.write_recipe(body="print('on fire'); raise SystemExit(3)", name="failing.py")
    repository.write_test("test_failing", script="scripts/failing.py")
    repository.write_test("test_new", num_cpus=64)
    repository.write_test("test_unset", args=["${E2E_NO_SUCH_VARIABLE}"])
    repository.write_test("test_gpu", num_gpus=64, profile="cuda")
    repository.write_test("test_disabled", disabled="for now")
    repository.write_test(
        "test_quarantined", script="scripts/failing.py", quarantine={"reason": "x", "until": "2999-01-01"}
    )
    here = repository.command("check", "--all", "--json")
    local = read_results(repository)
    there = repository.command("check", "--all", "--json", "--ray", cluster.address)
    remote = read_results(repository)
    assert there.code == here.code == 2, there.err
    expected = {"environment": "match", "stub": "match", "changed": "mismatch", "failing": "failed"}
    assert {name: outcomes(remote)[name][0] for name in expected} == expected, there.out
    assert outcomes(remote) == outcomes(local)
    # What git ignores is not sent; all else that a check concludes is equal.
    assert (ignored_differs(local), ignored_differs(remote)) == (0, 1)
    names = [test["subject"] for test in local["tests"]]
    for name, mine, theirs in zip(names, comparable(local), comparable(remote), strict=True):
        if "test_environment" in name:
            mine.pop("comparison"), theirs.pop("comparison")
        assert mine == theirs, name
    for test in remote["tests"]:
        if test["run"] is not None:
            assert (repository.root / test["run"] / "output.log").exists()
            assert test["node"]
            assert test["attempts"] == 1
    (new,) = (test for test in remote["tests"] if "test_new" in test["subject"])
    assert any("num_cpus=64" in warning for warning in new["warnings"])
    facts = [
        json.loads((repository.root / run_of(results, "new") / "run.json").read_text()) for results in (local, remote)
    ]
    assert facts[0]["source"] == facts[1]["source"]
    assert facts[0]["source"]["source_tree"]


def ignored_differs(results: Any) -> int:
    (test,) = (test for test in results["tests"] if "test_environment" in test["subject"])
    (series,) = (series for series in test["comparison"]["series"] if series["metric"] == "ignored")
    return series["differing"]


def run_of(results: Any, name: str) -> str:
    (test,) = (test for test in results["tests"] if test["subject"] == f"tests/e2e/test_{name}.py")
    return test["run"]


def node_of_drivers(cluster: Any) -> str:
    """Return the node that drivers of this machine are connected to: its end would be theirs."""
    code = "import ray, sys; ray.init(sys.argv[1]); print(ray.get_runtime_context().get_node_id())"
    command = [sys.executable, "-c", code, cluster.address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def test_a_lost_node_costs_a_second_attempt_and_no_verdict(
    repository: Repository, cluster: Any, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    # Waits at its first attempt, until the test says go; a second attempt finds its mark and does not wait.
    waiting = (
        f"import os, time, pathlib; name = os.environ['NAME']; mark = pathlib.Path({str(marks)!r}, name)\n"
        "is_first = not mark.exists(); mark.write_text(str(os.getpid()))\n"
        f"while is_first and not os.path.exists({str(marks / 'go')!r}): time.sleep(0.05)\n"
    )
    names = [f"test_{letter}" for letter in "abcdef"]
    (repository.root / "tests/e2e/test_stub.py").unlink()
    for name in names:
        repository.write_test(name, env={"NAME": name}, timeout=600)
    assert repository.command("record", "--all", "--runs", "1").code == 0
    repository.write_recipe(waiting)
    drivers = node_of_drivers(cluster)
    assert drivers in {node.node_id for node in cluster.list_all_nodes()}
    node = next(node for node in cluster.worker_nodes if node.node_id != drivers)
    try:
        with checking(repository, "--ray", cluster.address, "--json") as check:
            check.wait_for(lambda: len([mark for mark in marks.iterdir() if mark.read_text()]) >= 2)
            pids = [int(mark.read_text()) for mark in marks.iterdir()]
            cluster.remove_node(node, allow_graceful=False)
            # Its recipe ends with the node.
            check.wait_for(lambda: not all(Path(f"/proc/{pid}").exists() for pid in pids))
            (marks / "go").touch()
            code, out, err = check.ends()
    finally:
        add_node(cluster, num_cpus=1)
    assert code == 0, err
    results = json.loads(out)
    assert [test["verdict"] for test in results["tests"]] == ["match"] * len(names)
    # Ray may have handed the lost node a second task already, before it learned of the loss.
    lost = [test for test in results["tests"] if test["attempts"] == 2]
    assert 1 <= len(lost) <= 2
    assert all(test["attempts"] == 1 for test in results["tests"] if test not in lost)
    assert all(any("attempt 2" in warning for warning in test["warnings"]) for test in lost)


def workers_titled(title: str, cluster: Any) -> list[int]:
    """Return the workers of this cluster, and of no other on this machine, that Ray has given this title."""
    session = Path(cluster.head_node.get_session_dir_path())
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_titled = (path / "cmdline").read_bytes().startswith(title.encode())
            if is_titled and (path / "cwd").readlink().is_relative_to(session):
                pids.append(int(path.name))
    return pids


#: Takes the two cores of the cluster, says so, and frees them when a file is there.
HOLD_BOTH_CORES = """
import pathlib, sys, time, ray
ray.init(sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=1)
def hold(path, mark):
    pathlib.Path(mark).touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.05)
marks = [pathlib.Path(f"{sys.argv[2]}.{number}") for number in range(2)]
held = [hold.remote(sys.argv[2], str(mark)) for mark in marks]
while not all(mark.exists() for mark in marks):
    time.sleep(0.05)
print("held", flush=True)
ray.get(held)
"""


def test_no_more_tests_run_than_there_are_cores_for_while_the_driver_is_slow(
    repository: Repository, cluster: Any, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    body = (
        f"import os, time; open({str(marks)!r} + '/' + str(os.getpid()), 'w')\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\n"
    )
    repository.write_recipe(body=body)
    (repository.root / "tests/e2e/test_stub.py").unlink()
    names = [f"test_{letter}" for letter in "abcdef"]
    for name in names:
        repository.write_test(name, timeout=600)
    command = [sys.executable, "-c", HOLD_BOTH_CORES, cluster.address, str(tmp_path / "free")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert "held\n" in iter(holder.stdout.readline, "")
    boards: list[int] = []
    try:
        with checking(repository, "--ray", cluster.address) as check:
            # No core is free yet, so the board is stopped before any task begins. Those that then begin ask the board,
            # which does not answer: they wait, and must keep their cores.
            check.wait_for(lambda: workers_titled("ray::Board", cluster))
            boards = workers_titled("ray::Board", cluster)
            for pid in boards:
                os.kill(pid, signal.SIGSTOP)
            assert not workers_titled("ray::tests/e2e/", cluster)
            (tmp_path / "free").touch()
            check.wait_for(lambda: len(workers_titled("ray::tests/e2e/", cluster)) >= 2)
            time.sleep(5)
            assert len(workers_titled("ray::tests/e2e/", cluster)) == 2
            assert not list(marks.iterdir())
            for pid in boards:
                os.kill(pid, signal.SIGCONT)
            check.wait_for(lambda: len(list(marks.iterdir())) >= 2)
            time.sleep(3)
            assert len(list(marks.iterdir())) == 2
            (tmp_path / "go").touch()
            code, _, err = check.ends()
    finally:
        for pid in boards:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        holder.kill()
        holder.wait()
    assert code == 4, err  # the recipe logs nothing
    assert len(list(marks.iterdir())) == len(names)


@pytest.mark.parametrize(
    ("signum", "code", "why"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_what_runs_on_the_nodes_and_leaves_the_cluster(
    repository: Repository, cluster: Any, tmp_path: Path, signum: int, code: int, why: str
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    body = f"import os, time; open({str(marks)!r} + '/' + str(os.getpid()), 'w'); time.sleep(600)"
    repository.write_recipe(body=body)
    for name in ("test_stub", "test_second", "test_third"):
        repository.write_test(name, timeout=600)
    with checking(repository, "--ray", cluster.address) as check:
        check.wait_for(lambda: len(list(marks.iterdir())) >= 2)
        check.process.send_signal(signum)
        ended, _, err = check.ends()
        assert ended == code, err
        assert "Traceback" not in err
        results = read_results(repository)
        assert (results["status"], results["why_partial"]) == ("partial", why)
        # Two had begun; the third was in Ray's queue.
        assert [test["verdict"] for test in results["tests"]] == ["incomplete", "incomplete"]
        assert len(results["not_run"]) == 1
        check.wait_for(lambda: not any(Path("/proc", mark.name).exists() for mark in marks.iterdir()))
    assert not processes_running(repository.root)
    repository.write_recipe()
    assert repository.command("check", "--test", "tests/e2e/test_stub.py", "--ray", cluster.address).code == 3


def test_after_a_failure_what_is_in_the_queue_does_not_start(
    repository: Repository, cluster: Any, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    # One of the two that begin fails. The other goes on until the check has said so and had the time to call off the
    # rest; so does a third, if the node that was left free begins with it before the check knows.
    repository.write_recipe(
        body=f"""
        import os, pathlib, time
        from e2e_registry import MetricRecorder
        marks = pathlib.Path({str(marks)!r})
        (marks / os.environ["NAME"]).touch()
        while len(list(marks.iterdir())) < 2:
            time.sleep(0.05)
        try:
            open({str(tmp_path / "failed")!r}, "x").close()
        except FileExistsError:
            pass
        else:
            raise SystemExit(3)
        while "[1/6]" not in pathlib.Path({str(tmp_path / "check.err")!r}).read_text():
            time.sleep(0.05)
        time.sleep(5)
        """
    )
    (repository.root / "tests/e2e/test_stub.py").unlink()
    names = [f"test_{letter}" for letter in "abcdef"]
    for name in names:
        repository.write_test(name, env={"NAME": name}, timeout=600)
    with checking(repository, "--ray", cluster.address, "--fail-fast") as check:
        code, _, err = check.ends()
    assert code == 4, err
    results = read_results(repository)
    assert (results["status"], results["why_partial"]) == ("partial", "fail-fast")
    begun = sorted(mark.name for mark in marks.iterdir())
    assert [Path(test["subject"]).stem for test in results["tests"]] == begun
    assert len(results["not_run"]) == len(names) - len(begun) >= 3, err


def test_a_test_that_fits_no_node_any_more_says_so_and_runs_once_one_has_come(
    repository: Repository, cluster: Any, tmp_path: Path
) -> None:
    large = add_node(cluster, num_cpus=2)
    assert large.node_id != node_of_drivers(cluster)
    go, begun = tmp_path / "go", tmp_path / "begun"
    repository.record()
    repository.write_recipe(
        f"import os, time; open({str(begun)!r}, 'w').close()\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    )
    repository.write_test(num_cpus=2)
    with checking(repository, "--ray", cluster.address) as check:
        check.wait_for(begun.exists)
        cluster.remove_node(large, allow_graceful=False)
        check.wait_for(lambda: "waiting for a node: none that is left in the cluster has 2 CPU(s)" in check.err, 60)
        go.touch()
        add_node(cluster, num_cpus=2)
        code, out, err = check.ends()
    assert code == 0, err
    assert "this is attempt 2" in out


def test_what_cannot_be_sent_or_reached_is_refused(repository: Repository) -> None:
    nobody = repository.command("check", "--all", "--ray", "127.0.0.1:1", "--json")
    assert nobody.code == 2
    assert "--ray: cannot connect to Ray at '127.0.0.1:1'" in nobody.err
    assert "Traceback" not in nobody.err
    assert not nobody.out
    with (repository.root / "weights.bin").open("wb") as file:
        file.truncate(257 * 2**20)
    large = repository.cli("check", "--all", "--ray", "local")
    assert large.code == 2
    assert "weights.bin (257.0 MiB)" in large.err


def test_a_cluster_that_was_started_here_ends_with_the_check(repository: Repository) -> None:
    repository.record()
    result = repository.command("check", "--all", "--ray", "local")
    assert result.code == 0, result.err
    assert "match  tests/e2e/test_stub.py  cpu-x86_64-portable  on " in result.out
    deadline = time.monotonic() + 60
    while processes_running(repository.root):
        assert time.monotonic() < deadline, "Ray's processes go on"
        time.sleep(0.1)
