"""What a cluster is sent and what comes back, without one: the working tree, the environment, a packed run."""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from repositories import Repository

from e2e_registry.cli.app import main
from e2e_registry.determinism.variables import child_environment
from e2e_registry.errors import StorageError
from e2e_registry.execution import ray_pool
from e2e_registry.execution.launcher import Cancellation
from e2e_registry.execution.ray_pool import Attempt, NodeWork, RayPool
from e2e_registry.execution.working_tree import WorkingTree, read_working_tree
from e2e_registry.operations import cluster
from e2e_registry.operations.cluster import node_environment, pack, unpack


@pytest.mark.parametrize("is_git", [True, False])
def test_the_tree_that_is_sent_is_what_git_would_commit(repository: Repository, tmp_path: Path, is_git: bool) -> None:
    root = repository.root
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / "link").symlink_to("scripts")
    (root / ".venv").mkdir()
    (root / ".venv/pyvenv.cfg").touch()
    for folder in ("__pycache__", ".e2e_runs/test_stub", "tests/ci/fixtures/e2e_standards"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").touch()
    if is_git:
        repository.git("init", "-q")
        (root / ".gitignore").write_text("__pycache__\n.venv\nsecret\n")
        (root / "secret").touch()
    excluded = [root / ".e2e_runs", root / "tests/ci/fixtures/e2e_standards"]
    tree = read_working_tree(root, excluded)
    usual = {"pyproject.toml", "scripts/recipe.py", "tests/e2e/test_stub.py", "tool.sh"}
    assert {path.as_posix() for path in tree.files} == usual | ({".gitignore"} if is_git else set())
    assert [(path.as_posix(), target) for path, target in tree.links] == [("link", "scripts")]
    for name in ("first.zip", "second.zip"):
        tree.write_zip(tmp_path / name)
        os.utime(root / "tool.sh", (0, 0))
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "first.zip") as archive:
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert (modes["tool.sh"], modes["pyproject.toml"]) == (0o755, 0o644)
    assert read_working_tree(root / "scripts", excluded).top == (root if is_git else root / "scripts")
    (root / "link").unlink()
    (root / "link").symlink_to("tests")
    read_working_tree(root, excluded).write_zip(tmp_path / "third.zip")  # a cluster takes equal bytes for an equal tree
    assert (tmp_path / "third.zip").read_bytes() != (tmp_path / "first.zip").read_bytes()


def test_of_the_variables_that_count_only_the_callers_reach_the_recipe() -> None:
    worker = {
        "PATH": "/node/bin",
        "HOME": "/node",
        "RAY_ADDRESS": "1.2.3.4:5",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "AUTO",
        "NCCL_ALGO": "Ring",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
        "PYTEST_CURRENT_TEST": "of whoever started the node",
        "PYTHONPATH": "/tmp/ray/files/_ray_pkg_1:/tmp/ray/files/_ray_pkg_2:/node/lib",
    }
    found = node_environment(worker, {"MKL_CBWR": "COMPATIBLE", "KEY": "x"}, Path("/tmp/ray/files/_ray_pkg_1"), ["src"])
    assert found == {
        "PATH": "/node/bin",
        "HOME": "/node",
        "PYTHONPATH": "/tmp/ray/files/_ray_pkg_1/src:/node/lib",
        "MKL_CBWR": "COMPATIBLE",
        "KEY": "x",
    }


class StandIn:
    """A pool that runs what it is given at once, in a tree unpacked before, as a node would."""

    tree: Path

    def __init__(self, address: str, tree: WorkingTree) -> None:
        self.tree.mkdir(exist_ok=True)
        tree.write_zip(self.tree.parent / "tree.zip")
        with zipfile.ZipFile(self.tree.parent / "tree.zip") as archive:
            archive.extractall(self.tree)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to leave."""

    greatest = RayPool.greatest
    asked_for: ClassVar[dict[str, Any]] = {}

    def run(self, work: NodeWork, order: Any, **options: Any) -> Any:
        self.asked_for.update(options)
        with contextlib.chdir(self.tree):
            return work(order, Attempt(1, "10.0.0.7"), lambda line: None, Cancellation())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cluster, "RayPool", StandIn)
    monkeypatch.setattr(ray_pool, "_nodes", lambda: [{"CPU": 8.0}])
    monkeypatch.setattr(StandIn, "tree", tmp_path / "tree", raising=False)
    return tmp_path / "tree"


LINK_RECIPE = """
    import json, os, pathlib
    from e2e_registry import MetricRecorder
    with MetricRecorder() as recorder:
        recorder.log({"value": json.loads(pathlib.Path("config.json").read_text())}, step=0)
    pathlib.Path(os.environ["E2E_REGISTRY_RUN_DIR"], "path").write_text(os.environ.get("PYTHONPATH", ""))
