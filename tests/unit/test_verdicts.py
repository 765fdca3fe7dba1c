"""Verdicts that must not be reached: of a run that nothing judges, of a file under another name, by what is for
information only. Each test is of a fault that a review found."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from builders import Row, stream
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository

from e2e_registry.comparison import Assessment, TestVerdict
from e2e_registry.comparison.assessment import RepeatLabel
from e2e_registry.comparison.rounding import rounded_series
from e2e_registry.config import load_settings
from e2e_registry.dtypes import DTYPES
from e2e_registry.errors import LostRunError, RefusedError, RegistryError, UsageError
from e2e_registry.operations.check import check_test
from e2e_registry.operations.machines import LocalMachine
from e2e_registry.operations.results import results_schema
from e2e_registry.operations.running import ObservedRun
from e2e_registry.registration import find_test

TEST = "tests/e2e/test_stub.py"
NATIVE = "cpu-x86_64-native-avx2"


def checked(repository: Repository, *options: str) -> Any:
    """Check the stub test and return its result; the document holds to its schema."""
    results = repository.cli("check", "--test", TEST, "--json", *options).json
    jsonschema.Draft202012Validator(results_schema()).validate(results)
    return results["tests"][0]


def add_argument(repository: Repository, source: str) -> None:
    """Add an argument to the stub's registration that is no literal."""
    test = repository.root / TEST
    test.write_text(test.read_text().replace("\n)", f"\n    {source},\n)", 1))


# ------------------------------------------------------------------------------------------------ nothing judged


def test_a_run_of_which_nothing_is_judged_is_no_match(repository: Repository) -> None:
    """Globs may observe all that is registered, which only the names of a run can tell."""
    repository.record()
    repository.write_test(metrics=["train/*"], observe=["train/l*", "train/g*", "data/*", "tokens"])
    repository.write_recipe("SCALE = 99.0")
    result = checked(repository)
    assert (result["verdict"], result["exit_code"]) == ("mismatch", 1)
    assert "nothing is judged" in result["reasons"][0]
    (*_, run) = repository.runs
    commands = [
        ("record", "--test", TEST),
        ("adopt", "--test", TEST, "--run", run),
        ("accept", run, "--yes", "--allow-other-source"),
    ]
    before = repository.standard.read_bytes()
    for command in commands:
        refused = repository.cli(*command)
        assert refused.code == 1, command
        assert "nothing is judged" in refused.err + refused.out
    assert repository.standard.read_bytes() == before


@pytest.mark.parametrize("key", ["train/los", "train/los[xyz]", "train/l*"])
def test_an_invariant_that_is_never_checked_is_a_mismatch(repository: Repository, key: str) -> None:
    """``train/l*`` stands behind a glob that decides about all it names."""
    repository.write_test(metrics=["train/*"], invariants={"train/*": {"min": 0.0}, key: {"equals": 5.0}})
    result = checked(repository)
    assert result["verdict"] == "mismatch"
    assert f"invariants[{key!r}]" in result["reasons"][0]
    assert not any("record" in step for step in result["next_steps"])  # which refuses it, too
    (run,) = repository.runs
    for command in (
        ("record", "--test", TEST),
        ("adopt", "--test", TEST, "--run", run),
        ("accept", run, "--yes", "--allow-other-source"),
    ):
        assert repository.cli(*command).code == 1, command
    compared = repository.cli("compare", run / "metrics.main.rank0.jsonl", "--against", run, "--test", TEST)
    assert compared.code == 1
    assert key in compared.out
    repository.write_test(metrics=["train/*"], invariants={"train/l*": {"min": 0.0}, "train/loss": {"min": 0.0}})
    repository.record()  # an exact name in place of a glob is meant so


def test_tolerances_and_observed_names_without_effect_are_said(repository: Repository) -> None:
    repository.write_test(observe=["speed", "memory/*"])
    add_argument(repository, "tolerances={'train/los': Tolerance(atol=1.0, reason='x')}")
    recorded = repository.cli("record", "--test", TEST, "--json").json["tests"][0]
    result = checked(repository)
    assert result["verdict"] == "match"
    for found in (recorded, result):
        assert [warning.partition(":")[0] for warning in found["warnings"]] == [
            "tolerances['train/los']",
            "observe[1] 'memory/*'",
        ]


def test_a_metric_never_emitted_is_a_mismatch_whatever_standards_there_are(repository: Repository) -> None:
    repository.record()
    moved = repository.move_standard(NATIVE)
    recipe = repository.root / "scripts/recipe.py"
    recipe.write_text(recipe.read_text().replace('recorder.log({"tokens": 10 * step}, step=step)', "pass"))
    for _ in range(2):
        result = checked(repository)
        assert (result["verdict"], result["exit_code"]) == ("mismatch", 1)
        assert "tokens: registered, but no metric of the run answers to it" in result["reasons"]
        moved.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ what is judged


