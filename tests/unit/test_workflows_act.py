"""The workflows as a runner executes them, on a scratch repository with stub recipes (:mod:`act`)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from act import ACT, RUNNER, ActRepository, ActRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ACT.exists() and not os.environ.get("CI"), reason="act is not installed"),
]

SHELL = '"; touch "$ACT_STORE/owned"; echo "$(touch "$ACT_STORE/owned")`touch "$ACT_STORE/owned"`'
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/ci.md"
PORTABLE = "cpu-x86_64-portable"


@pytest.fixture
def act_repository(tmp_path: Path) -> ActRepository:
    for name in ("repository", "home"):
        (tmp_path / name).mkdir()
    repository = ActRepository(tmp_path / "repository", tmp_path / "home")
    repository.write_test("test_stub", suite="short-cpu")
    repository.write_test("test_other", suite="short-cpu", script="scripts/other.py", est_time=7)
    repository.write_test("test_labelled", suite="short-cpu", labels=["slow"])
    repository.write_recipe(name="other.py")
    for test in ("test_stub", "test_other"):
        assert repository.cli("record", "--test", f"tests/e2e/{test}.py").code == 0
    repository.commit("standards")
    return repository


def pull_request(repository: ActRepository, **more: Any) -> dict[str, Any]:
    head = repository.git("rev-parse", "HEAD").strip()
    refs = {"head": {"sha": head, "ref": SHELL, "label": SHELL}, "base": {"sha": head, "ref": "main"}}
    return {"pull_request": {"number": 1, "title": SHELL, "body": SHELL, "labels": [], **refs, **more}}


def dispatch(**inputs: str) -> dict[str, Any]:
    return {"inputs": inputs, "ref": "refs/heads/main"}


def jobs(run: ActRun) -> Mapping[str, str]:
    """Results by job, without the workflow's name and act's number of a matrix job."""
    found = {}
    for name, result in run.jobs.items():
        planned = re.search(rf"{PORTABLE}( \d/\d)?", name)
        found[planned[0] if planned else name.strip().rpartition("/")[2]] = result
    return found


def results(repository: ActRepository, artifact: str) -> dict[str, str]:
    data = json.loads((repository.store / artifact / "results.json").read_text())
    return {Path(test["subject"]).stem: test["verdict"] for test in data["tests"]}


def standard_of(test: str) -> str:
    return f"tests/ci/fixtures/e2e_standards/{test}.{PORTABLE}.parquet"


PR_JOBS = {"lint and types", "unit tests", "trains twice alike", "plan", "required"}


def test_a_pull_request_passes_and_one_that_moves_a_number_fails_with_its_artifact(
    act_repository: ActRepository,
) -> None:
    (act_repository.root / "README.md").write_text("a change that moves no number\n")
    act_repository.commit("pull request")
    passed = act_repository.act("pull_request", "pr-test", pull_request(act_repository))
    assert set(jobs(passed)) == PR_JOBS | {f"{PORTABLE} 1/2", f"{PORTABLE} 2/2"}, passed.explanation
    assert set(passed.jobs.values()) == {"success"}, passed.explanation
    act_repository.end_run(1)
    act_repository.write_recipe("SCALE = 1.5", name="other.py")
    act_repository.commit("another number")
    failed = act_repository.act("pull_request", "pr-test", pull_request(act_repository))
    assert {name for name, result in jobs(failed).items() if result != "success"} == {"required"}, failed.explanation
    parts = [f"e2e-results-{PORTABLE}-{part}of2-attempt1" for part in (1, 2)]
    assert results(act_repository, parts[0]) | results(act_repository, parts[1]) == {
        "test_other": "mismatch",
        "test_stub": "match",
    }
    # Everything that `accept` needs came back: the run, and the candidate beside it.
    ((run_file),) = act_repository.store.glob("e2e-results-*/test_other/*/run.json")
    assert list(run_file.parent.glob(f"test_other.{PORTABLE}.parquet"))
    facts = json.loads(run_file.read_text())["source"]
    assert facts["head_source_tree"] == facts["source_tree"] != None  # noqa: E711  # a chain of three
    assert "mismatch" in failed.output
    assert {path.name for path in act_repository.store.iterdir()} == {*parts, "e2e-plan-attempt1", "repeat-attempt1"}
    # As `gh run download` would lay them. `accept` finds the failing test among them, and CI then passes.
    accepted = act_repository.cli("accept", act_repository.store, "--yes")
    assert accepted.code == 0, accepted.err
    assert "accepted  tests/e2e/test_other.py" in accepted.out
    assert act_repository.git("status", "--porcelain").split() == ["M", standard_of("test_other")]
    act_repository.commit("accepted")
    act_repository.end_run(2)
    after = act_repository.act("pull_request", "pr-test", pull_request(act_repository))
    assert set(after.jobs.values()) == {"success"}, after.explanation


def test_shell_in_titles_branches_labels_and_test_names_does_nothing(act_repository: ActRepository) -> None:
    name = "test_$(touch $ACT_STORE'owned')`touch owned`;touch owned&"
    act_repository.write_test(name, suite="short-cpu")
    assert act_repository.cli("record", "--test", f"tests/e2e/{name}.py").code == 0
    act_repository.commit(SHELL)
    labels = [{"name": SHELL}, {"name": "run-ci-slow"}]
    run = act_repository.act("pull_request", "pr-test", pull_request(act_repository, labels=labels))
    verdicts = {}
    for artifact in act_repository.store.glob("e2e-results-*"):
        verdicts |= results(act_repository, artifact.name)
    # The label asked for the third test, which has no standard; the hostile name ran and matched, as a name.
    assert verdicts == {"test_stub": "match", "test_other": "match", "test_labelled": "no-standard", name: "match"}
    assert jobs(run)["required"] == "failure"
    unknown = [{"name": "run-ci-$(touch owned)"}]
    refused = act_repository.act("pull_request", "pr-test", pull_request(act_repository, labels=unknown))
    assert jobs(refused)["plan"] == "failure"
    assert "there is no label" in refused.output
    for workflow, payload in (
        ("record-e2e-standards", dispatch(test=f"tests/e2e/{SHELL}.py", reason=SHELL, platform=SHELL)),
        ("record-e2e-standards", dispatch(**{"run-id": SHELL})),
    ):
        assert act_repository.act("workflow_dispatch", workflow, payload).code != 0
    assert not [path for path in act_repository.home.parent.rglob("*") if path.name.endswith("owned")]


def test_recording_brings_back_standards_in_their_paths(act_repository: ActRepository) -> None:
    act_repository.write_recipe("SCALE = 1.5", name="other.py")
    act_repository.commit("another number")
    act_repository.act("pull_request", "pr-test", pull_request(act_repository))
    act_repository.end_run(1)
    standard = standard_of("test_other")
    # The failing tests of a run: the one that mismatched, and no other.
    recorded = act_repository.act("workflow_dispatch", "record-e2e-standards", dispatch(**{"run-id": "1"}))
    assert jobs(recorded).keys() == {"choose tests", "plan", PORTABLE, "standards"}, recorded.explanation
    assert set(recorded.jobs.values()) == {"success"}, recorded.explanation
    (artifact,) = act_repository.store.glob("standards-attempt*")
    files = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert {name for name in files if name.endswith(".parquet")} == {standard}
    assert {Path(name).suffix for name in files if "changes" in name} == {".md", ".json"}
    # Unpacked over the checkout, the next run passes, and git sees the standard alone.
    act_repository.unpack(artifact)
    assert act_repository.git("status", "--porcelain").split() == ["M", standard]
    act_repository.commit("standards")
    act_repository.end_run(2)
    passed = act_repository.act("pull_request", "pr-test", pull_request(act_repository))
    assert set(passed.jobs.values()) == {"success"}, passed.explanation
    act_repository.end_run(3)
    nothing = act_repository.act("workflow_dispatch", "record-e2e-standards", dispatch(**{"run-id": "3"}))
    assert jobs(nothing)["plan"] == "failure"
    assert "no result asks for a new standard" in nothing.output
    act_repository.end_run(4)
    # One test, with a recipe that fails: said, and still something to look at.
    act_repository.write_recipe("raise SystemExit(3)", name="other.py")
    act_repository.commit("broken")
    failed = act_repository.act(
        "workflow_dispatch", "record-e2e-standards", dispatch(test="tests/e2e/test_other.py", platform=PORTABLE)
    )
    assert {name for name, result in jobs(failed).items() if result != "success"} == {"standards"}, failed.explanation
    assert list(act_repository.store.glob("e2e-results-*/test_other/*/run.json"))


def test_another_repository_needs_the_lines_of_the_document(act_repository: ActRepository) -> None:
    lines = (DOCUMENT.read_text().split("```yaml\n")[1].split("```")[0]).replace("COMMIT", "0" * 40)
    reference = re.search(r"\S+/e2e_registry@0{40}", lines)
    assert reference
    act_repository.offer_action(reference[0])
    shutil.rmtree(act_repository.root / ".github")
    (act_repository.root / "action.yml").unlink()
    (act_repository.root / ".github/workflows").mkdir(parents=True)
    (act_repository.root / ".github/workflows/e2e.yml").write_text(lines)
    (act_repository.root / "requirements.txt").touch()
    (act_repository.root / "tests/e2e/test_labelled.py").unlink()
    bin_folder = act_repository.home / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").symlink_to(act_repository.python())
    act_repository.commit("adopt")
    environ = {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    passed = act_repository.act("pull_request", "e2e", pull_request(act_repository), environ)
    assert list(passed.jobs.values()) == ["success"], passed.explanation
    act_repository.end_run(1)
    act_repository.write_recipe("SCALE = 1.5", name="other.py")
    act_repository.commit("another number")
    failed = act_repository.act("pull_request", "e2e", pull_request(act_repository), environ)
    assert list(failed.jobs.values()) == ["failure"], failed.explanation
    assert results(act_repository, "e2e-results-e2e-attempt1")["test_other"] == "mismatch"


def test_every_runner_of_the_workflows_is_one_that_act_was_given() -> None:
    # act passes over a job whose runner it does not know, and says nothing.
    for path in (Path(__file__).resolve().parents[2] / ".github/workflows").glob("*.yml"):
        for line in path.read_text().splitlines():
            if "runs-on:" in line:
                assert line.split(": ")[1] in (RUNNER, "${{ matrix.runs_on }}"), path
