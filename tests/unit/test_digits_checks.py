"""The registry's promise on its real recipe: what a reviewer would want to see when one number is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from repositories import Repository

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_digits_classifier.py"
TEST = "tests/e2e/test_digits.py"
METRICS = ["data/sample_ids", "data/batch", "train/loss", "train/grad_norm", "model/parameters"]


def declare(repository: Repository, *arguments: str) -> None:
    repository.write_test(
        "test_digits",
        est_time=60,
        script="scripts/run_digits_classifier.py",
        args=["--deterministic-mode", "--steps", "12", *arguments],
        metrics=METRICS,
        observe=[],
    )


@pytest.mark.slow
def test_a_learning_rate_raised_by_a_thousandth_and_another_worker_count_are_named(repository: Repository) -> None:
    shutil.copy(SCRIPT, repository.root / "scripts")
    declare(repository, "--lr", "0.003", "--num-workers", "2")
    assert repository.cli("record", "--test", TEST).code == 0
    assert repository.cli("check", "--test", TEST).code == 0

    declare(repository, "--lr", "0.003003", "--num-workers", "2")
    raised = repository.cli("check", "--test", TEST)
    assert raised.code == 1
    assert "first divergence: train/grad_norm, step 1:" in raised.out, "step 0 trains at the same weights"
    assert "--lr" in raised.out
    assert "0.003 -> 0.003003" in raised.out

    declare(repository, "--lr", "0.003", "--num-workers", "1")
    fewer = repository.cli("check", "--test", TEST, "--json")
    assert fewer.code == 1
    (test,) = fewer.json["tests"]
    assert test["comparison"]["first_divergence"]["metric"] == "data/batch"
    failing = {entry["metric"]: entry["verdict"] for entry in test["comparison"]["series"]}
    assert failing["data/sample_ids"] == "match"
    assert failing["data/batch"] == failing["train/loss"] == "mismatch"

    declare(repository, "--lr", "0.003", "--num-workers", "2", "--seed", "1")
    assert repository.cli("check", "--test", TEST).code == 1, (
        "a different seed that matched would mean nothing is measured"
    )
