"""``plan`` and ``merge``: what CI is to run, and whether all of it came back."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repositories import Repository, Result
from rich.console import Console
from test_environment import Checkout

from e2e_registry.comparison import TestVerdict
from e2e_registry.comparison.merged import MergedResults, MergedVerdict
from e2e_registry.reports.github import change_summary, summary, workflow_commands
from e2e_registry.reports.markdown import code, preformatted, text
from e2e_registry.reports.merged import print_merged

TEST = "tests/e2e/test_stub.py"
PORTABLE = "cpu-x86_64-portable"
ARM = "cpu-aarch64-portable"


def declare(repository: Repository, **platforms: list[str]) -> None:
    lines = ["[tool.e2e_registry]", 'test_folders = ["tests/e2e"]', "[tool.e2e_registry.platforms]"]
    lines += [f"{slug} = {json.dumps(labels)}" for slug, labels in platforms.items()]
    (repository.root / "pyproject.toml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def planned(repository: Repository) -> Repository:
    declare(repository, **{PORTABLE: ["ubuntu-24.04"]})
    return repository


def plan(repository: Repository, *options: str) -> Any:
    result = repository.cli("plan", "--suite", "stub", *options)
    assert result.code == 0, result.err
    return result.json


def entry(test: str = TEST, verdict: str = "match", platform: str | None = PORTABLE, **more: Any) -> dict[str, Any]:
    return {"subject": test, "verdict": verdict, "platform": platform, "exit_code": 0, **more}


def artifact(
    repository: Repository, folder: str, *tests: dict[str, Any], job: dict[str, Any] | None = None, **top: Any
) -> Path:
    """Lay out one job's artifact in ``artifacts/``."""
    path = repository.root / "artifacts" / folder
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps({"format": 1, "tests": tests, **top}))
    if job is not None:
        (path / "job.json").write_text(json.dumps(job))
    return path


def job(attempt: int = 1, platform: str = PORTABLE, part: str = "1/1") -> dict[str, Any]:
    return {"name": f"{platform} {part}", "platform": platform, "attempt": attempt}


def merge(repository: Repository, *options: str) -> Result:
    return repository.cli("merge", "artifacts", *options)


def verdicts(result: Result) -> dict[tuple[str, str], tuple[str | None, str]]:
    return {
        (verdict["test"].removeprefix("tests/e2e/test_").removesuffix(".py"), verdict["platform"]): (
            verdict["verdict"],
            verdict["standing"],
        )
        for verdict in result.json["verdicts"]
    }


# ---------------------------------------------------------------------------------------------------- planning


def test_a_plan_is_a_matrix_over_platforms_and_parts(repository: Repository) -> None:
    declare(repository, **{PORTABLE: ["ubuntu-24.04"], ARM: ["self-hosted", "arm"], "cuda-nvidia-h200-2gpu": ["h200"]})
    for number in range(4):
        repository.write_test(f"test_{number}", est_time=10 * (number + 1))
    repository.write_test("test_gpu", profile="cuda", num_gpus=2)
    repository.write_test("test_eight_gpus", profile="cuda", num_gpus=8)
    repository.write_test("test_off", disabled="broken upstream")
    found = plan(repository, "--partitions", "3")
    jobs = found["matrix"]["include"]
    assert [(one["name"], one["runs_on"], one["artifact"]) for one in jobs] == [
        *((f"{PORTABLE} {part}/3", ["ubuntu-24.04"], f"{PORTABLE}-{part}of3") for part in (1, 2, 3)),
        *((f"{ARM} {part}/3", ["self-hosted", "arm"], f"{ARM}-{part}of3") for part in (1, 2, 3)),
        ("cuda-nvidia-h200-2gpu", ["h200"], "cuda-nvidia-h200-2gpu-1of1"),
    ]
    on_cpu = [test for one in jobs[:3] for test in one["tests"].split("\n")]
    assert sorted(on_cpu) == [f"tests/e2e/test_{name}.py" for name in ("0", "1", "2", "3", "stub")]
    assert jobs[6]["tests"] == "tests/e2e/test_gpu.py"
    assert [warning.split()[0] for warning in found["warnings"]] == ["tests/e2e/test_eight_gpus.py"]
    off = [verdict for verdict in found["expected"] if verdict["test"] == "tests/e2e/test_off.py"]
    assert [(verdict["excuse"], verdict["is_run"]) for verdict in off] == [("disabled: broken upstream", False)] * 2
    one = plan(repository, "--platform", ARM)
    assert {verdict["platform"] for verdict in one["expected"]} == {ARM}


