"""``results.json`` and ``junit.xml`` of a check: every verdict, the schema, the document, and checks that are ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from repositories import Repository, stable
from test_cli_check import processes_running

from e2e_registry.operations.results import results_schema

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results.md"
TEST = "tests/e2e/test_stub.py"
LOSS = """
from e2e_registry import MetricRecorder
with MetricRecorder() as recorder:
    for step in range(2):
        recorder.log({{"train/loss": {scale} / (step + 1)}}, step=step)
"""


def read_results(repository: Repository) -> Any:
    results = json.loads((repository.root / ".e2e_runs/results.json").read_bytes())
    jsonschema.Draft202012Validator(results_schema()).validate(results)
    return results


def replace_between(name: str, content: str) -> None:
    """Hold a generated part of the document to what the code says; UPDATE_GOLDEN=1 writes it."""
    begin, end = f"<!-- {name}: written by tests/unit/test_results.py -->", f"<!-- end of {name} -->"
    text = DOCUMENT.read_text()
    before, rest = text.split(begin)
    written = f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
    if os.environ.get("UPDATE_GOLDEN"):
        DOCUMENT.write_text(written)
    assert DOCUMENT.read_text() == written, "run this test with UPDATE_GOLDEN=1"


# ------------------------------------------------------------------------------------------------ the document


def field_tables() -> str:
    schema = results_schema()
    tables = [("the document", schema), *((part["title"], part) for part in schema["$defs"].values())]
    lines: list[str] = []
    for title, part in tables:
        lines += [f"### {title}", "", part["description"], "", "| field | type | meaning |", "|---|---|---|"]
        for name, field in part["properties"].items():
            optional = "" if name in part["required"] else ", may be absent"
            lines.append(f"| `{name}` | {type_text(field)}{optional} | {field['description']}{values_text(field)} |")
        lines.append("")
    return "\n".join(lines).strip()


def type_text(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return "object"
    if "oneOf" in field:
        return "object or null"
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return "integer" if values == [1] else "string or null" if None in values else "string"
    kinds = field.get("type", "any")
    if kinds == "array":
        return "array of " + ("objects" if "$ref" in field["items"] else field["items"]["type"] + "s")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def values_text(field: dict[str, Any]) -> str:
    values = [value for value in field.get("enum", ()) if value is not None]
    return f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""


def test_the_fields_in_the_document_are_those_of_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(results_schema())
    replace_between("fields", field_tables())


def test_the_example_in_the_document_is_what_a_check_writes(repository: Repository) -> None:
    repository.write_test(metrics=["train/loss"], observe=None)
    repository.write_recipe(body=LOSS.format(scale=1.0))
    repository.record()
    repository.write_recipe(body=LOSS.format(scale=1.5))
    assert repository.cli("check", "--suite", "stub").code == 1
    text = json.dumps(read_results(repository), indent=1, ensure_ascii=False)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME", stable(text, repository.root))
    text = re.sub(r'("duration_s": )[\d.]+', r"\g<1>1.25", re.sub(r"\b[0-9a-f]{64}\b", "HASH", text))
    replace_between("example", f"```json\n{text.strip()}\n```")


# ------------------------------------------------------------------------------------------------ every verdict


def plain(text: str) -> str:
    return f"import os; open(os.environ['E2E_METRICS_JSONL'], 'w').write({text!r})"


#: Name of the test to its expected verdict and exit code.
EXPECTED = {
    "disabled": ("skipped", 5),
    "elsewhere": ("skipped", 5),
    "failed": ("failed", 4),
    "incomplete": ("incomplete", 4),
    "invalid": ("invalid", 4),
    "match": ("match", 0),
    "mismatch": ("mismatch", 1),
    "never": ("mismatch", 1),
    "new": ("no-standard", 3),
    "other_platform": ("incomparable", 3),
    "quarantined": ("mismatch", 0),
    "stderr": ("failed", 4),
    "storage": ("error", 6),
    "unset": ("error", 2),
    "within": ("within-tolerance", 0),
}


@pytest.fixture
def fleet(repository: Repository) -> Repository:
    """A repository with a test for every verdict."""
    (repository.root / TEST).unlink()
    recorded = ("match", "mismatch", "never", "other_platform", "quarantined", "storage", "within", "elsewhere")
    for name in recorded:
        repository.write_recipe(name=f"{name}.py")
        repository.write_test(f"test_{name}", script=f"scripts/{name}.py")
    assert repository.cli("record", "--all", "--runs", "1").code == 0
    changed = "SCALE = 1.0000001"
    for name in ("mismatch", "quarantined", "within", "elsewhere"):
        repository.write_recipe(changed, name=f"{name}.py")
    test = repository.root / repository.write_test("test_within", script="scripts/within.py")
    tolerance = 'tolerances={"train/loss": Tolerance(atol=1e-6, reason="the scale is measured")},\n)'
    test.write_text(test.read_text().replace("\n)", f"\n    {tolerance}", 1))
    quarantine = {"reason": "a flake is looked into", "until": "2999-01-01"}
    repository.write_test("test_quarantined", script="scripts/quarantined.py", quarantine=quarantine)
    repository.write_test("test_elsewhere", script="scripts/elsewhere.py", platforms=["cuda-*"])
    repository.write_test(
        "test_never", script="scripts/never.py", metrics=["data/batch", "train/*", "tokens", "eval/*"]
    )
    repository.write_test("test_new")
    repository.write_test("test_disabled", disabled="until the flake is understood")
    repository.write_test("test_unset", args=["--key", "${E2E_NO_SUCH_VARIABLE}"])
    bodies = {
        "failed": "raise SystemExit(3)",
        "stderr": "print('\\x00\\x1b[31m <&> ]]>', flush=True); raise RuntimeError('on fire')",
        "invalid": plain('{"step": 2, "a": 1}\n{"step": 1, "a": 1}\n'),
        "incomplete": plain('{"step": 1, "a": 1}\n{"st'),
    }
    for name, body in bodies.items():
        repository.write_recipe(body=body, name=f"{name}.py")
        repository.write_test(f"test_{name}", script=f"scripts/{name}.py")
    standard = repository.standards / "test_storage.cpu-x86_64-portable.parquet"
    standard.write_bytes(standard.read_bytes()[:-9])
    repository.move_standard("cpu-aarch64-portable", "test_other_platform")
    return repository


def outcomes(results: Any) -> dict[str, tuple[str, int]]:
    names = (test["subject"].removeprefix("tests/e2e/test_").removesuffix(".py") for test in results["tests"])
    return {name: (test["verdict"], test["exit_code"]) for name, test in zip(names, results["tests"], strict=True)}


#: What may differ between two checks of one tree.
_VOLATILE = ("run", "candidate", "duration_s", "log_tail", "next_steps", "reasons", "node", "attempts", "warnings")


def comparable(results: Any) -> Any:
    """Return results without what differs between two checks of the same tree: times and the names of kept runs."""
    return [{key: value for key, value in test.items() if key not in _VOLATILE} for test in results["tests"]]


@pytest.mark.slow
def test_every_verdict_with_its_exit_code_alike_with_one_job_and_with_two(fleet: Repository) -> None:
    result = fleet.cli("check", "--all", "--json")
    one = read_results(fleet)
    assert outcomes(one) == EXPECTED
    assert result.json == one
    assert (result.code, one["exit_code"], one["status"], one["not_run"]) == (2, 2, "complete", [])
    check_junit(fleet.root / ".e2e_runs/junit.xml")
    shown = fleet.cli("check", "--all", "--jobs", "2")
    assert shown.code == 2
    assert "15 tests: " in shown.out
    two = read_results(fleet)
    assert comparable(two) == comparable(one)


def check_junit(path: Path) -> None:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 15, "failures": 4, "errors": 6, "skipped": 3}
    kinds = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert kinds["test_mismatch.py"] == ["failure"]
    assert kinds["test_new.py"] == ["failure"]
    assert kinds["test_quarantined.py"] == ["skipped"]
    assert kinds["test_match.py"] == ["system-out"]
    (failed,) = (case for case in suite if case.attrib["name"] == "test_stderr.py")
    assert "RuntimeError: on fire" in (failed[0].text or "")
    assert "<&> ]]>" in (failed[0].text or "")


@pytest.mark.slow
def test_each_verdict_alone_ends_the_command_with_its_code(fleet: Repository) -> None:
    for name, (verdict, code) in EXPECTED.items():
        result = fleet.cli("check", "--test", f"tests/e2e/test_{name}.py")
        assert result.code == code, name
        assert f"{verdict}  tests/e2e/test_{name}.py" in result.out
        assert read_results(fleet)["exit_code"] == code


# ------------------------------------------------------------------------------------------------ ended checks

SLEEPING = """
    import os, pathlib, time
    from e2e_registry import MetricRecorder
    with MetricRecorder() as recorder:
        recorder.log({"train/loss": 1.0}, step=0)
        pathlib.Path(os.environ["MARKS"], str(os.getpid())).touch()
        time.sleep(300)
