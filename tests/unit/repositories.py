"""Scratch repositories with stub recipes, driven through the real command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e_registry.standard import Standard, write_standard

#: Logs three series over five steps, as a recipe does that was written for the registry. `{change}` runs before.
RECIPE = """
from e2e_registry import MetricRecorder

SCALE = 1.0
STEPS = 5
{change}
with MetricRecorder() as recorder:
    for step in range(STEPS):
        recorder.log_digest("data/batch", b"batch %d" % step, step=step)
        recorder.log({{"train/loss": SCALE / (step + 1), "train/grad_norm": 0.5 + step}}, step=step)
        recorder.log({{"tokens": 10 * step}}, step=step)
        recorder.log({{"speed": 100.0 + step}}, step=step)
"""

METRICS = ["data/batch", "train/*", "tokens"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Repository:
    """A repository with one stub test, unless a test adds more."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pyproject.toml").write_text('[tool.e2e_registry]\ntest_folders = ["tests/e2e"]\n')
        self.write_recipe()
        self.write_test()

    @property
    def standards(self) -> Path:
        return self.root / "tests/ci/fixtures/e2e_standards"

    @property
    def standard(self) -> Path:
        return self.standards / "test_stub.cpu-x86_64-portable.parquet"

    @property
    def runs(self) -> list[Path]:
        """All kept runs, oldest first."""
        return sorted(path.parent for path in self.root.glob(".e2e_runs/*/*/run.json"))

    def write_recipe(self, change: str = "", *, body: str | None = None, name: str = "recipe.py") -> Path:
        path = self.root / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(RECIPE.format(change=change) if body is None else textwrap.dedent(body))
        return path

    def write_test(self, name: str = "test_stub", **keywords: Any) -> str:
        """Write a test file and return its id; keywords replace or extend the usual ones, None removes one."""
        usual = {
            "est_time": 5,
            "suite": "stub",
            "profile": "cpu-portable",
            "script": "scripts/recipe.py",
            "metrics": METRICS,
            "observe": ["speed"],
        }
        kept = {key: value for key, value in {**usual, **keywords}.items() if value is not None}
        arguments = ",\n    ".join(f"{key}={value!r}" for key, value in kept.items())
        path = self.root / "tests/e2e" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "from e2e_registry import Tolerance, main, register_e2e_ci\n\n"
            f"register_e2e_ci(\n    {arguments},\n)\n\n"
            'if __name__ == "__main__":\n    main(__file__)\n'
        )
        return f"tests/e2e/{name}.py"

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout

    def commit(self, message: str = "change") -> None:
        """Make the folder a git repository, if it is none, and commit all of it."""
        if not (self.root / ".git").exists():
            self.git("init", "-q")
            (self.root / ".gitignore").write_text(".e2e_runs/\n__pycache__/\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def cli(self, *arguments: str | Path) -> Result:
        """Run the command line in this process, from the repository's root."""
        from e2e_registry.cli.app import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
        return Result(code, out.getvalue(), err.getvalue())

    def command(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Result:
        """Run the command line in a process of its own."""
        command = [sys.executable, "-m", "e2e_registry", *map(str, arguments)]
        environment = {**os.environ, **(env or {})}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def move_standard(self, platform: str, name: str = "test_stub") -> Path:
        """Make a standard one of another platform, by name and metadata."""
        old = Standard(self.standard.with_name(f"{name}.cpu-x86_64-portable.parquet"))
        path = self.standards / f"{name}.{platform}.parquet"
        write_standard(path, old.batches(), dataclasses.replace(old.metadata, platform=platform))
        old.path.unlink()
        return path

    def record(self) -> None:
        result = self.cli("record", "--test", "tests/e2e/test_stub.py")
        assert result.code == 0, result.err
        assert self.standard.exists()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A scratch repository."""
    root = tmp_path / "repository"
    root.mkdir()
    return Repository(root)


_VOLATILE = {
    r"\d+\.\d s\b": "N.N s",
    r"\.e2e_runs/(\w+)/\d{8}T\d{6}\.\d{6}-[0-9a-f]{4}": r".e2e_runs/\1/RUN",
    r"\b[0-9a-f]{12}\b": "HASH12",
    r"\(pid \d+\)": "(pid N)",
}


def stable(text: str, root: Path) -> str:
    """Replace what differs between two runs of one test: times, run directories, hashes of files, the root."""
    text = text.replace(str(root), "ROOT")
    for pattern, replacement in _VOLATILE.items():
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def assert_golden(name: str, text: str, root: Path) -> None:
    """Compare a rendered report with its golden file; UPDATE_GOLDEN=1 writes it anew."""
    path = Path(__file__).parent / "golden" / f"{name}.txt"
    found = stable(text, root)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()