def test_outputs_of_a_step_and_the_tree_of_the_head(planned: Repository) -> None:
    planned.commit("base")
    output = planned.root / "output.txt"
    output.write_text("earlier=1\n")
    head = Checkout.git(planned, "rev-parse", "HEAD").strip()  # type: ignore[arg-type]
    found = plan(planned, "--head-rev", head, "--github-output", str(output))
    lines = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert lines["earlier"] == "1"
    assert json.loads(lines["matrix"]) == found["matrix"]
    assert (lines["count"], lines["head-source-tree"]) == ("1", found["head_source_tree"])
    output.unlink()
    recorded = planned.command(
        *("run", "--test", TEST, "--json"), env={"E2E_REGISTRY_HEAD_SOURCE_TREE": found["head_source_tree"]}
    ).json["environment"]["source"]
    assert recorded["head_source_tree"] == recorded["source_tree"] == found["head_source_tree"]
    missing = planned.cli("plan", "--suite", "stub", "--head-rev", "0" * 40)
    assert missing.code == 2
    assert "fetch-depth" in missing.err


def test_a_new_platform_is_for_information_until_its_standards_land(planned: Repository) -> None:
    def required() -> set[tuple[str, str]]:
        return {
            (verdict["test"].removeprefix("tests/e2e/test_").removesuffix(".py"), verdict["platform"])
            for verdict in plan(planned)["expected"]
            if verdict["excuse"] is None
        }

    assert required() == {("stub", PORTABLE)}  # it has no standard anywhere, and must get one
    planned.record()
    declare(planned, **{PORTABLE: ["ubuntu-24.04"], ARM: ["arm"]})
    planned.write_test("test_named", platforms=["cpu-aarch64-*"])
    shutil.copy(planned.standard, planned.standards / f"test_named.{PORTABLE}.parquet")
    assert required() == {("stub", PORTABLE), ("named", ARM)}
    moved = planned.move_standard(ARM)
    planned.record()
    assert moved.exists()
    assert required() == {("stub", PORTABLE), ("stub", ARM), ("named", ARM)}
    planned.write_test("test_shaky", quarantine={"reason": "flaky", "until": "2999-01-01"})
    assert ("shaky", PORTABLE) not in required()


@pytest.mark.parametrize("slug", [f"{PORTABLE}-torch2.14", f"{PORTABLE}-tagged"])
def test_renaming_the_platforms_does_not_switch_verdicts_off(planned: Repository, slug: str) -> None:
    planned.record()
    (planned.root / "pyproject.toml").write_text(
        '[tool.e2e_registry]\ntest_folders = ["tests/e2e"]\nplatform_axes = ["torch"]\n'
        f'[tool.e2e_registry.platforms]\n"{slug}" = ["ubuntu-24.04"]\n'
    )
    expected = plan(planned)["expected"]
    assert [(verdict["platform"], verdict["excuse"]) for verdict in expected] == [(slug, None)]
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    (planned.root / "artifacts").mkdir()
    assert merge(planned, "--plan", "plan.json").code == 4
    planned.write_test(platforms=[PORTABLE])  # then it asks for no verdict, which somebody has to hear of
    found = plan(planned)
    assert [verdict["excuse"] for verdict in found["expected"]] == ["platforms= does not name it"]
    assert found["warnings"] == [f"{TEST} needs no verdict anywhere: its platforms= ({PORTABLE}) names no declared one"]


def test_a_new_platform_is_excused_only_beside_one_whose_verdict_is_required(planned: Repository) -> None:
    planned.record()
    declare(planned, **{PORTABLE: ["ubuntu-24.04"], ARM: ["arm"]})

    def excused() -> set[str]:
        return {verdict["platform"] for verdict in plan(planned)["expected"] if verdict["excuse"] is not None}

    assert excused() == {ARM}
    planned.write_test(platforms=["cpu-aarch64-*", "*-none"])  # the standard that is there counts for nothing now
    assert excused() == {PORTABLE}
    planned.write_test(profile="cpu-native")
    declare(planned, **{PORTABLE: ["ubuntu-24.04"], "cpu-x86_64-native-v3": ["v3"]})
    assert excused() == set()  # it no longer runs where its standard is of


