"""What a cluster is sent and what comes back, without one: the working tree, the environment, a packed run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from repositories import Repository

from e2e_registry.determinism.variables import child_environment
from e2e_registry.errors import StorageError
from e2e_registry.execution.working_tree import read_working_tree
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


def test_of_the_variables_that_count_only_the_callers_reach_the_recipe() -> None:
    worker = {
        "PATH": "/node/bin",
        "HOME": "/node",
        "RAY_ADDRESS": "1.2.3.4:5",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "AUTO",
        "NCCL_ALGO": "Ring",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
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
