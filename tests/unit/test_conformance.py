"""Golden files of a public project, read as runs: relations that are known to hold among them must be found.

The files lie beside the project, not in it, since they are not ours to copy: a fresh clone reads made-up ones of the
same layout alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repositories import Repository

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "miles_standards"

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the real golden files are no part of this repository, and not at {DATA}"
)


def as_run(name: str, folder: Path, data: Path = DATA) -> Path:
    """Write one golden file as the plain lines that a recipe would have written."""
    (source,) = data.glob(f"*__{name}.json")
    metrics = json.loads(source.read_text())["metrics"]
    path = folder / f"{name}.jsonl"
    points = [(step, metric, value) for metric, series in metrics.items() for step, value in series]
    with path.open("w") as file:
        for step, metric, value in sorted(points, key=lambda point: (point[0], point[1])):
            file.write(json.dumps({"step_key": "step_of_line", "step_of_line": step, metric: value}) + "\n")
    return path


def test_what_holds_among_made_up_files_of_the_layout_is_found(repository: Repository, tmp_path: Path) -> None:
    def golden(name: str, points: int, loss: float) -> Path:
        metrics = {
            "rollout/reward/raw_mean": [[step, 0.25 + step / 7] for step in range(points)],
            "rollout/reward/raw_num_samples": [[step, 64.0] for step in range(points)],
            "train/loss": [[step, loss / (step + 1)] for step in range(points)],
        }
        content = {"meta": {"commit": "0" * 40, "source": "test_made_up.py"}, "metrics": metrics}
        (tmp_path / f"test_made_up__{name}.json").write_text(json.dumps(content))
        return as_run(name, tmp_path, tmp_path)

    standard, same, longer = golden("a", 3, 0.1), golden("b", 3, 0.1), golden("c", 4, 0.1)
    changed = golden("d", 3, 0.1000001)
    assert repository.cli("compare", same, "--against", standard).code == 0
    extra = repository.cli("compare", longer, "--against", standard, "--json")
    assert extra.code == 1
    assert [entry["extra_steps"]["count"] for entry in extra.json["comparison"]["series"]] == [1, 1, 1]
    moved = repository.cli("compare", changed, "--against", standard, "--json")
    assert moved.code == 1
    differing = {entry["metric"]: entry["differing"] for entry in moved.json["comparison"]["series"]}
    assert differing == {"rollout/reward/raw_mean": 0, "rollout/reward/raw_num_samples": 0, "train/loss": 3}


@needs_data
def test_every_file_is_read_and_equals_itself(repository: Repository, tmp_path: Path) -> None:
    names = sorted(path.stem.split("__")[1] for path in DATA.glob("*.json"))
    assert len(names) == 18
    for name in names:
        run = as_run(name, tmp_path)
        result = repository.cli("compare", run, "--against", run)
        assert result.code == 0, f"{name}: {result.out}{result.err}"


@needs_data
def test_a_shorter_standard_does_not_pass_a_longer_run(repository: Repository, tmp_path: Path) -> None:
    """All common points are equal, 3 points against 4: extra steps fail (behaviour 5)."""
    three, four = as_run("18e59aeb", tmp_path), as_run("efc906a8", tmp_path)
    result = repository.cli("compare", four, "--against", three, "--json")
    assert result.code == 1
    series = result.json["comparison"]["series"]
    assert sum(entry["failing"] for entry in series) == 0
    assert any(entry["extra_steps"]["count"] or entry["missing_steps"]["count"] for entry in series)


@needs_data
def test_one_recording_under_two_names_is_equal(repository: Repository, tmp_path: Path) -> None:
    first, second = as_run("0f442bb2", tmp_path), as_run("5356569f", tmp_path)
    assert repository.cli("compare", first, "--against", second).code == 0


@needs_data
def test_a_real_change_names_what_moved_and_what_did_not(repository: Repository, tmp_path: Path) -> None:
    """The standard before and after a change of the optimizer step: rollouts and old log-probs are identical."""
    before, after = as_run("1bb1e703", tmp_path), as_run("5f9156bb", tmp_path)
    result = repository.cli("compare", after, "--against", before, "--json")
    assert result.code == 1
    series = {entry["metric"]: entry for entry in result.json["comparison"]["series"] if entry["presence"] == "both"}
    assert series["train/log_prob_old_idx_0"]["differing"] == 0
    equal = sum(entry["points"] - entry["differing"] for entry in series.values())
    assert equal == 6, "of 26: the old log-probs and the number of samples"