def test_what_cannot_be_planned(repository: Repository) -> None:
    none = repository.cli("plan", "--suite", "stub")
    assert (none.code, "no platform is declared" in none.err) == (2, True)
    assert "[tool.e2e_registry.platforms]" in none.err
    declare(repository, **{PORTABLE: ["ubuntu-24.04"]})
    unknown = repository.cli("plan", "--all", "--platform", "cpu-x86_64-portabel")
    assert (unknown.code, f"did you mean '{PORTABLE}'" in unknown.err) == (2, True)
    for number in range(257):
        repository.write_test(f"test_{number}")
    many = repository.cli("plan", "--suite", "stub", "--partitions", "300")
    assert (many.code, "at most 256" in many.err) == (2, True)
    for path in (repository.root / "tests/e2e").iterdir():
        path.unlink()
    assert repository.cli("plan", "--all").code == 5
    empty = repository.cli("plan", "--all", "--allow-empty")
    assert (empty.code, empty.json["count"]) == (0, 0)
    repository.write_test("test_gpu", profile="cuda", num_gpus=1)
    nowhere = repository.cli("plan", "--test", "tests/e2e/test_gpu.py")
    assert (nowhere.code, "tests/e2e/test_gpu.py runs nowhere" in nowhere.err) == (5, True)
    repository.write_test("test_off", disabled="broken")
    off = repository.cli("plan", "--test", "tests/e2e/test_off.py")
    assert (off.code, "disabled: broken" in off.err) == (5, True)
    assert repository.cli("plan", "--all", "--from-results", ".").code == 2


# ------------------------------------------------------------------------------------------------------ merging


def test_the_worst_verdict_counts_and_a_missing_one_fails(planned: Repository) -> None:
    planned.write_test("test_other")
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    artifact(planned, "a", entry(), job=job(part="1/2"))
    missing = merge(planned, "--plan", "plan.json", "--json")
    assert missing.code == 4
    assert verdicts(missing)["other", PORTABLE] == (None, "required")
    assert merge(planned).code == 0  # without a plan nothing is missed
    artifact(planned, "b", entry("tests/e2e/test_other.py", "skipped", None, reasons=["no GPU"]), job=job(part="2/2"))
    assert merge(planned, "--plan", "plan.json").code == 4
    shutil.rmtree(planned.root / "artifacts/b")
    artifact(planned, "b", entry("tests/e2e/test_other.py"), job=job(part="2/2"))
    assert merge(planned, "--plan", "plan.json").code == 0
    for number, (verdict, code_) in enumerate(
        [("no-standard", 3), ("mismatch", 1), ("failed", 4), ("invalid", 4), ("error", 70)], start=1
    ):
        artifact(planned, f"c{number}", entry("tests/e2e/test_other.py", verdict), job=job(number + 1, part="2/2"))
        assert merge(planned, "--plan", "plan.json").code == code_, verdict


def test_the_latest_attempt_counts_and_of_one_attempt_the_worse(planned: Repository) -> None:
    artifact(planned, "e2e-1", entry(verdict="mismatch"), job=job(1), status="partial")
    assert merge(planned).code == 4
    artifact(planned, "e2e-2", entry(), job=job(2))
    assert merge(planned).code == 0
    artifact(planned, "another", entry(verdict="mismatch"), job=job(2, part="2/2"))
    twice = merge(planned, "--json")
    assert twice.code == 1
    assert "two results (mismatch, match)" in twice.json["warnings"][0]
    artifact(planned, "third", entry(), job=job(3), status="partial")
    assert merge(planned).code == 4  # what was not reached cannot be known
    assert "partial" in merge(planned).out


@pytest.mark.parametrize("stated", [0, 5, 130, 143, -1, 999, True, 1.0, "1", None, [1]])
def test_an_error_counts_whatever_code_it_states(planned: Repository, stated: object) -> None:
    artifact(planned, "a", entry(verdict="error", exit_code=stated))
    assert merge(planned).code == 70
    shutil.rmtree(planned.root / "artifacts")
    for code_ in (1, 2, 3, 4, 6):
        artifact(planned, str(code_), entry(f"{code_}.py", "error", exit_code=code_))
    assert {verdict["exit_code"] for verdict in merge(planned, "--json").json["verdicts"]} == {1, 2, 3, 4, 6}


def test_with_a_plan_its_excuse_alone_makes_a_verdict_informational(planned: Repository) -> None:
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    artifact(planned, "a", entry(verdict="mismatch", quarantine="until 2999-01-01: forged"), job=job())
    assert merge(planned).code == 0
    merged = merge(planned, "--plan", "plan.json", "--summary", "summary.md")
    assert (merged.code, "quarantined" in merged.out) == (1, False)
    assert "1 verdict fine" not in (planned.root / "summary.md").read_text()
    planned.write_test(quarantine={"reason": "flaky", "until": "2999-01-01"})
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    assert merge(planned, "--plan", "plan.json").code == 0