def test_only_judged_values_must_be_finite_and_the_hint_leads_on(repository: Repository) -> None:
    repository.record()
    recipe = repository.root / "scripts/recipe.py"
    text = recipe.read_text()
    recipe.write_text(text.replace('"speed": 100.0 + step', '"speed": float("nan"), "other": float("inf")'))
    assert checked(repository)["verdict"] == "match"
    repository.record()
    repository.write_test(invariants={"speed": {"finite": True}})
    assert checked(repository)["verdict"] == "mismatch"
    recipe.write_text(text.replace("SCALE /", "float('nan') /"))
    repository.write_test()
    (hint,) = checked(repository)["next_steps"]
    assert hint in repository.cli("record", "--test", TEST).err
    add_argument(repository, hint.partition("say so: ")[2])
    repository.record()
    repository.write_test(invariants={"train/loss": {"min": 0.0}, "train/grad_norm": {"max": 1.0}})
    broken = {entry["metric"]: entry["what"] for entry in checked(repository)["broken_invariants"]}
    assert broken == {"train/loss": "finite", "train/grad_norm": "bounds"}
    repository.write_test(invariants={"train/loss": {"min": 0.0}})  # which NaN does not satisfy, permitted or not
    assert checked(repository)["next_steps"] == ["correct the recipe, or the invariant"]


def test_an_observed_metric_stays_unjudged_when_its_name_leaves_the_registration(repository: Repository) -> None:
    repository.record()
    repository.write_test(observe=[])
    recipe = repository.root / "scripts/recipe.py"
    recipe.write_text(recipe.read_text().replace("100.0 + step", "200.0 + step"))
    result = checked(repository)
    verdicts = {series["metric"]: series["verdict"] for series in result["comparison"]["series"]}
    assert (result["verdict"], verdicts["speed"]) == ("match", "unregistered")
    (run,) = repository.runs[-1:]
    compared = repository.cli(
        "compare", run / "metrics.main.rank0.jsonl", "--against", repository.standard, "--test", TEST
    )
    assert compared.code == 0


# ------------------------------------------------------------------------------------------------ for information


def test_a_comparison_for_information_replaces_no_verdict(repository: Repository) -> None:
    add_argument(
        repository, "tolerances={'train/loss': Tolerance(rtol=0.1, reduce='mean', skip_first=3, reason='noise')}"
    )
    repository.record()
    recipe = repository.root / "scripts/recipe.py"
    text = recipe.read_text()
    recipe.write_text(
        text.replace("        recorder.log_digest", "        assert step < 2, 'on fire'\n        recorder.log_digest")
    )
    crashed = checked(repository)
    assert (crashed["verdict"], crashed["exit_code"]) == ("failed", 4)
    assert "on fire" in crashed["log_tail"]
    recipe.write_text(text.replace("STEPS = 5", "STEPS = 2"))
    short = checked(repository)
    assert (short["verdict"], short["exit_code"]) == ("mismatch", 1)
    loss = next(series for series in short["comparison"]["series"] if series["metric"] == "train/loss")
    assert loss["missing_steps"] == {"count": 3, "first_ranges": [[2, 4]]}
    assert loss["aggregate"]["passes"] is False
    recipe.write_text(text.replace("SCALE /", "raise_ /"))
    repository.standard.write_bytes(repository.standard.read_bytes()[:-9])
    damaged = checked(repository)
    assert damaged["verdict"] == "failed"
    recipe.write_text(text)
    assert checked(repository)["exit_code"] == 6


def test_skip_first_beyond_the_standard_is_an_error_of_the_registration(repository: Repository) -> None:
    repository.record()
    add_argument(
        repository, "tolerances={'train/loss': Tolerance(rtol=0.1, reduce='mean', skip_first=5, reason='noise')}"
    )
    result = checked(repository)
    assert (result["verdict"], result["exit_code"]) == ("error", 2)
    assert "skip_first=5 leaves no step" in result["error"]
    kept = repository.standard.read_bytes()
    for command in (("record", "--test", TEST, "--runs", "1"), ("adopt", "--run", repository.runs[-1], "--test", TEST)):
        recorded = repository.cli(*command)
        assert (recorded.code, "skip_first=5 leaves no step" in recorded.err) == (2, True), recorded.err
    assert repository.standard.read_bytes() == kept


class Faltering(LocalMachine):
    """Runs a test once as this machine does; the next run is what a test makes of it."""

    def __init__(self, again: Callable[[ObservedRun], ObservedRun]) -> None:
        super().__init__()
        object.__setattr__(self, "again", again)
        object.__setattr__(self, "num_runs", 0)

    def run(self, *arguments: Any, **keywords: Any) -> ObservedRun:
        object.__setattr__(self, "num_runs", self.num_runs + 1)
        run = super().run(*arguments, **keywords)
        return self.again(run) if self.num_runs > 1 else run


