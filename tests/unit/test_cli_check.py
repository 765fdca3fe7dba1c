"""``check``, ``compare`` and ``run`` through the command line: every verdict, its exit code and its report."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repositories import Repository, assert_golden

from e2e_registry.standard import Standard

TEST = "tests/e2e/test_stub.py"


def verdict(repository: Repository, *options: str) -> tuple[int, str]:
    """Check the stub test and return exit code and verdict."""
    result = repository.cli("check", "--test", TEST, "--json", *options)
    return result.code, result.json["tests"][0]["verdict"] if result.out else result.err


def test_match_within_tolerance_and_mismatch(repository: Repository) -> None:
    repository.record()
    matching = repository.cli("check", "--test", TEST)
    assert matching.code == 0
    assert_golden("check_match", matching.out, repository.root)
    repository.write_recipe("SCALE = 1.0000001; STEPS = 6")
    different = repository.cli("check", "--test", TEST)
    assert different.code == 1
    assert_golden("check_mismatch", different.out, repository.root)
    everything = repository.cli("check", "--test", TEST, "--all-metrics")
    assert_golden("check_mismatch_all_metrics", everything.out, repository.root)
    repository.write_recipe("SCALE = 1.0000001")
    test = repository.root / TEST
    tolerance = 'tolerances={"train/loss": Tolerance(atol=1e-6, reason="the scale is measured")},\n)'
    test.write_text(test.read_text().replace("\n)", f"\n    {tolerance}", 1))
    close = repository.cli("check", "--test", TEST)
    assert close.code == 0
    assert_golden("check_within_tolerance", close.out, repository.root)


def test_no_standard_and_incomparable(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    result = repository.cli("check", "--test", TEST)
    assert result.code == 3
    assert_golden("check_no_standard", result.out, repository.root)
    repository.record()
    moved = repository.move_standard("cpu-aarch64-portable")
    assert verdict(repository) == (3, "incomparable")
    moved.unlink()
    repository.record()
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    pinned = repository.cli("check", "--test", TEST)
    assert pinned.code == 3
    assert "MKL_CBWR" in pinned.out
    assert_golden("check_incomparable_pin", pinned.out, repository.root)
    refused = repository.cli("record", "--test", TEST)
    assert refused.code == 2
    assert "MKL_CBWR" in refused.err


def plain_lines(text: str) -> str:
    """A recipe that knows nothing of the package and writes ``text`` to its plain file."""
    return f"import os; open(os.environ['E2E_METRICS_JSONL'], 'w').write({text!r})"


FAILING = {
    "raises": ("raise SystemExit(3)", "failed"),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "failed"),
    "logs nothing": ("print('nothing')", "failed"),
    "hangs": ("import time; time.sleep(60)", "failed"),
    "garbage": (plain_lines('{"step": 1, "a": 1}\ngarbage\n{"step": 2, "a": 1}\n'), "invalid"),
    "backwards": (plain_lines('{"step": 2, "a": 1}\n{"step": 1, "a": 1}\n'), "invalid"),
    "torn": (plain_lines('{"step": 1, "a": 1}\n{"st'), "incomplete"),
}


@pytest.mark.parametrize("case", FAILING)
def test_recipes_that_fail_end_with_exit_code_4(repository: Repository, case: str) -> None:
    body, expected = FAILING[case]
    repository.write_recipe(body=body)
    repository.write_test(timeout=2 if case == "hangs" else None)
    assert verdict(repository) == (4, expected)
    recorded = repository.cli("record", "--test", TEST)
    assert recorded.code == 4
    assert not repository.standards.exists()


def test_a_failing_recipe_shows_the_end_of_its_output(repository: Repository) -> None:
    repository.write_recipe("print('almost there'); raise RuntimeError('the disk is on fire')")
    result = repository.cli("check", "--test", TEST)
    assert result.code == 4
    assert "  | RuntimeError: the disk is on fire" in result.out
    assert "  | almost there" in result.out


def test_a_secret_in_a_variable_reaches_the_recipe_and_no_file(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_KEY", "hunter2-hunter2")
    repository.write_recipe("import sys; SCALE = len(sys.argv[2])")
    repository.write_test(args=["--key", "${SERVICE_KEY}"])
    assert verdict(repository) == (3, "no-standard")
    repository.record()
    assert Standard(repository.standard).metadata.environment["recipe"]["args"] == ["--key", "${SERVICE_KEY}"]
    for path in [*repository.root.rglob("*.json*"), *repository.root.rglob("*.parquet")]:
        assert b"hunter2" not in path.read_bytes(), path


def test_skipped_and_empty_selections(repository: Repository) -> None:
    repository.write_test(disabled="until the flake is understood")
    assert verdict(repository) == (5, "skipped")
    assert verdict(repository, "--allow-empty") == (0, "skipped")
    repository.write_test(num_gpus=64, profile="cuda")
    assert verdict(repository) == (5, "skipped")
    assert repository.cli("check", "--suite", "other").code == 2
    (repository.root / TEST).unlink()
    assert repository.cli("check", "--all").code == 5
    assert repository.cli("check", "--all", "--allow-empty").code == 0


def test_storage_usage_and_internal_errors_have_their_own_codes_and_no_traceback(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.record()
    repository.standard.write_bytes(repository.standard.read_bytes()[:-9])
    damaged = repository.cli("check", "--test", TEST)
    assert (damaged.code, "not a readable Parquet file" in damaged.out) == (6, True)
    assert repository.cli("record", "--test", TEST).code == 6
    assert repository.cli("check", "--test", "absent.py").code == 2
    assert repository.cli("check").code == 2
    assert repository.cli("check", "--no-such-option").code == 2
    repository.write_test(metrics=[])
    refused = repository.cli("check", "--test", TEST)
    assert refused.code == 2
    assert f"{TEST}:8:metrics" in refused.err
    monkeypatch.setattr("e2e_registry.operations.selection.select", lambda *args, **kwargs: 1 / 0)
    internal = repository.cli("check", "--all")
    assert internal.code == 70
    assert "ZeroDivisionError" in internal.err
    assert "Traceback" not in internal.err


def test_several_tests_end_with_the_gravest_code(repository: Repository) -> None:
    repository.record()
    repository.write_recipe(body="raise SystemExit(1)", name="failing.py")
    repository.write_test("test_failing", script="scripts/failing.py")
    repository.write_test("test_new")
    result = repository.cli("check", "--suite", "stub")
    assert result.code == 4
    assert "3 tests: 1 failed, 1 no-standard, 1 match" in result.out
    results = json.loads((repository.root / ".e2e_runs/results.json").read_text())
    assert [test["verdict"] for test in results["tests"]] == ["failed", "no-standard", "match"]


def test_invariants_are_judged_with_and_without_a_standard(repository: Repository) -> None:
    repository.write_test(invariants={"train/loss": {"max": 0.5}})
    assert verdict(repository) == (1, "mismatch")
    assert repository.cli("record", "--test", TEST).code == 1
    repository.write_recipe("SCALE = float('nan')")
    repository.write_test()
    refused = repository.cli("record", "--test", TEST)
    assert refused.code == 1
    assert "not finite" in refused.err
    repository.write_test(invariants={"train/loss": {"finite": False}})
    repository.record()
    assert verdict(repository) == (0, "match")


def test_a_registered_metric_that_is_never_emitted_fails(repository: Repository) -> None:
    repository.record()
    repository.write_test(metrics=["data/batch", "train/*", "tokens", "eval/*"])
    assert verdict(repository) == (1, "mismatch")
    refused = repository.cli("record", "--test", TEST)
    assert refused.code == 1
    assert "eval/*" in refused.err


def test_a_changed_argument_is_shown_beside_the_mismatch(repository: Repository) -> None:
    repository.write_recipe("import sys; SCALE = float(sys.argv[2])")
    repository.write_test(args=["--scale", "1.0"])
    repository.record()
    repository.write_test(args=["--scale", "1.5"])
    result = repository.cli("check", "--test", TEST)
    assert result.code == 1
    assert "first divergence: train/loss, step 0: want 1.0, got 1.5" in result.out
    assert "--scale" in result.out
    assert "1.0 -> 1.5" in result.out


def test_platforms_quarantine_and_nightly_decide_what_blocks(repository: Repository) -> None:
    repository.record()
    repository.write_recipe("SCALE = 2.0")
    repository.write_test(platforms=["cuda-*"])
    elsewhere = repository.cli("check", "--test", TEST)
    assert elsewhere.code == 5
    assert "for information, compared with" in elsewhere.out
    repository.write_test(quarantine={"reason": "a flake is looked into", "until": "2999-01-01"})
    quarantined = repository.cli("check", "--test", TEST)
    assert quarantined.code == 0
    assert "mismatch" in quarantined.out
    assert "quarantined, so it blocks nothing, until 2999-01-01: a flake is looked into" in quarantined.out
    repository.write_test(quarantine={"reason": "a flake is looked into", "until": "2020-01-01"})
    assert verdict(repository) == (1, "mismatch")
    repository.write_test(nightly=True)
    assert repository.cli("check", "--suite", "stub").code == 5
    assert repository.cli("check", "--suite", "stub", "--nightly").code == 1


def test_a_child_left_behind_is_ended_with_a_warning(repository: Repository) -> None:
    repository.record()
    repository.write_recipe(
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    result = repository.cli("check", "--test", TEST)
    assert result.code == 0
    assert "left 1 process(es) behind" in result.out
    assert not processes_running(repository.root)


# ------------------------------------------------------------------------------------------------ running the file


def test_running_the_test_file_checks_that_test(repository: Repository) -> None:
    repository.record()
    done = subprocess.run([sys.executable, TEST], cwd=repository.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "match" in done.stdout
    elsewhere = subprocess.run(
        [sys.executable, str(repository.root / TEST)], cwd="/", capture_output=True, text=True, check=False
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    repository.write_recipe("SCALE = 2.0")
    done = subprocess.run([sys.executable, TEST], cwd=repository.root, capture_output=True, text=True, check=False)
    assert done.returncode == 1


# ------------------------------------------------------------------------------------------------ run, compare


def test_run_keeps_any_command_and_compare_judges_two_runs(repository: Repository) -> None:
    first = repository.cli("run", "--json", "--", sys.executable, "scripts/recipe.py")
    assert first.code == 0
    assert {entry["metric"] for entry in first.json["series"]} == {
        *("data/batch", "train/loss", "train/grad_norm", "tokens", "speed")
    }
    shown = repository.cli("run", "--test", TEST)
    assert shown.code == 0
    assert_golden("run", shown.out, repository.root)
    one, two = repository.root / first.json["run"], repository.runs[-1]
    same = repository.cli("compare", two, "--against", one)
    assert same.code == 0, same.out
    repository.write_recipe("SCALE = 3.0")
    repository.cli("run", "--test", TEST)
    different = repository.cli("compare", repository.runs[-1], "--against", one, "--json")
    assert different.code == 1
    assert different.json["comparison"]["first_divergence"]["metric"] == "train/loss"
    with_file = repository.cli("compare", two / "metrics.main.rank0.jsonl", "--against", one)
    assert with_file.code == 0
    assert repository.cli("run").code == 2
    failing = repository.cli("run", "--", "sh", "-c", "echo on fire; exit 3")
    assert failing.code == 4
    assert failing.out.count("the recipe exited with code 3") == 1
    assert "the end of its output:\n  | on fire\n" in failing.out


def test_compare_with_a_test_uses_its_policies_and_standard(repository: Repository) -> None:
    repository.record()
    run = repository.runs[-1]
    assert repository.cli("compare", run, "--test", TEST).code == 0
    assert repository.cli("compare", run, "--against", repository.standard).code == 0
    assert repository.cli("compare", repository.standard, "--test", TEST).code == 0
    moved = repository.root / "moved"
    shutil.copytree(run, moved)
    lines = moved / "metrics.main.rank0.jsonl"
    lines.write_text(lines.read_text().replace('"tokens": 40', '"tokens": 41'))
    result = repository.cli("compare", moved, "--test", TEST)
    assert result.code == 1
    assert "tokens, step 4: want 40, got 41" in result.out
    lines.write_bytes(lines.read_bytes()[:-5])
    torn = repository.cli("compare", moved, "--against", repository.standard)
    assert torn.code == 4
    assert "incomplete" in torn.out
    assert repository.cli("compare", repository.root / "absent", "--against", run).code == 2
    assert repository.cli("compare", run).code == 2


def test_compare_of_standards_loads_neither_pandas_nor_torch(repository: Repository) -> None:
    repository.record()
    code = (
        "import sys; from e2e_registry.cli.app import main\n"
        "code = main(['compare', sys.argv[1], '--against', sys.argv[1]])\n"
        "print(code, sorted({'pandas', 'torch', 'ray', 'sklearn'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(repository.standard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_help_loads_nothing_heavy_and_lists_the_main_commands_first() -> None:
    code = (
        "import sys; from e2e_registry.cli.app import main\n"
        "main(['--help'])\n"
        "print(sorted({'pandas', 'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    commands = [line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.startswith("  ")]
    assert commands[:2] == ["check", "record"]
    assert "compare" in commands


# ------------------------------------------------------------------------------------------------ signals


#: The command line in a process with one thread more, as libraries start them.
WITH_ANOTHER_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
from e2e_registry.cli.app import entry
entry()
"""


