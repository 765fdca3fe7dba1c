"""Coverage that shrinks is said wherever it shrinks: by `check`, and whenever a standard is rewritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository

from e2e_registry.comparison.arithmetic import passes
from e2e_registry.dtypes import FLOAT64
from e2e_registry.tolerance import OBSERVE, STRICT, UNREGISTERED, Policy, PolicyKind, Tolerance

TEST = "tests/e2e/test_stub.py"


def with_tolerance(repository: Repository, bounds: str) -> None:
    repository.write_test(tolerances={})
    path = repository.root / TEST
    tolerance = f"tolerances={{'train/loss': Tolerance({bounds}, reason='measured')}}"
    path.write_text(path.read_text().replace("tolerances={}", tolerance))


def test_a_dropped_metric_is_named_by_check_record_and_accept(repository: Repository, tmp_path: Path) -> None:
    """Report: a metric left `metrics`, and `record` and `accept` said "updated (20 points)", and no more."""
    repository.record()
    repository.commit()
    repository.write_test(metrics=["data/batch", "train/*"])
    repository.commit()
    checked = repository.cli("check", "--test", TEST)
    assert checked.code == 0
    assert "warning: tokens is not registered any more; it is judged until the standard is recorded" in checked.out
    assert repository.cli("merge", ".e2e_runs", "--summary", tmp_path / "summary.md").code == 0
    assert "tokens is not registered any more" in (tmp_path / "summary.md").read_text()
    artifact = shutil.copytree(repository.root / ".e2e_runs", tmp_path / "artifact")
    accepted = repository.cli("accept", artifact, "--test", TEST, "--yes")
    repository.git("checkout", "-q", "--", ".")
    recorded = repository.cli("record", "--test", TEST, "--export", tmp_path / "out")
    (exported,) = (tmp_path / "out").rglob("*.md")
    for report in (accepted.out, recorded.out, exported.read_text().replace("&#58;", ":").replace("&#40;", "(")):
        assert "no longer judged: tokens (5 points" in report


def test_a_metric_that_is_only_observed_any_more_is_named_with_how_far_it_moved(repository: Repository) -> None:
    """Report: a loss that was 77 times larger was recorded as "values unchanged"."""
    repository.record()
    repository.write_test(metrics=["data/batch", "train/grad_norm", "tokens"], observe=["speed", "train/loss"])
    repository.write_recipe("SCALE = 77.0")
    checked = repository.cli("check", "--test", TEST)
    assert checked.out.startswith("match")
    assert "warning: judged less strictly than the standard was recorded: train/loss: strict → observe" in checked.out
    recorded = repository.cli("record", "--test", TEST)
    assert recorded.out.startswith("updated"), "the values of a metric that was judged are not unchanged"
    assert "train/loss: strict → observe (5 of 5 values differ, by up to 76 of the old one)" in recorded.out
    assert "strict" not in repository.cli("check", "--test", TEST).out
    repository.write_test(metrics=["data/batch", "train/*", "tokens"])
    assert "train/loss: observe → strict" in repository.cli("record", "--test", TEST).out


def test_tolerances_that_widen_narrow_or_change_are_told_apart(repository: Repository) -> None:
    repository.record()
    steps = [
        ("atol=1e-9", "tolerance widened: train/loss: strict → atol=1e-09", True),
        ("atol=1e-7", "tolerance widened: train/loss: atol=1e-09 → atol=1e-07", True),
        ("atol=1e-8", "tolerance narrowed: train/loss: atol=1e-07 → atol=1e-08", False),
        ("atol=1e-8, fails_on='increase'", "tolerance widened: train/loss: atol=1e-08 → ", True),
        ("atol=1e-9, reduce='mean'", "tolerance changed: train/loss: ", True),
    ]
    for bounds, said, is_weaker in steps:
        with_tolerance(repository, bounds)
        checked = repository.cli("check", "--test", TEST)
        assert (checked.code, f"recorded: {said}" in checked.out) == (0, is_weaker)
        recorded = repository.cli("record", "--test", TEST)
        assert recorded.out.startswith("rewritten, values unchanged")
        assert f"  {said}" in recorded.out
    repository.write_test()
    assert "tolerance narrowed: train/loss: " in repository.cli("record", "--test", TEST).out
    assert "→ strict" not in repository.cli("check", "--test", TEST).out


def test_many_changes_are_counted_and_the_weaker_ones_come_first(repository: Repository) -> None:
    body = """
    from e2e_registry import MetricRecorder
    with MetricRecorder() as recorder:
        recorder.log({f"train/m{i:02}": 1.0 for i in range(30)} | {"zz": 1.0}, step=0)
    """
    repository.write_recipe(body=body)
    repository.write_test(metrics=["zz"], observe=[])
    repository.record()
    repository.write_test(metrics=["train/*"], observe=[])
    result = repository.cli("record", "--test", TEST)
    lines = [line.strip() for line in result.out.splitlines()]
    at = lines.index("what changes beside the values:")
    assert lines[at + 1 : at + 3] == ["no longer judged: zz (1 point)", "newly judged: train/m00"]
    assert "… and 19 more such changes" in lines


bounds = st.sampled_from([0.0, 1e-9, 1e-3, 0.5])
tolerances = st.builds(
    Tolerance,
    atol=bounds,
    rtol=bounds,
    ulp=st.sampled_from([1, 4]),
    fails_on=st.sampled_from([None, "increase", "decrease"]),
    reason=st.just("measured"),
)


@given(tolerances, tolerances, st.sampled_from([0.0, 1.0, -2.5]), st.floats(-4, 4))
def test_what_accepts_no_more_accepts_no_more(mine: Tolerance, other: Tolerance, want: float, got: float) -> None:
    if mine.accepts_no_more_than(other):
        pair = (np.array([got]).view(np.uint64), np.array([want]).view(np.uint64))
        assert not passes(mine, FLOAT64, *pair)[0] or passes(other, FLOAT64, *pair)[0]
    policy = Policy(PolicyKind.TOLERANCE, mine)
    for weaker, stricter in [(policy, STRICT), (OBSERVE, policy), (UNREGISTERED, OBSERVE)]:
        assert stricter.accepts_no_more_than(weaker)
        assert not weaker.accepts_no_more_than(stricter)
