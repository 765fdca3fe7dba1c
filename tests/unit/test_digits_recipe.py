"""The digits recipe as a process: it repeats, it learns, and a change of its data shows in its data first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e_registry.comparison import Comparison, Verdict, check_invariants, compare
from e2e_registry.config import load_settings
from e2e_registry.determinism.variables import child_environment, pin_differences
from e2e_registry.recording import read_run
from e2e_registry.registration import Registration, read_registration
from e2e_registry.standard import Standard, StandardMetadata, write_standard

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "scripts/run_digits_classifier.py"
TEST = PROJECT / "tests/e2e/short/test_digits_classifier_1xCPU.py"

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def registration() -> Registration:
    return read_registration(TEST, load_settings(TEST))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, registration: Registration) -> Run:
    """Runs the recipe under its profile, as registered and with further arguments; the same arguments only once."""
    kept: dict[tuple[str, ...], Path] = {}

    def run(*args: str, again: bool = False) -> Path:
        if again or args not in kept:
            kept[args] = tmp_path_factory.mktemp("run")
            launch([*registration.args, *args], registration, E2E_REGISTRY_RUN_DIR=str(kept[args]))
        return kept[args]

    return run


def launch(args: list[str], registration: Registration, cwd: Path = PROJECT, **variables: str) -> str:
    child = child_environment(
        registration.profile, caller=dict(os.environ), registration=registration.env, python=sys.executable
    )
    environment = {**child.variables, "PYTHONPATH": str(PROJECT), **variables}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Parts of the model whose gradients are logged apart.
GROUPS = 11
SHORT = ("--steps", "6", "--batch-size", "16", "--digest-every", "3", "--eval-every", "4")


def compared(got: Path, want: Path, registration: Registration) -> Comparison:
    return compare(read_run(got).batches(), read_run(want).batches(), policies=registration.policies())


def failing(comparison: Comparison) -> dict[str, int]:
    """Failing metrics and their first bad steps, in the order in which they were emitted."""
    assert all(result.first is not None for result in comparison.failing)
    return {result.key.metric: result.first.step for result in comparison.failing if result.first}


def test_it_repeats_bit_for_bit_under_the_pins_of_its_profile(run: Run, registration: Registration) -> None:
    first = run(*SHORT)
    second = run(*SHORT, again=True)
    assert compared(second, first, registration).verdict is Verdict.MATCH
    recording = read_run(first)
    policies = registration.policies()
    assert all(policies.policy(metric).is_judged for metric in recording.metrics)
    assert not policies.never_emitted(frozenset(recording.metrics))
    state = recording.writer_states["main", 0]
    assert pin_differences(registration.profile, state) == []
    assert state is not None
    assert state["determinism"]["torch"]["deterministic_algorithms"] is True
    assert state["determinism"]["torch"]["warn_only"] is False


def test_digests_stand_before_what_they_influence(run: Run) -> None:
    lines = (run(*SHORT) / "metrics.main.rank0.jsonl").read_text().splitlines()[1:]
    emitted = [(entry["step"], sorted(metric_names(entry))) for entry in map(json.loads, lines)]
    train, evaluation = ["train/grad_norm", "train/loss"], ["eval/accuracy", "eval/loss"]
    groups = [name for name in emitted[2][1] if name.startswith("train/grad_norm/")]
    assert len(groups) == GROUPS
    with_groups = sorted([*train, *groups])
    block = [["data/sample_ids"], ["data/batch"]]
    assert emitted == [
        *[(0, names) for names in block],
        *[(0, with_groups), (1, train), (2, train)],
        *[(3, names) for names in block],
        *[(3, with_groups), (3, evaluation), (4, train), (5, train), (5, evaluation)],
        (5, ["model/parameters"]),
    ]


def metric_names(entry: dict[str, Any]) -> list[str]:
    return [name for group, values in entry.items() if group not in ("step", "time_ns") for name in values]


def test_another_number_of_workers_shows_in_the_augmented_batches_first(run: Run, registration: Registration) -> None:
    for workers in ("0", "1"):
        found = failing(compared(run(*SHORT, "--num-workers", workers), run(*SHORT), registration))
        assert next(iter(found.items())) == ("data/batch", 0)
        assert "data/sample_ids" not in found  # the order of samples is the main process's
        assert found.keys() >= {"train/loss", "train/grad_norm", "model/parameters"}


@pytest.mark.slow
def test_another_seed_and_another_learning_rate_show_where_they_act(run: Run, registration: Registration) -> None:
    seed = failing(compared(run(*SHORT, "--seed", "1"), run(*SHORT), registration))
    assert next(iter(seed.items())) == ("data/sample_ids", 0)
    lr = failing(compared(run(*SHORT, "--lr", "0.003003"), run(*SHORT), registration))
    assert not {"data/sample_ids", "data/batch"} & lr.keys()
    assert lr["train/loss"] == 1  # the first loss is computed before the first update


@pytest.mark.slow
def test_it_runs_alone_with_no_arguments_and_no_registry(registration: Registration, tmp_path: Path) -> None:
    printed = launch([], registration, cwd=tmp_path, E2E_REGISTRY_RUN_DIR="")
    shown = re.findall(r"step (\d+)/200 .*eval/accuracy (0\.\d+)", printed)
    assert [int(step) for step, _ in shown] == [50, 100, 150, 200]
    assert float(shown[-1][1]) > 0.93
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_its_standard_is_small_and_its_invariants_hold(run: Run, registration: Registration, tmp_path: Path) -> None:
    recording = read_run(run())
    assert check_invariants(recording.batches(), registration.invariant) == []
    policies = {metric: {"kind": "strict"} for metric in recording.metrics}
    metadata = StandardMetadata(test=registration.test_id, platform="cpu-x86_64-portable", policies=policies)
    path = tmp_path / "standard.parquet"
    write_standard(path, recording.batches(), metadata)
    assert path.stat().st_size < 16_000
    # 20 digests of each kind and norms of each group, two numbers a step, two at each of four evaluations, the weights.
    assert Standard(path).num_points == (2 + GROUPS) * 20 + 2 * 200 + 2 * 4 + 1
