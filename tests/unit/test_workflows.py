"""The checks of workflows and actions: this repository's pass them, and each finds what it is there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PINNED = "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8"


def copy(root: Path) -> Path:
    shutil.copytree(ROOT / ".github", root / ".github")
    shutil.copy(ROOT / "action.yml", root)
    (root / ".git").mkdir()  # actionlint looks for the repository that it belongs to
    return root


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)


def own_checks(root: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "scripts/check_workflows.py", root, cwd=root)


def replace(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text()
    assert old in text, f"{file} no longer holds {old!r}"
    path.write_text(text.replace(old, new, 1))


PR, RUN, RECORD = (f".github/workflows/{name}.yml" for name in ("pr-test", "_run-e2e", "record-e2e-standards"))
SETUP = ".github/actions/setup/action.yml"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (PR, "permissions: {}\n", "", "permissions: {}"),
        (PR, "permissions: {}\n", "permissions:\n  contents: read\n", "permissions: {}"),
        (PR, "concurrency:", "x-concurrency:", "no concurrency"),
        (PR, "    timeout-minutes: 90\n", "", "job unit has no timeout-minutes"),
        (PR, "    permissions:\n      contents: read\n", "", "job lint states no permissions"),
        (PR, "      contents: read\n", "      contents: write\n", "job lint may write contents"),
        (
            RECORD,
            "    with:\n      command: record",
            "    secrets: inherit\n    with:\n      command: record",
            "all secrets",
        ),
        (PR, "needs: [lint, unit, repeat, e2e]", "needs: [lint, unit, e2e]", "does not need repeat"),
        (PR, "    if: always()\n    needs", "    needs", "a skipped one counts as passed"),
        (PR, 'lint --diff "$BASE"', 'lint --diff "${{ github.head_ref }}"', "an expression in shell"),
        (SETUP, "      shell: bash\n", "", "needs its shell"),
        ("action.yml", "always() && steps.run.outputs.run-folder\n      uses", "success()\n      uses", "if: always()"),
        ("action.yml", "-attempt${{ github.run_attempt }}", "", "lacks the attempt"),
        (PR, PINNED + " # v5.0.0", "actions/checkout@v5", "is not pinned"),
        (PR, PINNED + " # v5.0.0", PINNED, "say beside the pin which version"),
        (RUN, "inputs.partitions", "inputs.partition", "inputs.partition is read and not declared"),
        (SETUP, "${{ inputs.torch-index-url }}", '""', "torch-index-url is declared and not read"),
        (PR, "      suite: short-cpu", "      suit: short-cpu", "has no input suit"),
        (PR, "        with:\n          needs: ${{ toJSON(needs) }}\n", "", "needs the input needs"),
        (PR, "$/.github/actions/verdict", "$/.github/actions/verdicts", "is not there"),
    ],
)
def test_own_checks_find(tmp_path: Path, file: str, old: str, new: str, says: str) -> None:
    root = copy(tmp_path)
    replace(root, file, old, new)
    found = own_checks(root)
    assert found.returncode == 1
    assert says in found.stdout
    assert found.stdout.startswith((f"{file}:", RUN, PR, RECORD))


def test_this_repository_passes(tmp_path: Path) -> None:
    found = own_checks(ROOT)
    assert (found.returncode, found.stdout) == (0, "")


def step(file: str, job: str, name: str) -> str:
    steps = yaml.safe_load((ROOT / file).read_text())["jobs"][job]["steps"]
    (found,) = [each["run"] for each in steps if each.get("name") == name]
    return str(found)


def test_of_the_attempts_at_recording_the_last_counts_for_each_platform(tmp_path: Path) -> None:
    for folder, names in {
        "x86-1of1-attempt9": ["a", "refused later"],
        "x86-1of1-attempt10": ["a"],
        "arm": ["b"],
    }.items():
        for name in names:
            path = tmp_path / "attempts" / f"e2e-standards-{folder}" / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(folder)
    script = step(RECORD, "standards", "Take the last attempt at each")
    env = {**os.environ, "ATTEMPTS": str(tmp_path / "attempts"), "STANDARDS": str(tmp_path / "standards")}
    subprocess.run(["bash", "-e", "-c", script], env=env, check=True)
    found = {path.name: path.read_text() for path in (tmp_path / "standards").rglob("*") if path.is_file()}
    assert found == {"a": "x86-1of1-attempt10", "b": "arm"}
    subprocess.run(["bash", "-e", "-c", script], env=env | {"ATTEMPTS": str(tmp_path / "none")}, check=True)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("needs.plan.outputs.count", "needs.plan.outputs.counts", "counts"),
        ('lint --diff "$BASE"', "lint --diff $BASE", "SC2086"),  # found by shellcheck alone
    ],
)
def test_actionlint_finds(tmp_path: Path, old: str, new: str, says: str) -> None:
    root = copy(tmp_path)
    command = [BIN / "actionlint", "-shellcheck", BIN / "shellcheck"]
    clean = run(*command, cwd=root)
    assert (clean.returncode, clean.stdout) == (0, "")
    replace(root, RUN if "plan" in old else PR, old, new)
    found = run(*command, cwd=root)
    assert found.returncode == 1
    assert says in found.stdout


def test_zizmor_finds(tmp_path: Path) -> None:
    root = copy(tmp_path)
    command = [BIN / "zizmor", "--offline", "--no-progress", "--quiet", "--persona", "pedantic", "."]
    clean = run(*command, cwd=root)
    assert clean.returncode == 0, clean.stdout
    replace(root, PR, "  pull_request:\n", "  pull_request_target:\n")
    found = run(*command, cwd=root)
    assert found.returncode != 0
    assert "dangerous-triggers" in found.stdout


def test_the_lint_target_fails_without_shellcheck(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/installed").touch()
    done = run("make", "lint-workflows", cwd=tmp_path)
    assert done.returncode == 2
    assert "shellcheck" in done.stderr