"""

#: Ends nothing by itself at the first request, and leaves a mark that it came.
STUBBORN = """
    import os, pathlib, signal
    signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(os.environ["MARKS"], "told").touch())
"""

#: The command line as on a machine of two cores.
ON_TWO_CORES = """
from e2e_registry.execution import capacity
capacity.available_cpus = lambda: 2
from e2e_registry.cli.app import entry
entry()
"""


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until the condition holds, and no longer than the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("signum", "code", "why"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_during_a_suite_leaves_partial_results_and_no_process(
    repository: Repository, tmp_path: Path, signum: int, code: int, why: str
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    repository.record()
    repository.write_recipe(body=SLEEPING, name="sleeping.py")
    for name in ("test_t1", "test_t2", "test_t3"):
        repository.write_test(name, script="scripts/sleeping.py", env={"MARKS": str(marks)}, timeout=600)
    repository.write_test("test_stub", est_time=90)  # the longest starts first
    command = [sys.executable, "-c", ON_TWO_CORES, "check", "--all", "--jobs", "2", "--json"]
    check = subprocess.Popen(command, cwd=repository.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(marks.iterdir())) == 2, check)
    during = read_results(repository)
    check.send_signal(signum)
    out, err = check.communicate(timeout=120)
    assert (check.returncode, "Traceback" in err) == (code, False), err
    assert (during["status"], during["why_partial"], len(during["tests"])) == ("partial", "running", 1)
    after = read_results(repository)
    assert (after["status"], after["why_partial"]) == ("partial", why)
    assert json.loads(out) == after
    assert outcomes(after) == {"stub": ("match", 0), "t1": ("incomplete", 4), "t2": ("incomplete", 4)}
    assert after["not_run"] == ["tests/e2e/test_t3.py"]
    assert (repository.root / after["tests"][1]["run"] / "metrics.main.rank0.jsonl").stat().st_size
    assert not processes_running(repository.root)
    junit = ElementTree.parse(repository.root / ".e2e_runs/junit.xml").getroot()
    assert [child.attrib["type"] for child in junit.iter("error")] == ["incomplete", "incomplete", "not-run"]


def test_a_second_signal_hastens_the_end_and_the_results_are_written_all_the_same(
    repository: Repository, tmp_path: Path
) -> None:
    repository.write_recipe(body=textwrap.dedent(STUBBORN) + textwrap.dedent(SLEEPING))
    repository.write_test(env={"MARKS": str(tmp_path)}, timeout=600)
    command = [sys.executable, "-m", "e2e_registry", "check", "--all"]
    check = subprocess.Popen(command, cwd=repository.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [path for path in tmp_path.iterdir() if path.name.isdigit()], check)
    check.send_signal(signal.SIGINT)
    wait_for((tmp_path / "told").exists, check)
    check.send_signal(signal.SIGTERM)
    _, err = check.communicate(timeout=120)
    assert (check.returncode, "Traceback" in err) == (130, False), err
    results = read_results(repository)
    assert (results["why_partial"], outcomes(results)) == ("interrupted", {"stub": ("incomplete", 4)})
    assert not processes_running(repository.root)


def test_fail_fast_starts_no_further_test_and_is_not_the_default(repository: Repository) -> None:
    repository.record()
    repository.write_recipe(body="raise SystemExit(1)", name="failing.py")
    repository.write_test("test_failing", script="scripts/failing.py")
    assert repository.cli("check", "--all").code == 4
    assert len(read_results(repository)["tests"]) == 2
    result = repository.cli("check", "--all", "--fail-fast")
    assert result.code == 4
    assert "2 tests: 1 failed, 1 not run" in result.out
    results = read_results(repository)
    assert (results["status"], results["why_partial"], results["not_run"]) == ("partial", "fail-fast", [TEST])


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_disk_during_a_suite_ends_it_with_the_results_that_were_kept(
    repository: Repository, small_disk: Path, jobs: str
) -> None:
    repository.record()
    filling = f"""
        import pathlib, time
        while '"match"' not in pathlib.Path({str(small_disk / "here/results.json")!r}).read_text(): time.sleep(0.05)
        with open({str(small_disk / "filler")!r}, "wb") as file:
            try:
                while file.write(b"0" * 4096): file.flush()
            except OSError:
                pass
    """
    repository.write_recipe(body=filling, name="filling.py")
    repository.write_test("test_stub", est_time=90)
    repository.write_test("test_tfilling", script="scripts/filling.py", est_time=60)
    repository.write_test("test_tlast")
    (repository.root / "pyproject.toml").write_text('[tool.e2e_registry]\nrun_folder = "runs/here"\n')
    (repository.root / "runs").symlink_to(small_disk)
    result = repository.command("check", "--all", "--jobs", jobs)
    assert result.code == 6, result.err
    assert "No space left on device" in result.err
    assert "Traceback" not in result.err
    results = json.loads((small_disk / "here/results.json").read_bytes())
    jsonschema.Draft202012Validator(results_schema()).validate(results)
    assert results["status"] == "partial"
    assert outcomes(results)["stub"] == ("match", 0)
    assert not processes_running(repository.root)
    assert not list(small_disk.glob("here/.*.tmp"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    as_root = [] if os.getuid() == 0 else ["sudo", "-n"]
    mount = [*as_root, "mount", "-t", "tmpfs", "-o", f"size=1m,uid={os.getuid()}", "tmpfs", path]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"cannot mount a small file system, so a full disk is not tried: {error}")
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system, so a full disk is not tried: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run([*as_root, "umount", path], check=True)


# ------------------------------------------------------------------------------------------------ repeats, durations


def test_a_mismatch_is_labelled_by_repeats_and_stays_a_mismatch(repository: Repository) -> None:
    repository.record()
    assert repository.cli("check", "--all", "--repeat-on-mismatch", "2").code == 0
    assert len(repository.runs) == 3
    repository.write_recipe("SCALE = 2.0")
    repeatable = repository.cli("check", "--all", "--repeat-on-mismatch", "2")
    assert repeatable.code == 1
    assert "repeatable: 2 further runs agreed with this one" in repeatable.out
    (test,) = read_results(repository)["tests"]
    assert (test["verdict"], test["repeat"]["label"], len(test["repeat"]["runs"])) == ("mismatch", "repeatable", 2)
    repository.write_recipe("import time; SCALE = time.time_ns()")
    noisy = repository.cli("check", "--all", "--repeat-on-mismatch", "3")
    assert noisy.code == 1
    assert "nondeterministic: run again, it gave other numbers: first train/loss, step 0" in noisy.out
    (test,) = read_results(repository)["tests"]
    assert (test["verdict"], test["repeat"]["label"], len(test["repeat"]["runs"])) == (
        "mismatch",
        "nondeterministic",
        1,
    )
    assert repository.cli("check", "--all").code == 1
    assert read_results(repository)["tests"][0]["repeat"] is None


def test_measured_durations_stand_beside_the_estimate(repository: Repository) -> None:
    (before,) = repository.cli("list", "--json").json["tests"]
    assert before["measured"] is None
    repository.write_test(est_time=600)
    repository.record()
    repository.write_recipe(body="raise SystemExit(1)")
    repository.cli("check", "--all")
    (after,) = repository.cli("list", "--json").json["tests"]
    assert after["measured"]["runs"] == 2  # the two that record made; the failed one measures nothing
    assert 0 < after["measured"]["median_s"] < after["est_time"]
    assert re.search(r"measured s.*\n.* 600 +\d+\.\d", repository.cli("list").out)
