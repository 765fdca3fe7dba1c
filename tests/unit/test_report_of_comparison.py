"""What a report on a comparison shows and what it leaves out, by policies as a test registers them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import Row, stream
from repositories import Repository

from e2e_registry.errors import UsageError
from e2e_registry.series import extents
from e2e_registry.tolerance import Policies, Tolerance


def as_run(path: Path, points: Sequence[tuple[int, str, float]]) -> Path:
    path.write_text("".join(json.dumps({"step": step, metric: value}) + "\n" for step, metric, value in points))
    return path


def test_many_failing_series_are_cut_with_a_word(repository: Repository, tmp_path: Path) -> None:
    names = [f"m{number:02}" for number in range(20)]
    want = as_run(tmp_path / "want.jsonl", [(0, name, 1.0) for name in names])
    got = as_run(tmp_path / "got.jsonl", [(0, name, 2.0) for name in names])
    cut = repository.cli("compare", got, "--against", want).out
    assert [name for name in names if f"  {name} " in cut] == names[:15]
    assert "the largest of the 8 failing series that come later:" in cut
    assert "… and 5 more failing series, none larger: --all-metrics shows them" in cut
    whole = repository.cli("compare", got, "--against", want, "--all-metrics").out
    assert [name for name in names if f"  {name} " in whole] == names
    assert "more failing series" not in whole


def test_values_of_one_step_are_told_apart(repository: Repository, tmp_path: Path) -> None:
    want = as_run(tmp_path / "want.jsonl", [(3, "m", 1.0), (3, "m", 2.0)])
    second = as_run(tmp_path / "second.jsonl", [(3, "m", 1.0), (3, "m", 2.5)])
    shown = repository.cli("compare", second, "--against", want).out
    assert "first divergence: m, step 3 (value 2 of that step): want 2.0, got 2.5" in shown
    assert "first, worst" in shown
    both = as_run(tmp_path / "both.jsonl", [(3, "m", 1.5), (3, "m", 9.0)])
    shown = repository.cli("compare", both, "--against", want).out
    assert "first divergence: m, step 3: want 1.0, got 1.5" in shown
    assert "first, worst" not in shown


def test_a_series_in_brief_ends_with_its_last_point() -> None:
    (brief,) = extents(stream([Row("m", step, bits=step + 1) for step in range(5)], cuts=[3]))
    assert (brief.first_step, brief.last_step, brief.num_points) == (0, 4, 5)
    assert (brief.first.bits, brief.last.bits) == (1, 5)


def test_an_exact_name_goes_before_a_glob_and_the_first_glob_before_others() -> None:
    tolerances = {name: Tolerance(atol=bound, reason="r") for name, bound in {"a*": 1, "ab": 2, "*": 3}.items()}
    policies = Policies(metrics=["*"], tolerances=tolerances, observe=["seen"])
    found = {name: policies.policy(name).tolerance for name in ("ab", "ac", "x", "seen")}
    assert {name: tolerance and tolerance.atol for name, tolerance in found.items()} == {
        "ab": 2,
        "ac": 1,
        "x": 3,
        "seen": None,
    }


def test_what_is_only_observed_is_never_missed() -> None:
    policies = Policies(metrics=["a", "gone", "seen"], observe=["seen", "old/*"], pinned=frozenset({"lost", "old/x"}))
    assert policies.never_emitted(frozenset({"a"})) == ["gone", "lost"]


@pytest.mark.parametrize("reduction", ["mean", "median"])
def test_an_aggregate_without_a_dtype_has_no_ulp(reduction: str) -> None:
    with pytest.raises(UsageError, match="has no native dtype"):
        Tolerance(ulp=1, reduce=reduction, reason="r")  # type: ignore[arg-type]
