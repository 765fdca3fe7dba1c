"""What a report of many metrics shows: the largest change always, the first failure first, and a bounded length."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from repositories import Repository, Result

TEST = "tests/e2e/test_stub.py"

#: Thirty metrics and one whose name comes last, in the order of names as in that of emission.
MANY = """
from e2e_registry import MetricRecorder
with MetricRecorder() as recorder:
    for step in range(2):
        many = {f"train/m{i:04}": VALUE for i in range(COUNT)}
        recorder.log(many | {"train/zz": LAST, "train/zeros": ZERO}, step=step)
"""

#: Nobody reads more of one test in a log.
BOUND = 12_000


def write(repository: Repository, value: str, *, count: int = 30, last: str = "1.0", zero: str = "0.0") -> None:
    repository.write_recipe(body=f"VALUE, COUNT, LAST, ZERO = {value}, {count}, {last}, {zero}\n{MANY}")


def rows(text: str) -> list[str]:
    """Return the metrics that a report has a row for, in order."""
    return re.findall(
        r"^(?:  |\| <code>)(train/\w+)(?:</code> \||) +\d+/\d+ ", text.replace("&#47;", "/"), re.MULTILINE
    )


def test_a_change_is_shown_largest_first_wherever_it_is_shown(repository: Repository, tmp_path: Path) -> None:
    """Report: of 31 series that changed, 12 were shown, in emission order: not the one that moved by 769 %."""
    write(repository, "1.0")
    repository.write_test(metrics=["train/*"], observe=[])
    repository.record()
    repository.commit()
    write(repository, "1.0 + 1e-9", last="-6.69")
    repository.commit()
    failed = repository.cli("check", "--test", TEST, "--json")
    assert failed.code == 1
    artifact = shutil.copytree(repository.root / ".e2e_runs", tmp_path / "artifact")
    assert repository.cli("merge", artifact, "--summary", tmp_path / "summary.md").code == 1
    accepted = repository.cli("accept", artifact, "--yes")
    assert accepted.code == 0, accepted.err
    repository.git("checkout", "-q", "--", ".")
    recorded = repository.cli("record", "--test", TEST, "--export", tmp_path / "out")
    assert recorded.code == 0
    (exported,) = (tmp_path / "out").rglob("*.md")
    for report in (accepted.out, recorded.out, exported.read_text()):
        assert rows(report)[:2] == ["train/zz", "train/m0000"]
        assert len(rows(report)) == 12
        assert "… and 19 more" in report
    summary = (tmp_path / "summary.md").read_text()
    assert rows(summary) == [*(f"train/m{i:04}" for i in range(12)), "train/zz", "train/m0012", "train/m0013"]
    assert "The largest of the 19 series that differ later" in summary


def test_a_failure_is_shown_first_divergence_first_and_with_the_largest(repository: Repository) -> None:
    write(repository, "1.0")
    repository.write_test(metrics=["train/*"], observe=[])
    repository.record()
    write(repository, "1.0 + 1e-9", last="-6.69", zero="1e-30")
    failed = repository.cli("check", "--test", TEST)
    assert "first divergence: train/m0000, step 0" in failed.out
    assert rows(failed.out) == [*(f"train/m{i:04}" for i in range(12)), "train/zeros", "train/zz", "train/m0012"]
    assert "the largest of the 20 failing series that come later:" in failed.out
    assert "… and 17 more failing series, none larger: --all-metrics shows them" in failed.out
    everything = repository.cli("check", "--test", TEST, "--all-metrics")
    assert len(rows(everything.out)) == 32
    write(repository, "1.0 + 1e-9", zero="float('nan')")
    not_finite = repository.cli("check", "--test", TEST)
    assert rows(not_finite.out)[12] == "train/zeros", "what no number can measure is larger than any"


def tolerated(repository: Repository) -> None:
    path = repository.root / TEST
    tolerance = 'tolerances={"train/*": Tolerance(atol=1.0, reason="measured")},'
    path.write_text(path.read_text().replace("observe=", f"{tolerance}\n    observe="))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("non-finite", "… and 590 more broken invariants"),
        ("within tolerance", "… and 590 more series within their tolerance, none further off"),
        ("never emitted", "… and 588 more"),
        ("never emitted, no standard", "… and 588 more reasons"),
    ],
)
def test_hundreds_of_metrics_do_not_flood_a_report(repository: Repository, case: str, said: str) -> None:
    """Report: 239 KB on the terminal, and as much in junit.xml, of 3000 metrics that were all NaN."""
    write(repository, "1.0", count=600)
    repository.write_test(metrics=["train/*"], observe=[])
    if case != "never emitted, no standard":
        repository.record()
    if case == "within tolerance":
        tolerated(repository)
        write(repository, "1.5", count=600, last="1.5", zero="0.5")
    elif case == "non-finite":
        write(repository, "float('nan')", count=600, last="float('nan')", zero="float('nan')")
    else:
        repository.write_test(metrics=["train/*", *(f"rollout/n{i}" for i in range(600))], observe=[])
    checked = repository.cli("check", "--test", TEST)
    assert said in checked.out
    junit = (repository.root / ".e2e_runs/junit.xml").read_text()
    merged = repository.cli("merge", ".e2e_runs", "--summary", "summary.md")
    summary = (repository.root / "summary.md").read_text()
    recorded = repository.cli("record", "--test", TEST)
    shown = [checked.out, checked.err, junit, summary, merged.out, recorded.out, recorded.err]
    assert {name: len(text) for name, text in enumerate(shown) if len(text) > BOUND} == {}
    everything = repository.cli("check", "--test", TEST, "--all-metrics")
    assert "n599" in everything.out or "m0599" in everything.out
    assert whole(json.loads((repository.root / ".e2e_runs/results.json").read_text())["tests"][0]) >= 600


def whole(test: dict[str, object]) -> int:
    """Count the entries of the longest list of a result."""
    comparison = test["comparison"]
    lists = [test["reasons"], test["broken_invariants"], *(comparison.values() if isinstance(comparison, dict) else ())]
    return max(len(entry) for entry in lists if isinstance(entry, list))


def test_a_change_within_tolerance_is_bounded_too(repository: Repository) -> None:
    write(repository, "1.0", count=600)
    repository.write_test(metrics=["train/*"], observe=[])
    tolerated(repository)
    repository.record()
    write(repository, "1.5", count=600, last="1.5", zero="0.5")
    result: Result = repository.cli("record", "--test", TEST)
    assert result.code == 0
    assert len(result.out) < BOUND
    assert "old rows stay" in result.out