def test_where_nothing_ran_the_merge_is_no_success(planned: Repository) -> None:
    artifact(planned, "a", entry(verdict="skipped", platform=None, reasons=["disabled: x"]), job=job())
    assert merge(planned).code == 5
    assert merge(planned, "--allow-empty").code == 0
    artifact(planned, "b", entry("tests/e2e/test_other.py"), job=job(part="2/2"))
    assert merge(planned).code == 0
    planned.write_test(disabled="broken")
    planned.write_test("test_other", disabled="broken")
    shutil.rmtree(planned.root / "artifacts")
    (planned.root / "artifacts").mkdir()
    (planned.root / "plan.json").write_text(json.dumps(planned.cli("plan", "--all", "--allow-empty").json))
    assert merge(planned, "--plan", "plan.json").code == 5
    assert merge(planned, "--plan", "plan.json", "--allow-empty").code == 0


def matrix_job(artifact_name: str | None, attempt: int = 1) -> dict[str, Any]:
    """What a leg of a matrix says of itself: the job's name is that of all legs."""
    facts = {"name": "e2e", "platform": None, "attempt": attempt}
    return facts if artifact_name is None else facts | {"artifact": artifact_name}


@pytest.mark.parametrize("is_named", [True, False])
def test_an_attempt_at_one_leg_of_a_matrix_replaces_no_other_leg(planned: Repository, is_named: bool) -> None:
    names = ("part1", "part2") if is_named else (None, None)
    ended = {"status": "partial", "why_partial": "terminated", "not_run": ["c.py", "d.py"]}
    artifact(planned, "part1-attempt1", entry("a.py", "mismatch"), job=matrix_job(names[0]))
    artifact(planned, "part2-attempt1", entry("b.py"), job=matrix_job(names[1]), **ended)
    assert merge(planned).code == 4
    artifact(planned, "part1-attempt2", entry("a.py"), job=matrix_job(names[0], 2))
    merged = merge(planned, "--json")
    assert merged.code == 4
    assert ["c.py, d.py" in problem for problem in merged.json["problems"]] == [True]
    artifact(planned, "part2-attempt2", *map(entry, ["b.py", "c.py", "d.py"]), job=matrix_job(names[1], 2))
    assert merge(planned).code == 0


def test_a_result_of_another_job_does_not_replace_one_that_failed(planned: Repository) -> None:
    # Two legs of one platform, such as two versions of Python: each has its own attempts.
    artifact(planned, "old-attempt1", entry(verdict="mismatch"), job=matrix_job("old"))
    artifact(planned, "new-attempt1", entry(verdict="failed"), job=matrix_job("new"))
    artifact(planned, "new-attempt2", entry(), job=matrix_job("new", 2))
    merged = merge(planned, "--json")
    assert merged.code == 1
    assert merged.json["warnings"] == [f"{TEST} on {PORTABLE}: two results (match, mismatch); the worse one counts"]
    artifact(planned, "old-attempt2", entry(), job=matrix_job("old", 2))
    assert merge(planned).code == 0


def test_a_job_whose_code_is_not_that_of_its_results_says_so(planned: Repository) -> None:
    def merged(code_: int | None, *tests: dict[str, Any]) -> tuple[int, str]:
        shutil.rmtree(planned.root / "artifacts", ignore_errors=True)
        artifact(planned, "a", *tests, job=matrix_job("a") | {"command": "check", "exit_code": code_})
        result = merge(planned, "--json", "--allow-empty")
        return result.code, "".join(result.json["problems"])

    assert merged(0, entry()) == (0, "")
    assert merged(1, entry(verdict="mismatch")) == (1, "")
    assert merged(0, entry(verdict="mismatch", quarantine="until 2999-01-01: flaky"))[0] == 0
    assert merged(3, entry("a.py", "error", exit_code=3), entry("b.py")) == (3, "")
    assert merged(0) == merged(5) == merged(0, entry(verdict="skipped", platform=None)) == (0, "")
    for stale in (1, 2, 5, 6, 70, 143):
        assert merged(stale, entry()) == (4, f"e2e: check ended with exit code {stale}, and its results say 0")
    assert merged(0, entry(verdict="mismatch"))[0] == 4
    assert merged(None, entry()) == (4, "e2e: check did not come to its end")
    assert "exit code" in merged(True, entry())[1]


