"""The pytest plugin on scratch repositories: real pytest processes, their output, exit codes and files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from repositories import Repository

from e2e_registry.operations.results import results_schema

TEST = "tests/e2e/test_stub.py"

PYTEST_VARIABLES = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_WORKER")


def environment() -> dict[str, str]:
    """This process's environment without what says that it runs a test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def run(repository: Repository, *arguments: str) -> pytest.RunResult:
    """Run pytest in a process of its own, in the root of a repository.

    The class is pytester's; not its fixture, which unloads NumPy from this process.
    """
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    done = subprocess.run(command, cwd=repository.root, env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return pytest.RunResult(
        done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), time.monotonic() - began
    )


def results(repository: Repository) -> dict[str, Any]:
    """Return ``results.json`` without what differs between two runs of one test."""
    text = (repository.root / ".e2e_runs/results.json").read_text()
    text = re.sub(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{4}", "RUN", text)
    jsonschema.Draft202012Validator(results_schema()).validate(json.loads(text))
    document = json.loads(re.sub(r'("duration_s"): [0-9.]+', r"\1: 0.1", text))
    for name in ("started", "written"):
        del document[name]
    return dict(document)


# ------------------------------------------------------------------------------------------------ collecting


def test_a_registered_file_is_one_item_and_is_never_imported(repository: Repository) -> None:
    """Not even where other plugins make a module of it; other files, and ordinary tests beside it, stay pytest's."""
    registered = repository.root / TEST
    registered.write_text(f"open({str(repository.root / 'imported')!r}, 'w')\n{registered.read_text()}")
    (repository.root / "tests/e2e/test_ordinary.py").write_text("def test_it():\n    '''register_e2e_ci'''\n")
    elsewhere = repository.root / "tests/unit"
    elsewhere.mkdir()
    (elsewhere / "test_elsewhere.py").write_text(f"{(registered).read_text()}\ndef test_it(): pass\n".split("\n", 1)[1])
    collected = run(repository, "--collect-only", "-q", "--doctest-modules", "--strict-markers")
    assert [line for line in collected.outlines if "::" in line] == [
        "tests/e2e/test_ordinary.py::test_it",
        f"{TEST}::test_stub",
        "tests/unit/test_elsewhere.py::test_it",
    ]
    outcome = run(repository, "-rs", "--strict-markers")
    outcome.assert_outcomes(passed=2, skipped=1)
    outcome.stdout.fnmatch_lines([f"SKIPPED * {TEST}: runs a training recipe: give --e2e"])
    assert not (repository.root / "imported").exists()
    assert not (repository.root / ".e2e_runs").exists()


@pytest.mark.parametrize("case", ["unknown keyword", "not python", "not imported"])
def test_a_bad_registration_is_a_collection_error_with_its_place(repository: Repository, case: str) -> None:
    changes = {
        "unknown keyword": ("est_time", "est_tim", "*test_stub.py:4:est_tim: unknown keyword*"),
        "not python": ("register_e2e_ci(\n", "register_e2e_ci((\n", "*test_stub.py:*: is not valid Python*"),
        "not imported": ("main, register_e2e_ci", "main", "*test_stub.py:3: `register_e2e_ci` is called, but is not*"),
    }
    old, new, message = changes[case]
    path = repository.root / TEST
    path.write_text(path.read_text().replace(old, new, 1))
    repository.write_test("test_fine")
    outcome = run(repository, "--continue-on-collection-errors")
    outcome.assert_outcomes(errors=1, skipped=1)
    outcome.stdout.fnmatch_lines([message])
    outcome.stdout.no_fnmatch_line("*Traceback*")
    outcome.stdout.no_fnmatch_line("*e2e_registry/*.py*")
    assert outcome.ret == pytest.ExitCode.TESTS_FAILED


def test_what_concerns_the_whole_repository_is_an_error_of_its_tests_alone(repository: Repository) -> None:
    (repository.root / "test_ordinary.py").write_text("def test_it(): pass\n")
    (repository.root / "tests/e2e/more").mkdir()
    (repository.root / "tests/e2e/more/test_stub.py").write_text((repository.root / TEST).read_text())
    shared = run(repository, "--continue-on-collection-errors", "test_ordinary.py", TEST)
    shared.assert_outcomes(passed=1, errors=1)
    shared.stdout.fnmatch_lines(["*has the stem of tests/e2e/more/test_stub.py: *"])
    (repository.root / "pyproject.toml").write_text("[tool.e2e_registry]\ntest_folder = []\n")
    settings = run(repository, "--continue-on-collection-errors", "test_ordinary.py", TEST)
    settings.assert_outcomes(passed=1, errors=1)
    settings.stdout.fnmatch_lines(["*pyproject.toml:tool.e2e_registry.test_folder: unknown key*"])


def test_selection_by_mark_keyword_and_option(repository: Repository) -> None:
    repository.write_test("test_fast", suite="short-cpu", labels=["fsdp", "lora"])
    repository.write_test("test_slow", suite="short-cpu", labels=["fsdp"], nightly=True)

    def selected(*arguments: str) -> set[str]:
        outcome = run(repository, "--strict-markers", "--collect-only", "-q", *arguments)
        return {line.split("::")[1] for line in outcome.outlines if "::" in line}

    assert selected("-m", "e2e") == {"test_fast", "test_slow", "test_stub"}
    assert selected("-m", "e2e(suite='short-cpu')") == {"test_fast", "test_slow"}
    assert selected("-m", "e2e(label='lora') and e2e(suite='short-cpu')") == {"test_fast"}
    assert selected("-m", "e2e(label='fsdp') and not e2e(nightly=True)") == {"test_fast"}
    assert selected("-k", "short-cpu and not lora") == {"test_slow"}
    assert selected("tests/e2e/test_fast.py::test_fast") == {"test_fast"}
    folder = run(repository, "--e2e", "-rs", "-m", "e2e(nightly=True)")
    folder.stdout.fnmatch_lines(["*nightly: give --e2e-nightly, or name the file"])
    for arguments in (["--e2e-nightly", "-m", "e2e(nightly=True)"], ["tests/e2e/test_slow.py"]):
        run(repository, "--e2e", *arguments).stdout.fnmatch_lines(["no-standard  tests/e2e/test_slow.py *"])


def test_a_repository_that_has_these_options_itself_is_left_alone(repository: Repository) -> None:
    (repository.root / "conftest.py").write_text(
        "import sys\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--e2e', action='store_true')\n"
        "def pytest_unconfigure(config):\n"
        "    print('loaded', sorted({'torch', 'ray', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)))\n"
    )
    (repository.root / "test_ordinary.py").write_text(
        "def test_it(pytestconfig): assert pytestconfig.getoption('--e2e')\n"
    )
    outcome = run(repository, "--e2e", "test_ordinary.py")
    outcome.assert_outcomes(passed=1)
    outcome.stdout.fnmatch_lines(["loaded []"])
    run(repository, "--e2e", TEST).stdout.fnmatch_lines([f"no-standard  {TEST} *"])


# ------------------------------------------------------------------------------------------------ running


FAR_AWAY = "2999-01-01"


def write_every_verdict(repository: Repository) -> None:
    """Write a test for every way in which a check may end."""
    for name in ("match", "mismatch", "known"):
        repository.write_test(f"test_{name}", script=f"scripts/{name}.py")
        repository.write_recipe(name=f"{name}.py")
        assert repository.cli("record", "--test", f"tests/e2e/test_{name}.py").code == 0
    repository.write_recipe("SCALE = 1.0000001", name="mismatch.py")
    repository.write_recipe("SCALE = 1.0000001", name="known.py")
    repository.write_test(
        "test_known", script="scripts/known.py", quarantine={"reason": "moved with torch", "until": FAR_AWAY}
    )
    repository.write_recipe("raise RuntimeError('the disk is on fire')", name="failed.py")
    repository.write_test("test_failed", script="scripts/failed.py")
    repository.write_test("test_disabled", disabled="waits for a machine")
    repository.write_test("test_elsewhere", platforms=["cuda-*"])
    repository.write_test("test_error", env={"VALUE": "${NOT_SET_ANYWHERE}"})


def test_results_are_those_of_the_command_line_also_under_xdist(repository: Repository) -> None:
    write_every_verdict(repository)
    assert repository.cli("check", "--all").code == 2  # the worst: a variable is not set
    checked = results(repository)
    assert {test["verdict"] for test in checked["tests"]} == {
        *("match", "mismatch", "no-standard", "failed", "skipped", "error")
    }
    without_tests = {name: value for name, value in checked["selection"].items() if name != "tests"}
    for arguments in ([], ["-n2"]):
        (repository.root / ".e2e_runs/results.json").unlink()
        outcome = run(repository, "--e2e", *arguments)
        outcome.assert_outcomes(passed=1, failed=4, skipped=2, xfailed=1)
        assert outcome.ret == pytest.ExitCode.TESTS_FAILED
        found = results(repository)
        assert found["selection"].pop("tests") == [test["subject"] for test in checked["tests"]]
        assert found == {**checked, "selection": {**without_tests, "all": False}}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_recipe_does_not_know_that_pytest_has_launched_it(repository: Repository, workers: list[str]) -> None:
    """Reported: one that starts itself over passed from the command line alone."""
    repository.write_recipe(
        'import os; from e2e_registry.determinism import bootstrap; bootstrap("cuda")\n'
        'SCALE = 1.0 + sum(name.startswith("PYTEST_") for name in os.environ)'
    )
    assert repository.command("record", "--all", "--runs", "1", env=dict.fromkeys(PYTEST_VARIABLES, "x")).code == 0
    run(repository, "--e2e", *workers, TEST).assert_outcomes(passed=1)


def test_a_failure_shows_the_report_of_the_registry(repository: Repository) -> None:
    write_every_verdict(repository)
    outcome = run(repository, "--e2e", "-rxs", "--junitxml=junit.xml", "-W", "error")
    shown = "\n".join(line.rstrip() for line in outcome.outlines)
    for name in ("mismatch", "failed", "error"):
        report = repository.cli("check", "--test", f"tests/e2e/test_{name}.py").out
        lines = [line.rstrip() for line in report.splitlines()[1:] if "kept run" not in line and "RUN" not in line]
        for line in lines:
            assert re.sub(r"\d{8}T\S+", "", line) in re.sub(r"\d{8}T\S+", "", shown)
    assert "Traceback" not in shown.replace("| Traceback", "")  # the recipe's own, in the end of its output
    outcome.stdout.fnmatch_lines(
        [
            "XFAIL tests/e2e/test_known.py::test_known - *mismatch, quarantined until 2999-01-01: moved with torch",
            "SKIPPED * tests/e2e/test_disabled.py:3: disabled: waits for a machine",
        ]
    )
    cases = ElementTree.parse(repository.root / "junit.xml").getroot().iter("testcase")
    verdicts = {
        case.get("name"): {entry.get("name"): entry.get("value") for entry in case.iter("property")}.get("verdict")
        for case in cases
    }
    assert verdicts["test_mismatch"] == "mismatch"
    assert verdicts["test_known"] == "mismatch"
    assert verdicts["test_disabled"] == "skipped"


def test_exitfirst_ends_after_the_first_failure_and_runs_nothing_more(repository: Repository) -> None:
    repository.write_test("test_another")
    outcome = run(repository, "--e2e", "-x")
    outcome.assert_outcomes(failed=1)
    assert len(repository.runs) == 1
    found = results(repository)
    assert (found["status"], found["why_partial"], found["not_run"]) == ("partial", "fail-fast", [TEST])
    assert [test["subject"] for test in found["tests"]] == ["tests/e2e/test_another.py"]


def test_results_that_cannot_be_kept_fail_the_session_without_a_traceback(repository: Repository) -> None:
    repository.record()
    (repository.root / ".e2e_runs/results.json").mkdir()
    outcome = run(repository, "--e2e")
    outcome.assert_outcomes(passed=1)
    outcome.stdout.fnmatch_lines(["error: the results were not kept: *results.json: cannot write: *"])
    assert outcome.ret == pytest.ExitCode.INTERNAL_ERROR


def test_recording(repository: Repository) -> None:
    repository.write_test("test_on_gpus", num_gpus=64, profile="cuda")
    created = run(repository, "--e2e-record")
    created.assert_outcomes(passed=1, skipped=1)
    created.stdout.fnmatch_lines([f"created  {TEST}  cpu-x86_64-portable", "  2 runs agree", "  next: review and*"])
    run(repository, "--e2e").assert_outcomes(passed=1, skipped=1)
    repository.write_recipe("import os; SCALE = int.from_bytes(os.urandom(4), 'little')")
    before = repository.standard.read_bytes()
    refused = run(repository, "--e2e-record")
    refused.assert_outcomes(failed=1, skipped=1)
    refused.stdout.fnmatch_lines([f"refused  {TEST} *", "  two runs of the same recipe do not agree*"])
    repository.write_recipe("raise SystemExit(3)")
    failed = run(repository, "--e2e-record")
    failed.assert_outcomes(failed=1, skipped=1)
    failed.stdout.fnmatch_lines(["*the recipe exited with code 3*"])
    assert repository.standard.read_bytes() == before


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_an_interrupt_leaves_no_process_of_a_recipe(repository: Repository, workers: list[str]) -> None:
    alive = repository.root / "alive"
    repository.write_recipe(f"import os, time; open({str(alive)!r}, 'w').write(str(os.getpid())); time.sleep(120)")
    command = [sys.executable, "-m", "pytest", "--e2e", *workers]
    with subprocess.Popen(
        command, cwd=repository.root, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        _wait_until(lambda: alive.exists() and alive.read_text())
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=180)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    _wait_until(lambda: not Path("/proc", alive.read_text()).exists())
    if not workers:  # of a worker that was ended nobody learns what it had collected
        found = results(repository)
        assert (found["status"], found["why_partial"], found["not_run"]) == ("partial", "interrupted", [TEST])


def _wait_until(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