def repeated(repository: Repository, again: Callable[[ObservedRun], ObservedRun]) -> Assessment:
    """Check a stub that has changed, with one repeat."""
    repository.record()
    repository.write_recipe("SCALE = 1.5")
    settings = load_settings(repository.root)
    with contextlib.chdir(repository.root):
        return check_test(find_test(settings, TEST), settings, machine=Faltering(again), repeats=1)


@pytest.mark.parametrize(
    "error",
    [RefusedError("still in use: GPU 0"), LostRunError("the task was cancelled"), UsageError("no such thing")],
)
def test_a_repeat_that_cannot_be_run_changes_no_verdict(repository: Repository, error: RegistryError) -> None:
    def again(run: ObservedRun) -> ObservedRun:
        raise error

    assessment = repeated(repository, again)
    assert (assessment.verdict, assessment.repeat) == (TestVerdict.MISMATCH, None)
    assert assessment.comparison is not None
    assert assessment.candidate is not None
    assert error.message in assessment.warnings[-1]


def test_a_repeat_on_another_platform_is_not_comparable(repository: Repository) -> None:
    assessment = repeated(repository, lambda run: dataclasses.replace(run, platform=NATIVE))
    assert assessment.verdict is TestVerdict.MISMATCH
    assert assessment.repeat is not None
    assert assessment.repeat.label is RepeatLabel.NOT_COMPARABLE
    assert NATIVE in (assessment.repeat.reason or "")


# ------------------------------------------------------------------------------------------------ platforms, standards


@pytest.mark.parametrize("keywords", [{}, {"platforms": ["cuda-*"]}])
def test_a_cuda_test_that_never_starts_cuda_is_incomparable(repository: Repository, keywords: dict[str, Any]) -> None:
    repository.write_test(profile="cuda", **keywords)
    result = checked(repository, "--allow-empty")
    assert (result["verdict"], result["exit_code"]) == ("incomparable", 3)
    assert "no GPU is recorded" in result["reasons"][0]
    assert not result["next_steps"]
    assert repository.cli("record", "--test", TEST).code == 2


def test_a_standard_under_another_platform_s_name_is_an_error_wherever_it_is_found(repository: Repository) -> None:
    repository.commit()
    repository.record()
    repository.cli("run", "--test", TEST)
    moved = repository.move_standard(NATIVE)
    moved.rename(repository.standard)
    before = repository.standard.read_bytes()
    settings = repository.root / "pyproject.toml"
    settings.write_text(settings.read_text() + '[tool.e2e_registry.platforms]\ncpu-x86_64-portable = ["ubuntu"]\n')
    (*_, run) = repository.runs
    for command in (
        ("check", "--test", TEST),
        ("record", "--test", TEST),
        ("adopt", "--test", TEST, "--run", run, "--allow-other-source"),
        ("accept", run, "--yes", "--allow-other-source"),
        ("plan", "--all"),
        ("show", TEST),
    ):
        result = repository.cli(*command)
        assert result.code == 6, (command, result)
        assert NATIVE in result.out + result.err
    assert repository.standard.read_bytes() == before


def test_a_bracket_in_a_test_s_name_is_no_pattern(repository: Repository) -> None:
    for name in ("test_x[1]", "test_x1"):
        repository.write_test(name)
        assert repository.cli("record", "--test", f"tests/e2e/{name}.py", "--runs", "1").code == 0
    result = repository.cli("check", "--test", "tests/e2e/test_x[1].py", "--json").json["tests"][0]
    assert result["verdict"] == "match"
    assert result["compared_with"].endswith("test_x[1].cpu-x86_64-portable.parquet")


# ------------------------------------------------------------------------------------------------ record, adopt, accept


def test_adopt_refuses_a_run_of_other_source_unless_told(repository: Repository) -> None:
    def adopt(*options: str) -> Any:
        return repository.cli("adopt", "--test", TEST, "--run", run, *options)

    repository.cli("run", "--test", TEST)
    (run,) = repository.runs
    repository.write_recipe("SCALE = 5.0")
    changed = adopt()
    assert (changed.code, "another version of scripts/recipe.py" in changed.err) == (2, True)
    assert "--allow-other-source" in changed.err
    repository.write_recipe()
    assert adopt().code == 0
    repository.commit()
    repository.cli("run", "--test", TEST)
    run = repository.runs[-1]
    assert adopt().code == 0
    (repository.root / "imported.py").write_text("SCALE = 5.0\n")
    changed = adopt()
    assert (changed.code, "source tree" in changed.err) == (2, True)
    assert adopt("--allow-other-source").code == 0