@pytest.mark.parametrize("name", ["check", "run"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_recipe_and_answer_with_their_code(
    repository: Repository, name: str, signum: int, code: int
) -> None:
    """Though the kernel hands them to another thread than the main one, as it may."""
    marker = repository.root / "started"
    repository.write_recipe(body=f"import time\nopen({str(marker)!r}, 'w').close()\ntime.sleep(600)\n")
    command = [sys.executable, "-c", WITH_ANOTHER_THREAD, name, "--test", TEST]
    process = subprocess.Popen(command, cwd=repository.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    others = [task for task in Path(f"/proc/{process.pid}/task").iterdir() if task.name != str(process.pid)]
    # pyarrow has a thread that lets no signal in.
    other = next(int(task.name) for task in others if "SigBlk:\t" + "0" * 16 in (task / "status").read_text())
    assert ctypes.CDLL(None).tgkill(process.pid, other, signum) == 0
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    (run,) = repository.runs
    assert json.loads((run / "run.json").read_text())["outcome"]["status"] == "interrupted"
    assert not processes_running(repository.root)


def processes_running(root: Path) -> list[str]:
    """Return the command lines of processes that were started in a scratch repository."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd").startswith(str(root)):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    "arguments", [("check", "--test"), ("run", "--test"), ("repeat", "--no-control", "--test"), ("doctor", "--test")]
)
def test_a_test_is_judged_by_the_settings_of_its_own_repository(
    repository: Repository, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    repository.record()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "e2e_registry", *arguments, str(repository.root / "tests/e2e/test_stub.py")]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(elsewhere.iterdir())


def test_show_opens_the_standard_of_a_test_in_another_repository(repository: Repository, tmp_path: Path) -> None:
    repository.record()
    command = [sys.executable, "-m", "e2e_registry", "show", str(repository.root / "tests/e2e/test_stub.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train/grad_norm" in done.stdout


@pytest.mark.parametrize(("change", "code"), [("", 0), ("SCALE = 2.0", 1)])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_verdict_outlasts_whoever_reads_the_report(
    repository: Repository, change: str, code: int, options: tuple[str, ...]
) -> None:
    """``check | head -1`` is a check: its exit code must be neither a false pass nor a false mismatch."""
    repository.record()
    repository.write_recipe(change)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "e2e_registry", "check", "--test", TEST, *options]
    done = subprocess.run(command, cwd=repository.root, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == code
    results = json.loads((repository.root / ".e2e_runs/results.json").read_text())
    assert results["status"] == "complete"
