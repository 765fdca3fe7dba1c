"""The streams of the command line: whatever they cannot take, closed or full or of another encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repositories import Repository

TEST = "tests/e2e/test_stub.py"


def shell(repository: Repository, line: str, **env: str) -> tuple[int, str, str]:
    """Run a line of shell in which ``$E2E`` is the command line; return its exit code and what came out."""
    environment = {**os.environ, "E2E": f"{sys.executable} -m e2e_registry", **env}
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=repository.root,
        env=environment,
        capture_output=True,
        text=True,
        encoding="latin-1",
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "ascii:strict", "utf-8"])
def test_a_report_is_printed_in_any_encoding(repository: Repository, encoding: str) -> None:
    repository.write_test("test_größe_日本", suite="größe")
    subject = "tests/e2e/test_größe_日本.py"
    code, out, err = shell(repository, f"$E2E record --test {subject} --runs 1", PYTHONIOENCODING=encoding)
    assert code == 0, err
    repository.write_recipe("SCALE = 2.0")
    code, out, err = shell(repository, "$E2E check --all --repeat-on-mismatch 1", PYTHONIOENCODING=encoding)
    assert code == 1, err
    results = json.loads((repository.root / ".e2e_runs/results.json").read_text())
    assert (results["status"], [test["verdict"] for test in results["tests"]]) == (
        "complete",
        ["mismatch", "no-standard"],
    )
    arrow = "→".encode().decode("latin-1") if encoding == "utf-8" else "->"
    assert f"standard {arrow} run" in out
    code, out, err = shell(repository, "$E2E list --suite größe --json", PYTHONIOENCODING=encoding)
    assert code == 0, err
    raw = out.encode("latin-1").decode(encoding.split(":")[0])
    assert json.loads(raw)["tests"][0]["test"] == subject


@pytest.mark.parametrize("lost", ["2>/dev/full", "2>&-", ">/dev/full", ">&-", ">&- 2>&- <&-"])
def test_a_verdict_needs_no_stream(repository: Repository, lost: str) -> None:
    repository.record()
    assert shell(repository, f"$E2E check --all {lost}")[0] == 0
    repository.write_recipe("SCALE = 2.0")
    code, out, err = shell(repository, f"$E2E check --all --json {lost}")
    assert code == 1
    if lost.startswith("2"):
        assert json.loads(out)["status"] == "complete"
    assert "Traceback" not in err
    assert json.loads((repository.root / ".e2e_runs/results.json").read_text())["status"] == "complete"


@pytest.mark.parametrize(
    "command", [f"show {TEST}", "list", "list --json", "plan --all", "lint --list-rules", "record --all --list-only"]
)
def test_an_answer_that_cannot_be_printed_is_no_success(repository: Repository, command: str) -> None:
    with (repository.root / "pyproject.toml").open("a") as file:
        file.write('[tool.e2e_registry.platforms]\ncpu-x86_64-portable = ["ubuntu-24.04"]\n')
    repository.record()
    for lost, why in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        code, _, err = shell(repository, f"$E2E {command} {lost}")
        assert (code, err) == (6, f"error: standard output: cannot write: {why}\n")
    assert shell(repository, f"$E2E {command} | true")[0] == 0


def test_a_repository_may_lie_in_a_path_that_is_no_unicode(repository: Repository, tmp_path: Path) -> None:
    """As every path with an umlaut is under the locale C."""
    root = tmp_path / os.fsdecode(b"caf\xe9")
    repository.root.rename(root)
    repository.root = root
    for command in ("record --all", "check --all", "list", f"show {TEST}", f"show {repository.standard}"):
        result = repository.command(*command.split())
        assert result.code == 0, result.err
    repository.write_recipe("SCALE = 2.0")
    for command in ("check --all", "check --all --json", f"compare {repository.runs[-1]} --test {TEST}"):
        result = repository.command(*command.split())
        assert result.code == (0 if command.startswith("compare") else 1), result.err
    for command in ("record --all", "check --all", "lint --json", "merge .e2e_runs"):
        result = repository.command(*command.split())
        assert result.code == 0, (command, result.err)
    # An artifact is one of CI's, where no path is like this.
    assert repository.command("accept", ".e2e_runs", "--yes").code == 6
    assert repository.command("doctor", repository.runs[-1]).code == 0


@pytest.mark.parametrize("columns", ["0", "-5", "x", ""])
def test_a_width_that_is_none_hides_nothing(repository: Repository, columns: str) -> None:
    code, out, err = shell(repository, "$E2E list", COLUMNS=columns)
    assert (code, TEST in out) == (0, True), err
