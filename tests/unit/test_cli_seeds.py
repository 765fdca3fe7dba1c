"""``seeds`` through the command line, and its statistics against known answers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository, assert_golden
from scipy import stats

from e2e_registry.cli.seeds import parse_seeds
from e2e_registry.comparison.seed_statistics import Sample, SeedMetric, judge_threshold
from e2e_registry.errors import UsageError
from e2e_registry.series import SeriesKey

TEST = "tests/e2e/test_stub.py"

#: Five values whose standard deviation is 0.25, by seed; the last step of each run is what counts.
ACCURACY = """
import argparse, math
from e2e_registry import MetricRecorder
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--gain", type=float, default=0.0)
args = parser.parse_args()
OFFSETS = [0.0, -1.0, 1.0, -0.5, 0.5]
SHAKE = [0.01, -0.02, 0.0, 0.02, -0.01]
final = 87.3 + 0.25 / math.sqrt(0.625) * OFFSETS[args.seed % 5] + args.gain * (1 + SHAKE[args.seed % 5])
with MetricRecorder() as recorder:
    for step in range(4):
        recorder.log_digest("data/batch", b"batch", step=step)
        recorder.log({{"val/acc": final - (3 - step), "train/loss": 1 / (step + 1), "tokens": step}}, step=step)
        recorder.log({{"train/scale": step if step else math.nan}}, step=step)