def test_verdicts_for_information_never_fail_the_merge(planned: Repository) -> None:
    planned.record()
    declare(planned, **{PORTABLE: ["ubuntu-24.04"], ARM: ["arm"]})
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    artifact(planned, "a", entry(), job=job())
    arm = artifact(planned, "b", entry(verdict="incomparable", platform=ARM), job=job(platform=ARM))
    merged = merge(planned, "--plan", "plan.json", "--json")
    assert merged.code == 0
    assert verdicts(merged)["stub", ARM] == ("incomparable", "for information")
    assert merge(planned).code == 3  # nobody said that it is not required
    shutil.rmtree(arm)
    assert merge(planned, "--plan", "plan.json").code == 0
    artifact(planned, "c", entry(verdict="mismatch", quarantine="until 2999-01-01: flaky"), job=job(2))
    assert merge(planned).code == 0


def test_a_runner_of_another_platform_than_planned_is_told_of(planned: Repository) -> None:
    (planned.root / "plan.json").write_text(json.dumps(plan(planned)))
    artifact(planned, "a", entry(platform="cpu-x86_64-portable-tagged"), job=job())
    merged = merge(planned, "--plan", "plan.json", "--json")
    assert merged.code == 4
    assert merged.json["warnings"] == [
        f"{PORTABLE} 1/1: planned for {PORTABLE}, and its runner is cpu-x86_64-portable-tagged: "
        "correct the runner's labels in [tool.e2e_registry.platforms]"
    ]
    assert verdicts(merged)["stub", PORTABLE] == (None, "required")
    # A recipe that died before its platform was known is a failure of the test, not of the runner.
    artifact(planned, "b", entry(verdict="failed", platform="unknown"), job=job(2))
    failed = merge(planned, "--plan", "plan.json", "--json")
    assert verdicts(failed)["stub", PORTABLE] == ("failed", "required")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        # Nested as the parser still follows, and what walks through it would not.
        *((f'{{"format": 1, "tests": [], "more": {"[" * depth}{"]" * depth}}}', "is not JSON") for depth in (120, 900)),
        ("[]", "is no JSON object"),
        ('{"format": 2, "tests": []}', "is of format 2"),
        ('{"format": 1, "tests": {}}', "no list of tests"),
        ('{"format": 1, "tests": [7]}', "tests[0]: names no test"),
        ('{"format": 1, "tests": [{"subject": "a", "verdict": "fine"}]}', "unknown verdict 'fine'"),
        ('{"format": 1, "tests": [{"subject": "a", "verdict": ["x"]}]}', "unknown verdict"),
        ('{"format": 1, "tests": [{"subject": "a", "verdict": "match", "platform": 1}]}', "a platform that is no text"),
    ],
)
def test_a_damaged_artifact_is_named_and_the_others_are_read(planned: Repository, content: str, says: str) -> None:
    artifact(planned, "good", entry())
    damaged = artifact(planned, "damaged")
    (damaged / "results.json").write_text(content)
    merged = merge(planned, "--json")
    assert merged.code == 6
    assert says in merged.json["problems"][0]
    assert "damaged" in merged.json["problems"][0]
    assert verdicts(merged)["stub", PORTABLE] == ("match", "required")


def test_a_job_that_brought_nothing_says_so(planned: Repository) -> None:
    def brought(folder: str, **facts: object) -> Result:
        path = artifact(planned, folder, job=job() | {"name": folder} | facts)
        (path / "results.json").unlink()
        return merge(planned, "--allow-empty")

    assert brought("recorded", command="record", exit_code=0).code == 0
    crashed = brought("crashed", command="check", exit_code=70)
    assert (crashed.code, "crashed: check ended with exit code 70 and no results" in crashed.out) == (4, True)
    refused = brought("refused", command="record", exit_code=1)
    assert "refused: record ended with exit code 1" in refused.out
    (planned.root / "artifacts/refused/job.json").write_text('{"attempt": "1"}')
    assert merge(planned).code == 6


def test_links_in_artifacts_are_not_followed_and_nothing_is_not_success(planned: Repository) -> None:
    real = artifact(planned, "../elsewhere", entry())
    (planned.root / "artifacts/linked").symlink_to(real)
    (planned.root / "artifacts/inside").mkdir()
    (planned.root / "artifacts/inside/results.json").symlink_to(real / "results.json")
    assert merge(planned).code == 5
    assert merge(planned, "--allow-empty").code == 0
    assert planned.cli("merge", "no-such").code == 2


