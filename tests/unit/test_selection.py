"""Which tests a command works on: suites, labels, nightly and partitions, through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository

from e2e_registry.cli.app import main
from e2e_registry.config import load_settings
from e2e_registry.errors import UsageError
from e2e_registry.operations.partition import Partition, partition
from e2e_registry.registration import Registration, read_registration


def listed(repository: Repository, *options: str) -> list[str]:
    result = repository.cli("list", "--json", *options)
    assert result.code == 0, result.err
    return [entry["test"].removeprefix("tests/e2e/test_").removesuffix(".py") for entry in result.json["tests"]]


@pytest.fixture
def labelled(repository: Repository) -> Repository:
    (repository.root / "tests/e2e/test_stub.py").unlink()
    repository.write_test("test_always")
    repository.write_test("test_sft", labels=["sft"])
    repository.write_test("test_both", labels=["sft", "diffusion model"])
    repository.write_test("test_other", suite="other", labels=["rl"])
    return repository


def test_labels_add_to_the_tests_that_have_none(labelled: Repository) -> None:
    stub = ("--suite", "stub")
    assert listed(labelled, *stub) == ["always", "both", "sft"]
    assert listed(labelled, *stub, "--labels", "") == ["always"]
    assert listed(labelled, *stub, "--labels", "sft") == ["always", "both", "sft"]
    assert listed(labelled, *stub, "--labels", "run-ci-rl") == ["always"]
    assert listed(labelled, "--labels", "run-ci-rl run-ci-sft") == ["always", "both", "other", "sft"]
    assert listed(labelled, "--labels", "rl", "--labels", "sft") == ["always", "both", "other", "sft"]
    array = '["bug", "run-ci-diffusion model", "needs; rm -rf /"]'
    assert listed(labelled, "--labels", array) == ["always", "both"]
    assert listed(labelled, "--labels", '["bug"]') == ["always"]
    assert listed(labelled, "--labels", '["run-ci-all"]') == ["always", "both", "other", "sft"]
    assert listed(labelled, "--labels", "rl", "--match-all-labels") == ["always", "both", "other", "sft"]


def test_a_test_that_is_named_twice_is_selected_once(labelled: Repository) -> None:
    name = labelled.write_test("test_idle", disabled="for now")
    named = labelled.cli("check", "--json", "--test", name, "--test", f"./{name}", "--test", labelled.root / name)
    assert [test["subject"] for test in named.json["tests"]] == [name]


@pytest.mark.parametrize(
    ("options", "place", "hint"),
    [
        (["--suite", "stab"], "--suite: there is no suite 'stab'", "did you mean 'stub'?"),
        (["--all", "--labels", "run-ci-sftt"], "--labels: there is no label 'run-ci-sftt'", "did you mean 'sft'?"),
        (["--all", "--labels", '["run-ci-x"]'], "--labels: there is no label 'run-ci-x'", "known: "),
        (["--all", "--labels", "bug"], "--labels: there is no label 'bug'", "known: "),
        (["--all", "--labels", "[1]"], "--labels: not an array of strings", "such as"),
        (["--all", "--labels", "[sft"], "--labels: not a JSON array", "such as"),
        (["--all", "--labels", "[" * 100_000], "--labels: not a JSON array: it is nested too deeply", "such as"),
        (["--all", "--partition", "3/2"], "--partition: '3/2' is no partition", "such as 2/4"),
        (["--all", "--partition", "0/2"], "--partition: '0/2' is no partition", "such as 2/4"),
        (["--test", "tests/e2e/test_sft.py", "--labels", "sft"], "--test names its tests already", ""),
        (["--all", "--suite", "stub"], "say what to work on", ""),
    ],
)
def test_what_cannot_be_selected_is_refused_with_its_place(
    labelled: Repository, options: list[str], place: str, hint: str
) -> None:
    for command in (["check"], ["record", "--list-only"]):
        refused = labelled.cli(*command, *options)
        assert refused.code == 2, refused.out
        assert place in refused.err
        assert hint in refused.err
        assert not (labelled.root / ".e2e_runs").exists()


def test_a_file_without_a_registration_and_an_unlisted_label_or_suite_are_errors(labelled: Repository) -> None:
    (labelled.root / "tests/e2e/test_forgotten.py").write_text("def test_x(): pass\n")
    (labelled.root / "pyproject.toml").write_text('[tool.e2e_registry]\nsuites = ["stub"]\nlabels = ["sft"]\n')
    refused = labelled.cli("check", "--suite", "stub")
    assert refused.code == 2
    assert "tests/e2e/test_forgotten.py" in refused.err
    assert "tests/e2e/test_both.py:10:labels[1]: unknown label 'diffusion model'" in refused.err
    assert "tests/e2e/test_other.py:5:suite: unknown suite 'other'" in refused.err


def test_the_partitions_of_a_check_hold_every_test_once(labelled: Repository) -> None:
    for count in (1, 2, 3):
        parts = [listed(labelled, "--partition", f"{index}/{count}") for index in range(1, count + 1)]
        assert sorted(name for part in parts for name in part) == ["always", "both", "other", "sft"]
    empty = labelled.cli("check", "--all", "--partition", "9/9")
    assert (empty.code, "partition 9/9 is empty" in empty.err) == (5, True)
    results = labelled.root / ".e2e_runs/results.json"
    assert json.loads(results.read_text())["exit_code"] == 5
    assert labelled.cli("check", "--all", "--partition", "9/9", "--allow-empty").code == 0
    found = json.loads(results.read_text())
    assert (found["status"], found["exit_code"], found["partition"], found["tests"]) == ("complete", 0, "9/9", [])


def test_outside_a_repository_nothing_is_written_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--all"]) == 5
    said = f"of {tmp_path}, for want of settings: run it in the repository, or e2e-registry init"
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Registration:
    root = tmp_path_factory.mktemp("repository")
    (root / "scripts").mkdir()
    repository = Repository(root)
    return read_registration(root / repository.write_test(), load_settings(root))


def make_tests(template: Registration, times: list[float]) -> list[Registration]:
    return [replace(template, test_id=f"tests/e2e/test_{n:03}.py", est_time=t) for n, t in enumerate(times)]


def test_more_machines_than_tests_cost_nothing(labelled: Repository) -> None:
    everything = listed(labelled)
    for count in (len(everything) + 1, 10**12):
        parts = [listed(labelled, "--partition", f"{index}/{count}") for index in range(1, len(everything) + 1)]
        assert parts == [
            listed(labelled, "--partition", f"{index}/{len(everything)}") for index in range(1, len(everything) + 1)
        ]
        assert labelled.cli("list", "--partition", f"{count}/{count}").code == 5
    for text in ("1/" + "9" * 5000, "9" * 5000 + "/1", f"1/{10**18}"):
        refused = labelled.cli("check", "--all", "--partition", text)
        assert (refused.code, "is no partition" in refused.err, len(refused.err) < 300) == (2, True, True)


def check_partitions(tests: list[Registration], count: int) -> None:
    parts = partition(tests, count)
    assert len(parts) == count
    assert sorted(test.test_id for part in parts for test in part) == sorted(test.test_id for test in tests)
    loads = sorted(sum(test.est_time for test in part) for part in parts)
    longest = max((test.est_time for test in tests), default=0.0)
    assert loads[-1] - loads[0] <= longest * (1 + 1e-9)
    shuffled = partition(tests[::-1], count)
    assert [{test.test_id for test in part} for part in parts] == [{test.test_id for test in part} for part in shuffled]
    order = {test.test_id: at for at, test in enumerate(tests)}
    assert all(order[a.test_id] < order[b.test_id] for part in parts for a, b in pairwise(part))


def test_three_hundred_tests_in_one_to_sixteen_partitions(template: Registration) -> None:
    tests = make_tests(template, [1 + (n * 7919) % 97 + n % 3 / 10 for n in range(300)])
    for count in range(1, 17):
        check_partitions(tests, count)


def test_the_longest_go_first_and_ties_by_id(template: Registration) -> None:
    tests = make_tests(template, [1, 1, 1, 1, 4, 4])
    names = [[test.test_id[-6:-3] for test in part] for part in partition(tests, 3)]
    assert names == [["004"], ["005"], ["000", "001", "002", "003"]]


def test_a_disabled_test_takes_no_time(template: Registration) -> None:
    disabled, *others = make_tests(template, [10, 4, 4])
    parts = partition([replace(disabled, disabled="for now"), *others], 2)
    assert [[test.test_id[-6:-3] for test in part] for part in parts] == [["000", "001"], ["002"]]


@given(
    times=st.lists(st.sampled_from([1.0, 2.5]) | st.floats(0.001, 1e6), max_size=40),
    count=st.integers(1, 16),
)
def test_any_suite_is_partitioned(template: Registration, times: list[float], count: int) -> None:
    check_partitions(make_tests(template, times), count)


@given(text=st.text("0123456789/ -+٣x", max_size=6))
def test_a_partition_is_read_or_refused(text: str) -> None:
    try:
        part = Partition.parse(text)
    except UsageError:
        return
    assert 1 <= part.index <= part.count
    assert Partition.parse(str(part)) == part
