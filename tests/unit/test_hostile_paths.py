"""Paths that the system refuses to look at: each is named, with exit code 6, whichever command was given it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repositories import Repository

TEST = "tests/e2e/test_stub.py"

COMMANDS = {
    "accept": ("accept", "{}"),
    "merge": ("merge", "{}"),
    "merge-plan": ("merge", ".", "--plan", "{}"),
    "adopt": ("adopt", "--test", TEST, "--run", "{}"),
    "show": ("show", "{}"),
    "show-standard": ("show", "{}.parquet"),
    "check": ("check", "--test", "{}"),
    "record": ("record", "--test", "{}"),
    "run": ("run", "--test", "{}"),
    "compare": ("compare", "{}", "--against", "{}"),
    "compare-with-test": ("compare", "{}", "--test", TEST),
    "compare-as-test": ("compare", ".", "--test", "{}"),
    "doctor": ("doctor", "{}"),
    "seeds": ("seeds", "--runs", "{}", "{}"),
    "lint": ("lint", "{}"),
    "init": ("init", "{}", "--yes"),
    "export": ("record", "--all", "--runs", "1", "--export", "{}"),
    "from-results": ("record", "--from-results", "{}"),
}


@pytest.fixture(params=["too long", "link in a circle", "below a file"])
def path(request: pytest.FixtureRequest, repository: Repository) -> str:
    """Tests may run as root, whom no permission stops."""
    (repository.root / "circle").symlink_to("circle")
    return {"too long": "x" * 5000, "link in a circle": "circle/x", "below a file": "pyproject.toml/x"}[request.param]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unusable_path_is_named(repository: Repository, path: str, command: str) -> None:
    result = repository.cli(*(part.replace("{}", path) for part in COMMANDS[command]))
    assert result.code in (2, 3, 4, 5, 6), result.err
    assert result.err.startswith(("error: ", "Usage: ", "running ")), result.err
    assert path[:200] in result.err
    assert "internal error" not in result.err


def test_an_error_of_the_system_without_a_file_is_a_fault(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chdir(*_: object) -> Path:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("e2e_registry.config.load_settings", chdir)
    result = repository.cli("list")
    assert result.code == 70
    assert "internal error: OSError" in result.err


@pytest.mark.parametrize("setting", ["standards_folder", "run_folder", "test_folders"])
def test_a_setting_that_names_an_unusable_path_is_named(repository: Repository, setting: str) -> None:
    artifact = repository.root.with_name("artifact")
    repository.cli("run", "--test", TEST)
    (repository.root / ".e2e_runs").rename(artifact)
    (repository.root / "circle").symlink_to("circle")
    values = {"test_folders": ["tests/e2e"], setting: "circle"} | (
        {"test_folders": ["tests/e2e", "circle"]} if setting == "test_folders" else {}
    )
    (repository.root / "pyproject.toml").write_text(
        "[tool.e2e_registry]\n"
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        + '[tool.e2e_registry.platforms]\ncpu-x86_64-portable = ["ubuntu-24.04"]\n'
    )
    taking = ["accept", artifact, "--yes", "--allow-other-source"]
    for command in (["check", "--all"], ["record", "--all"], ["list"], taking, ["plan", "--all"]):
        result = repository.cli(*command)
        assert result.code in (0, 2, 3, 6), result.err
        assert result.code in (0, 3) or "circle" in result.out + result.err, result.out + result.err
        if command[0] == "check":
            assert result.code == {"standards_folder": 3, "run_folder": 6, "test_folders": 2}[setting]


def test_a_folder_that_is_gone_is_named(repository: Repository) -> None:
    folder = repository.root / "gone"
    folder.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"cd {folder} && rmdir {folder} && exec {sys.executable} -m e2e_registry list"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "the current folder cannot be used" in done.stderr) == (6, True), done.stderr