PLAN = {"format": 1, "expected": [{"test": TEST, "platform": PORTABLE, "excuse": None, "is_run": True}], "warnings": []}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"format": [' + "[" * 100_000,
        f'{{"format": 1, "warnings": [], "expected": [{"[" * 900}{"]" * 900}]}}',
        "\xff",
        *(
            json.dumps(PLAN | damage)
            for damage in (
                {"format": 2},
                {"warnings": 1},
                {"warnings": [1]},
                {"expected": {}},
                {"expected": [1]},
                *(
                    {"expected": [PLAN["expected"][0] | {name: value}]}
                    for name, value in (  # type: ignore[index]
                        ("test", ["a"]),
                        ("test", None),
                        ("platform", {}),
                        ("excuse", 0),
                        ("excuse", [1]),
                        ("is_run", "no"),
                        ("no_such_field", 1),
                    )
                ),
            )
        ),
    ],
)
def test_a_plan_that_is_none_is_refused(planned: Repository, content: str) -> None:
    artifact(planned, "a", entry())
    (planned.root / "plan.json").write_bytes(content.encode("latin-1"))
    refused = merge(planned, "--plan", "plan.json")
    assert (refused.code, refused.out) == (6, "")
    assert refused.err.startswith("error: plan.json: ")


@pytest.mark.parametrize("options", [[], ["--json"], ["--summary", "summary.md"]])
@pytest.mark.parametrize("is_workflow", [True, False])
def test_text_that_no_encoding_has_is_printed_escaped(
    planned: Repository, options: list[str], is_workflow: bool
) -> None:
    hostile = entry("t\ud800.py", "mismatch", "p\ud800", reasons=["\udfff"])
    artifact(planned, "a", hostile, job={"name": "j\ud800", "platform": "q\ud800", "attempt": 1, "exit_code": 0})
    env = {"PYTHONIOENCODING": "utf-8", "GITHUB_ACTIONS": str(is_workflow).lower()}
    merged = planned.command("merge", "artifacts", *options, env=env)
    assert (merged.code, "Traceback" in merged.err) == (4, False)
    assert "\\ud800" in merged.out
    if options == ["--json"]:
        assert merged.json["verdicts"][0]["test"] == hostile["subject"]
        ascii_only = planned.command("merge", "artifacts", "--json", env={"PYTHONIOENCODING": "ascii"})
        assert ascii_only.json == merged.json


# ------------------------------------------------------------------------------------------------------ reports

HOSTILE = (
    "a|b`c`\n## owned\r\n</code></pre></details><img src=x onerror=alert(1)> [x](http://e) @you ::error::no "
    "\u202e\x1b[31m"
)