"""


def test_a_link_that_leads_elsewhere_than_before_does_so_on_a_node_that_has_it(
    repository: Repository, node: Path
) -> None:
    for name, value in {"a.json": "1", "b.json": "2"}.items():
        (repository.root / name).write_text(value)
    (repository.root / "config.json").symlink_to("a.json")
    repository.write_recipe(body=LINK_RECIPE)
    repository.write_test(metrics=["value"], observe=None)
    assert repository.cli("record", "--all", "--runs", "1").code == 0
    assert repository.cli("check", "--all", "--ray", "any").code == 0
    (repository.root / "config.json").unlink()
    (repository.root / "config.json").symlink_to("b.json")
    result = repository.cli("check", "--all", "--ray", "any")
    assert "want 1, got 2" in result.out, result
    (node / "config.json").unlink()
    (node / "config.json").write_text("3")  # as a recipe may have left it
    assert "want 1, got 2" in repository.cli("check", "--all", "--ray", "any").out


@pytest.mark.parametrize("is_git", [True, False])
def test_entries_of_pythonpath_in_the_tree_are_those_of_the_node(
    repository: Repository, node: Path, monkeypatch: pytest.MonkeyPatch, is_git: bool
) -> None:
    if is_git:
        repository.commit()
    (repository.root / "config.json").write_text("1")
    (repository.root.parent / "also").symlink_to(repository.root)
    repository.write_recipe(body=LINK_RECIPE)
    repository.write_test(metrics=["value"], observe=None)
    entries = ["src", ".", "", f"{repository.root}/lib", f"{repository.root.parent}/also/more"]
    monkeypatch.setenv("PYTHONPATH", ":".join(entries))
    with contextlib.chdir(repository.root / "scripts"):  # a recipe runs in the root, wherever the check was started
        remote = main(["check", "--all", "--ray", "any"])
    assert remote == 3
    (run,) = repository.runs
    expected = [str(node / entry) for entry in ("src", ".", ".", "lib", "more")]
    assert (run / "path").read_text().split(":")[:5] == expected  # the node's own entries follow


def test_what_a_test_asks_for_one_node_has(repository: Repository, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported: the cores of one node and the GPU of another were asked for, and waited for without end."""
    nodes = [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}, {"GPU": 4.0}]
    monkeypatch.setattr(ray_pool, "_nodes", lambda: nodes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    repository.write_test(num_cpus=16, num_gpus=1, profile="cuda")
    result = repository.cli("check", "--all", "--ray", "any", "--allow-busy-gpus")
    assert (StandIn.asked_for["num_cpus"], StandIn.asked_for["num_gpus"]) == (8, 1)
    assert "registered with num_cpus=16, and no node with 1 GPU(s) has more than 8" in result.out
    for num, reason in ((4, "no node of the cluster that has them lends a core"), (5, "has more than 4")):
        repository.write_test(num_gpus=num, profile="cuda")
        assert reason in repository.cli("check", "--all", "--ray", "any").out


@pytest.mark.parametrize("fault", ["no room", "a folder in place of a link", "the tree is gone"])
def test_what_a_node_cannot_write_is_the_error_of_one_test(
    repository: Repository, node: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (repository.root / "link").symlink_to("scripts")
    if fault == "no room":

        def refuse(**options: Any) -> str:
            raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    elif fault == "the tree is gone":
        on_node = cluster.run_on_node

        def clear_away(*given: Any) -> Any:
            shutil.rmtree(node)
            return on_node(*given)

        monkeypatch.setattr(cluster, "run_on_node", clear_away)
    else:
        (node / "link").mkdir(parents=True)
    result = repository.cli("check", "--all", "--ray", "any", "--json")
    assert result.code == 6, result.err
    (test,) = result.json["tests"]
    assert test["verdict"] == "error"
    assert "node 10.0.0.7 cannot run the test: " in test["error"]
    assert fault != "the tree is gone" or test["error"].startswith("the working tree that Ray unpacked there: ")


def test_a_cancelled_task_holds_its_cores_until_its_recipe_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray interrupts the main thread as this does, whatever that thread is at."""
    monkeypatch.setattr(ray_pool, "_wait_holding_cores", lambda ref: 1)
    has_ended = []

    def work(order: None, attempt: Attempt, on_line: Callable[[str], None], cancellation: Cancellation) -> None:
        _thread.interrupt_main()
        while not cancellation.is_cancelled:
            time.sleep(0.01)
        time.sleep(1)  # as a recipe takes to end
        has_ended.append(True)

    board = ray_pool.Board()
    remote = SimpleNamespace(begin=SimpleNamespace(remote=board.begin))
    with pytest.raises(KeyboardInterrupt):
        ray_pool._do(work, None, remote, "key")
    assert has_ended


def test_once_the_board_is_closed_no_task_begins_that_had_not() -> None:
    board = ray_pool.Board()
    assert board.begin("first") == 1
    board.close()
    assert board.begin("second") == 0
    assert board.withdraw("second")
    assert not board.withdraw("first")


def test_a_run_comes_back_whole_but_for_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "EXTRAS_LIMIT", 1000)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    sizes = {"run.json": 5000, "metrics.main.rank0.jsonl": 5000, "checkpoints/a.pt": 600, "checkpoints/b.pt": 700}
    for name, size in sizes.items():
        (run / name).write_bytes(os.urandom(size))
    (run / "checkpoints/outside").symlink_to("/etc/passwd")
    caller = {"OMP_NUM_THREADS": "1", "SERVICE_KEY": "hunter2"}
    packed = pack(run, child_environment("cpu-portable", caller=caller, registration={"TOKEN": "hunter2"}))
    assert packed.left_out == ["checkpoints/b.pt"]
    assert "hunter2" not in repr(packed.child)
    unpack(packed, tmp_path / "back")
    for name in ("run.json", "metrics.main.rank0.jsonl", "checkpoints/a.pt"):
        assert (tmp_path / "back" / name).read_bytes() == (run / name).read_bytes()
    assert not (tmp_path / "back/checkpoints/outside").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot keep the run"):
        unpack(packed, tmp_path / "file" / "below")