"""
METRICS = ["data/batch", "val/acc", "train/loss"]


@pytest.fixture
def accuracy(repository: Repository) -> Repository:
    repository.write_recipe(body=ACCURACY.replace("{{", "{").replace("}}", "}"))
    repository.write_test(metrics=METRICS, observe=[])
    return repository


def seeds(repository: Repository, *options: str | Path) -> Any:
    result = repository.cli("seeds", "--json", *options)
    assert result.out, result.err
    assert result.json["exit_code"] == result.code
    return result.json


def kept(repository: Repository, number: int, *arguments: str) -> list[Path]:
    """Run a command under seeds from 0 on and return its runs; the last is seed ``number - 1``."""
    command = ("--", sys.executable, "scripts/recipe.py", "--seed", "{seed}", *arguments)
    listed = seeds(repository, "--seeds", f"0-{number - 1}", *command)["runs"]
    return [repository.root / run for run in listed[0]]


# ------------------------------------------------------------------------------------------------ runs


def test_a_spread_does_not_support_a_smaller_threshold(accuracy: Repository) -> None:
    """Report: a seed spread of 0.25 points beside a threshold of 0.2 points for calling a change an improvement."""
    result = accuracy.cli("seeds", "--test", TEST, "--metric", "val/acc", "--threshold", "0.2")
    assert result.code == 1, result.err
    assert_golden("seeds_threshold", result.out, accuracy.root)
    runs = [accuracy.root / run for run in seeds(accuracy, "--runs", *accuracy.runs)["runs"][0]]
    assert len(runs) == 5
    wide = seeds(accuracy, "--runs", *runs, "--metric", "val/acc", "--threshold", "0.5")
    assert wide["exit_code"] == 0
    assert wide["metrics"][0]["threshold"]["is_supported"]


def test_a_candidate_is_compared_seed_by_seed(accuracy: Repository) -> None:
    """The gain of 0.1 is lost in a spread of 0.25, unless each seed is compared with itself."""
    result = accuracy.cli("seeds", "--test", TEST, "--args-b", "--gain 0.1")
    assert result.code == 0, result.err
    assert_golden("seeds_candidate", result.out, accuracy.root)
    assert len(accuracy.runs) == 10
    recorded = [json.loads((run / "run.json").read_text())["recipe"] for run in accuracy.runs]
    assert [recipe["seed"] for recipe in recorded] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert recorded[1]["args"][:2] == ["--gain", "0.1"]


def test_kept_runs_are_paired_by_their_recorded_seeds(accuracy: Repository) -> None:
    baseline, candidate = kept(accuracy, 4), kept(accuracy, 4, "--gain", "0.1")
    fresh = seeds(accuracy, "--runs", *baseline, "--against", *candidate, "--metric", "val/*")
    shuffled = [candidate[at] for at in (2, 0, 3, 1)]
    again = seeds(accuracy, "--against", *shuffled, "--metric", "val/*", "--runs", *baseline)
    assert again["metrics"] == fresh["metrics"]
    assert again["seeds"] == [0, 1, 2, 3]
    assert again["changes"] == ["recipe --gain: none -> 0.1"]
    assert again["metrics"][0]["difference"]["has_evidence"]
    partial = seeds(accuracy, "--runs", *baseline, "--against", *candidate[1:], "--metric", "val/acc")
    assert partial["seeds"] == [1, 2, 3]
    assert f"{baseline[0]} has no partner" in partial["warnings"][0]
    mixed = seeds(accuracy, "--runs", *baseline[:3], candidate[3], "--metric", "val/acc")
    assert "differs from" in mixed["warnings"][0]
    assert "--gain" in mixed["warnings"][0]


def test_what_cannot_be_paired_is_refused(accuracy: Repository) -> None:
    runs = kept(accuracy, 3)
    accuracy.cli("run", "--", sys.executable, "scripts/recipe.py", "--seed", "7")
    unseeded = accuracy.runs[-1]
    for options, said in (
        (("--runs", runs[0], runs[0], runs[1]), "both of seed 0"),
        (("--runs", *runs, "--against", *runs[:2], unseeded), "does not say its seed"),
        (("--runs", *runs, "--against", runs[0]), "fewer than two seeds"),
        (("--runs", runs[0]), "one run has no spread"),
        (("--against", *runs), "--runs"),
        (("--runs", *runs, "--test", TEST), "--runs"),
        (("--runs", *runs, "--threshold", "0.2"), "--metric NAME"),
        (("--runs", *runs, "--metric", "absent"), "absent"),
        (("--runs", *runs, "--threshold", "-1", "--metric", "val/acc"), "positive"),
        (("--runs", *runs, accuracy.root / "absent"), "no such run"),
    ):
        result = accuracy.cli("seeds", *options)
        assert (result.code, said in result.err) == (2, True), (options, result.err)
    spread = seeds(accuracy, "--runs", *runs, unseeded, "--metric", "val/acc")
    assert (spread["seeds"], len(spread["metrics"][0]["baseline"]["values"])) == (None, 4)


def test_seeds_are_refused_before_anything_runs(accuracy: Repository) -> None:
    for options in (
        ("--test", TEST, "--seeds", "3"),
        ("--test", TEST, "--seeds", "1,2,1"),
        ("--test", TEST, "--seeds", "4-1"),
        ("--test", TEST, "--seeds", "0-99999"),
        ("--test", TEST, "--seeds", "a"),
        ("--test", TEST, "--seeds", "9" * 5000),
        ("--", sys.executable, "scripts/recipe.py"),
        (),
    ):
        assert accuracy.cli("seeds", *options).code == 2, options
    assert not accuracy.runs
    assert parse_seeds("0-2, 7") == [0, 1, 2, 7]
    misspelled = accuracy.cli("seeds", "--test", TEST, "--metric", "val/ac")
    assert misspelled.code == 2
    assert "the run has no metric 'val/ac'\n  did you mean 'val/acc'?" in misspelled.err
    assert len(accuracy.runs) == 1, "no further seed is trained"


def test_a_seed_that_reaches_nothing_is_a_finding(repository: Repository) -> None:
    """Report: different seeds gave identical losses for months (behaviour 28)."""
    repository.write_recipe("import argparse; p = argparse.ArgumentParser(); p.add_argument('--seed'); p.parse_args()")
    result = repository.cli("seeds", "--test", TEST, "--seeds", "0-2")
    assert result.code == 1
    assert "the seed reaches nothing" in result.out


def test_runs_that_fail_or_diverge(accuracy: Repository) -> None:
    path = accuracy.root / "scripts/recipe.py"
    text = path.read_text()
    path.write_text(text.replace("final - (3 - step)", "math.nan if args.seed == 1 else final"))
    data = seeds(accuracy, "--test", TEST, "--seeds", "0-2")
    assert "not finite" in data["left_out"]["val/acc"]
    assert [metric["metric"] for metric in data["metrics"]] == ["train/loss"], "tokens are not registered"
    path.write_text(text.replace("final = ", "assert args.seed < 2\nfinal = "))
    failed = accuracy.cli("seeds", "--test", TEST, "--seeds", "0-2")
    assert failed.code == 4
    assert "AssertionError" in failed.err


def test_a_source_that_is_edited_between_the_runs_is_told(accuracy: Repository) -> None:
    path = accuracy.root / "scripts/recipe.py"
    path.write_text(path.read_text() + "\nif args.seed == 0:\n    open('edited', 'w').close()\n")
    accuracy.commit()
    data = seeds(accuracy, "--test", TEST, "--seeds", "0-2")
    assert len(data["warnings"]) == 2
    assert all("source_tree" in warning for warning in data["warnings"])
    assert not seeds(accuracy, "--test", TEST, "--seeds", "0-2")["warnings"], "an argument that holds the seed is none"


def test_each_reduction(accuracy: Repository) -> None:
    runs = kept(accuracy, 2)
    for options, expected in (
        (("--reduce", "last"), 0.25),
        (("--reduce", "mean"), (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
        (("--reduce", "median"), (1 / 2 + 1 / 3) / 2),
        (("--reduce", "min"), 0.25),
        (("--reduce", "max"), 1.0),
        (("--reduce", "max", "--skip-first", "2"), 1 / 3),
    ):
        data = seeds(accuracy, "--runs", *runs, "--metric", "train/loss", *options)
        assert data["metrics"][0]["baseline"]["values"] == pytest.approx([expected] * 2, rel=1e-15), options
    assert "next to nothing" in data["warnings"][0], "two seeds"
    assert accuracy.cli("seeds", "--runs", *runs, "--metric", "train/loss", "--skip-first", "4").code == 2
    scale = seeds(accuracy, "--runs", *runs, "--metric", "train/scale")
    assert scale["metrics"][0]["baseline"]["values"] == [3.0, 3.0], "a NaN before the last value does not reach it"
    mean = accuracy.cli("seeds", "--runs", *runs, "--metric", "train/scale", "--reduce", "mean")
    assert (mean.code, "not finite" in mean.err) == (2, True)


def test_without_scipy_it_says_what_to_install(accuracy: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    result = accuracy.cli("seeds", "--test", TEST)
    assert result.code == 2
    assert "pip install 'scipy>=1.14'" in result.err
    assert not accuracy.runs


# ------------------------------------------------------------------------------------------------ statistics

VALUES = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=3, max_size=8)


@given(VALUES, st.data())
def test_the_interval_is_that_of_a_paired_t_test(baseline: list[float], data: st.DataObject) -> None:
    candidate = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(baseline), max_size=len(baseline)))
    metric = SeedMetric(SeriesKey("m", "main", 0), Sample(tuple(baseline)), Sample(tuple(candidate)))
    assert metric.difference is not None
    assert metric.interval is not None
    if metric.difference.sd <= 1e-6 * max(map(abs, [*baseline, *candidate, 1.0])):
        return  # SciPy itself loses the digits
    reference = stats.ttest_rel(candidate, baseline)
    bounds = reference.confidence_interval(0.95)
    assert metric.interval == pytest.approx((bounds.low, bounds.high), rel=1e-6, abs=1e-6)
    if abs(reference.pvalue - 0.05) > 1e-6:
        assert metric.has_evidence == (reference.pvalue < 0.05)


def with_sd(sd: float, count: int) -> Sample:
    """A sample of that standard deviation."""
    values = [float(at) for at in range(count)]
    scale = sd / Sample(tuple(values)).sd
    return Sample(tuple(scale * value for value in values))


def test_seeds_for_power_agree_with_published_tables() -> None:
    """Source: J. Cohen's d for paired t-tests at 5% and 80% power, as G*Power prints it."""
    for effect, pairs in ((0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)):
        judgement = judge_threshold(effect, with_sd(9.0, 5), with_sd(1.0, 5))
        assert judgement.seeds_for_power == pairs


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(2, 12))
def test_the_number_of_seeds_is_the_smallest_that_narrows_the_interval(sd: float, threshold: float, count: int) -> None:
    judgement = judge_threshold(threshold, with_sd(sd, count), None)
    assert judgement.sd == pytest.approx(sd * math.sqrt(2))

    def half(number: int) -> float:
        return float(stats.t.ppf(0.975, number - 1)) * judgement.sd / math.sqrt(number)

    needed = judgement.seeds_for_interval
    if needed is None:
        assert half(100_000) > threshold
        return
    assert half(needed) <= threshold * (1 + 1e-12)
    assert needed == 2 or half(needed - 1) > threshold * (1 - 1e-12)
    assert judgement.is_supported == (count >= needed)
    assert judgement.seeds_for_power is None or judgement.seeds_for_power >= needed - 1


def test_the_interval_of_a_standard_deviation_holds_what_it_says() -> None:
    """The chi-squared interval of five values reaches from 0.6 to 2.87 times the estimate (any table has it)."""
    low, high = with_sd(0.25, 5).sd_interval()
    assert (low / 0.25, high / 0.25) == pytest.approx((0.5991, 2.8736), abs=1e-4)


def test_a_list_of_seeds_has_an_end() -> None:
    with pytest.raises(UsageError, match="no range"):
        parse_seeds("0-999999999999")