class Tags(HTMLParser):
    """The tags that a browser would see, and the text between them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.depth: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.opened.append(tag)
        self.depth.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag


def hostile_entry() -> dict[str, Any]:
    point = {"dtype": "float32", "value": 1.0, "bits": "3f800000"}
    other = {"dtype": "float32", "value": 1.0, "bits": "3f800001"}
    place = {"metric": HOSTILE, "role": HOSTILE, "rank": 0, "step": 1, "occurrence": 0, "seq": 0, "ulp": 1}
    place |= {"want": point, "got": other, "abs": 1e-7, "rel": HOSTILE, "allowance": None}
    series = {"metric": HOSTILE, "role": HOSTILE, "rank": 0, "verdict": "mismatch", "presence": "both"}
    series |= {"points": 5, "failing": 3, "differing": 3, "first": place, "worst": place}
    return entry(
        HOSTILE,
        "mismatch",
        comparison={"first_divergence": place, "series": [series] * 50},
        reasons=[HOSTILE],
        environment=[{"group": HOSTILE, "name": HOSTILE, "want": HOSTILE, "got": [HOSTILE]}],
        log_tail=HOSTILE * 100,
        broken_invariants=[{"metric": HOSTILE, "invariant": HOSTILE, "count": 1, "step": 1}],
        candidate="c.parquet",
        is_judged=True,
    )


def test_hostile_text_stays_text(planned: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(planned.root / "summary.md"))
    artifact(planned, "a", hostile_entry(), job={"name": HOSTILE, "platform": HOSTILE, "attempt": 1})
    result = merge(planned)
    assert result.code == 1
    written = (planned.root / "summary.md").read_text()
    tags = Tags(written)
    assert set(tags.opened) <= {"code", "details", "summary", "pre"}
    assert not tags.depth
    assert "## owned" not in written
    assert "http://" not in written
    assert not {"\u202e", "\x1b", "@"} & set(written)
    rows = [line for line in written.splitlines() if line.startswith("|") and "onerror" in line]
    assert rows
    assert {line.count("|") for line in rows} == {5, 10}  # a cell more would be a cell made by its content
    assert "accept 77" in written.replace("&#45;", "-")
    # The log: commands are off while text from elsewhere is printed, and ours are one line each.
    lines = result.out.splitlines()
    token = re.fullmatch(r"::stop-commands::([0-9a-f]{32})", lines[0])
    assert token
    resumed = lines.index(f"::{token[1]}::")
    commands = lines[resumed + 1 :]
    assert commands
    assert all(re.match(r"::(error|warning)( |::)", line) for line in commands)
    assert "\x1b" not in result.out


@pytest.mark.parametrize("value", ["", " x", "<pre>", "a\nb", "\ud800", "`|`", "1. x", "- x", "http://x", "é漢"])
def test_markdown_of_any_text_is_one_literal_line(value: str) -> None:
    shown = html.unescape(text(value))
    assert html.unescape(code(value)) == f"<code>{shown}</code>"
    assert preformatted(value).count("<") == 2
    assert shown == value if value.isprintable() else shown.isprintable()
    rendered = text(value)
    assert not set(re.sub(r"&#\d+;", "", rendered)) & set("`|<>*_[]()#+-.!~\\:@&\n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just(HOSTILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damaged_entry(draw: st.DrawFn) -> dict[str, Any]:
    """A result that a hostile job might leave: of the right shape, with anything at all in a few places."""
    whole: dict[str, Any] = json.loads(json.dumps(hostile_entry()))

    def damage(value: Any, depth: int = 0) -> Any:
        if draw(st.integers(0, 9)) == 0 and depth:
            return draw(JSON)
        if isinstance(value, dict):
            return {key: damage(item, depth + 1) for key, item in value.items()}
        return [damage(item, depth + 1) for item in value[:2]] if isinstance(value, list) else value

    damaged: dict[str, Any] = damage(whole)
    damaged |= {"subject": draw(st.text(max_size=8)), "verdict": draw(st.sampled_from(list(TestVerdict))).value}
    return damaged | {"exit_code": draw(JSON | st.sampled_from([0, 1, 5, 130, 143]))}


@given(damaged_entry())
@settings(max_examples=150)
def test_whatever_a_result_holds_the_report_is_whole(result: dict[str, Any]) -> None:
    verdict = MergedVerdict(
        test=result["subject"], platform=HOSTILE, verdict=TestVerdict(result["verdict"]), result=result
    )
    merged = MergedResults(verdicts=[verdict], warnings=[HOSTILE])
    assert (merged.exit_code == 0) == verdict.verdict.is_success  # type: ignore[union-attr]  # it has one
    tags = Tags(summary(merged, next_step=HOSTILE))
    assert set(tags.opened) <= {"code", "details", "summary", "pre"}
    assert not tags.depth
    assert all("\n" not in command for command in workflow_commands(merged))
    console = Console(file=io.StringIO(), width=80)
    print_merged(merged, console)
    change = {"action": "updated", "change": result.get("comparison"), **result}
    assert not Tags(change_summary([change], {HOSTILE: HOSTILE})).depth


def test_reports_are_bounded(planned: Repository) -> None:
    tests = [hostile_entry() | {"subject": f"{number}{HOSTILE * 20}"} for number in range(300)]
    artifact(planned, "a", *tests, job=job())
    (planned.root / "summary.md").touch()
    result = merge(planned, "--summary", "summary.md")
    written = (planned.root / "summary.md").read_text()
    assert len(written) < 1_000_000
    assert "more" in written
    assert len(result.out.splitlines()) < 300
    Tags(written)


def failing(test: str, **result: Any) -> MergedVerdict:
    return MergedVerdict(test=test, platform=PORTABLE, verdict=TestVerdict.MISMATCH, result=result)


def test_a_step_gets_as_many_annotations_of_a_kind_as_it_shows() -> None:
    merged = MergedResults(verdicts=[failing(f"test_{n}.py") for n in range(30)], warnings=["odd"] * 30)
    kinds = [command.split("::")[1].split()[0] for command in workflow_commands(merged)]
    assert kinds == ["error"] * 10 + ["warning"] * 10


def test_what_explains_nothing_alone_is_the_last_of_an_environment() -> None:
    facts = [
        {"group": "platform", "name": "host", "want": "a", "got": "b", "is_informational": True},
        {"group": "recipe", "name": "lr", "want": "1", "got": "2", "is_informational": False},
    ]
    written = summary(MergedResults(verdicts=[failing(TEST, environment=facts)]), next_step=None)
    assert 0 < written.index("<code>lr</code>") < written.index("<code>host</code>")


def test_a_real_mismatch_is_shown_first(planned: Repository) -> None:
    planned.record()
    planned.write_test("test_fine", script="scripts/fine.py")
    planned.write_recipe(name="fine.py")
    assert planned.cli("record", "--test", "tests/e2e/test_fine.py").code == 0
    planned.write_recipe("SCALE = 1.0000001")
    assert planned.cli("check", "--suite", "stub").code == 1
    merged = planned.cli("merge", ".e2e_runs", "--summary", "summary.md")
    assert merged.code == 1
    written = (planned.root / "summary.md").read_text()
    assert written.startswith("## End to end: 1 of 2 required verdicts fine, 1 job\n")
    assert re.search(r"\| mismatch \| <code>.*stub.*</code> \|.*first at train&#47;loss, step 0", written)
    assert written.index("stub") < written.index("fine&#46;py")


# ---------------------------------------------------------------------------------------------------- recording


def test_what_asks_for_a_standard_is_recorded_and_exported(planned: Repository) -> None:
    planned.record()
    planned.write_test("test_fine", script="scripts/fine.py")
    planned.write_recipe(name="fine.py")
    assert planned.cli("record", "--test", "tests/e2e/test_fine.py").code == 0
    fine = planned.standards / f"test_fine.{PORTABLE}.parquet"
    before = fine.read_bytes()
    planned.write_recipe("SCALE = 2.0")
    planned.cli("check", "--suite", "stub")
    results = planned.root / ".e2e_runs/results.json"
    data = json.loads(results.read_text())
    data["tests"].append(entry("tests/e2e/test_$(touch owned).py", "mismatch"))
    results.write_text(json.dumps(data))
    chosen = planned.cli("plan", "--from-results", ".e2e_runs")
    assert [one["tests"] for one in chosen.json["matrix"]["include"]] == [TEST]
    (planned.root / "elsewhere").mkdir()
    asking = [entry(verdict="no-standard", platform=f"{PORTABLE}-tagged"), entry(platform=PORTABLE)]
    (planned.root / "elsewhere/results.json").write_text(json.dumps({"format": 1, "tests": asking}))
    undeclared = planned.cli("plan", "--from-results", "elsewhere")
    assert undeclared.code == 5
    assert f"{TEST} asks for a standard on {PORTABLE}-tagged, and no runner is declared for it" in undeclared.err
    asking[1]["verdict"] = "mismatch"
    (planned.root / "elsewhere/results.json").write_text(json.dumps({"format": 1, "tests": asking}))
    partly = planned.cli("plan", "--from-results", "elsewhere")
    assert (partly.code, partly.json["count"]) == (0, 1)
    assert [f"{PORTABLE}-tagged" in warning for warning in partly.json["warnings"]] == [True]
    recorded = planned.cli("record", "--from-results", ".e2e_runs", "--export", "out", "--json")
    assert recorded.code == 0, recorded.err
    assert [change["action"] for change in recorded.json["tests"]] == ["updated"]
    assert fine.read_bytes() == before
    out = planned.root / "out"
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files[2:] == [planned.standard.relative_to(planned.root).as_posix()]
    assert (out / files[2]).read_bytes() == planned.standard.read_bytes()
    assert [re.sub(r"[^/]+\.", "X.", name) for name in files[:2]] == [
        ".e2e_runs/changes/X.json",
        ".e2e_runs/changes/X.md",
    ]
    report = (out / files[1]).read_text()
    assert report.startswith("## Standards: 1 updated\n")
    assert "train&#47;loss" in report
    # Nothing changed: the report says so, and there is no standard to commit.
    again = planned.cli("record", "--test", TEST, "--export", "again")
    assert again.code == 0
    assert not list((planned.root / "again").rglob("*.parquet"))
    planned.write_recipe("raise SystemExit('| <b>')")
    failed = planned.cli("record", "--test", TEST, "--export", "failed")
    assert failed.code == 4
    (report_path,) = (planned.root / "failed").rglob("*.md")
    assert "not recorded" in report_path.read_text()
    assert "<b>" not in report_path.read_text()
    assert planned.cli("record", "--from-results", "artifacts-missing").code == 2
    assert planned.cli("record", "--test", TEST, "--export", ".").code == 2