def test_record_says_what_failed_and_what_was_skipped(repository: Repository) -> None:
    repository.write_recipe(body="raise SystemExit(3)", name="bad.py")
    bad = repository.write_test("test_bad", script="scripts/bad.py")
    off = repository.write_test("test_off", script="scripts/bad.py", disabled="broken since torch 2.13")
    gpu = repository.write_test("test_gpu", num_gpus=64, profile="cuda")
    result = repository.cli("record", "--all", "--json", "--runs", "1")
    assert result.code == 4
    found = {test["subject"]: (test["action"], test["exit_code"]) for test in result.json["tests"]}
    assert found == {bad: ("failed", 4), gpu: ("skipped", 5), off: ("skipped", 5), TEST: ("created", 0)}
    errors = {test["subject"]: test["error"] for test in result.json["tests"]}
    assert [test for test, error in errors.items() if error is not None] == [bad]
    single = repository.cli("record", "--test", bad, "--json")
    assert (single.code, single.json["tests"][0]["exit_code"]) == (4, 4)
    assert "exited with code 3" in single.json["tests"][0]["error"]
    skipped = repository.cli("record", "--test", off)
    assert (skipped.code, "broken since torch 2.13" in skipped.err) == (5, True)
    assert repository.cli("record", "--test", gpu).code == 5
    assert not list(repository.standards.glob("test_[bog]*"))


def test_accept_of_a_platform_that_is_not_there_selects_nothing(repository: Repository) -> None:
    repository.cli("run", "--test", TEST)
    (run,) = repository.runs
    typo = repository.cli("accept", run, "--platform", "cpu-x86_64-portabel", "--yes", "--allow-other-source")
    assert typo.code == 5
    assert "it holds runs on: cpu-x86_64-portable" in typo.err


def test_rounded_values_are_warned_of_when_they_become_a_standard(repository: Repository) -> None:
    repository.write_recipe(
        body="""
        from e2e_registry import MetricRecorder
        with MetricRecorder() as recorder:
            for step in range(30):
                recorder.log({"train/loss": round(1.0 / (step + 3), 4), "train/reward": step / 64}, step=step)
        """
    )
    repository.write_test(metrics=["train/*"], observe=None)
    recorded = repository.cli("record", "--test", TEST)
    assert recorded.code == 0
    assert "warning: train/loss: each of its 30 different values is a decimal of at most 4 places" in recorded.out
    assert "train/reward:" not in recorded.out
    shutil.rmtree(repository.standards)
    for command in (("adopt", "--test", TEST, "--run"), ("accept", "--yes", "--allow-other-source")):
        taken = repository.cli(*command, repository.runs[-1])
        assert (taken.code, "warning: train/loss" in taken.out) == (0, True)
        shutil.rmtree(repository.standards)


def _rounded(values: list[float], dtype: str = "float64") -> bool:
    native, width = {"float64": (np.float64, np.uint64), "float32": (np.float32, np.uint32)}[dtype]
    patterns = np.array(values, native).view(width).tolist()
    rows = [Row("a", step, bits, DTYPES[dtype], seq=step) for step, bits in enumerate(patterns)]
    return bool(rounded_series(stream(rows), lambda metric: True))


HONEST = {
    "of a count": st.sampled_from([1, 2, 3, 7, 10, 16, 64, 80, 100, 256, 512]).flatmap(
        lambda count: st.lists(st.integers(0, count).map(lambda k: k / count), min_size=8, max_size=64)
    ),
    "learning rates": st.tuples(st.sampled_from([1e-5, 1e-4, 3e-4, 1e-3]), st.integers(8, 40)).map(
        lambda pair: [pair[0] * (pair[1] - k) / pair[1] for k in range(pair[1])]
    ),
    "few": st.lists(st.sampled_from([0.1234, 0.2345, 0.3456]), min_size=8, max_size=64),
    "measured": st.lists(st.floats(1e-3, 10.0).map(lambda x: float(np.float32(x)) / 3), min_size=8, unique=True),
}


@pytest.mark.parametrize("kind", HONEST)
@given(data=st.data())
def test_honest_values_are_not_taken_for_rounded(kind: str, data: st.DataObject) -> None:
    assert not _rounded(data.draw(HONEST[kind]))


@st.composite
def rounded_values(draw: st.DrawFn) -> list[float]:
    places = draw(st.integers(3, 5))
    numerators = draw(st.lists(st.integers(100, 10**places - 1), min_size=8, max_size=60, unique=True))
    return [n / 10**places for n in [101, *numerators]]  # 101: not all of them may happen to have fewer places


@given(rounded_values(), st.sampled_from(["float64", "float32"]))
def test_rounded_values_are_found(values: list[float], dtype: str) -> None:
    assert _rounded(values, dtype)
