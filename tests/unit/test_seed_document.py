"""The report of two identical training runs that ended at 87.42 and 87.11 percent, as a test.

Its script set seeds and had three faults: cuDNN's benchmark switch, a scatter-style reduction, and data workers that
draw from an unseeded NumPy generator. On a CPU only the last one can make runs differ. The folder ``seed_document``
holds such a script, and the same with the faults mended.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from repositories import Repository

FOLDER = Path(__file__).with_name("seed_document")


@pytest.fixture
def scripts(repository: Repository) -> Repository:
    for script in FOLDER.glob("*.py"):
        shutil.copy(script, repository.root)
    return repository


def command(script: str, steps: int) -> tuple[str, ...]:
    return "--", sys.executable, script, "--seed", "{seed}", "--steps", str(steps)


def test_lint_names_all_three_faults_and_leaves_the_mended_script_alone(scripts: Repository) -> None:
    faulty = scripts.cli("lint", "--json", "faulty.py")
    assert faulty.code == 1
    lines = (scripts.root / "faulty.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if "# fault" in line}
    found = {finding["line"]: finding["name"] for finding in faulty.json["findings"]}
    assert len(marked) == 3
    assert sorted(found[line] for line in marked) == ["cudnn-benchmark", "scatter-reduction", "unseeded"]
    assert set(found.values()) == {"cudnn-benchmark", "scatter-reduction", "unseeded", "dataloader-workers"}
    fixed = scripts.cli("lint", "fixed.py")
    assert fixed.code == 0, fixed.out


@pytest.mark.slow
def test_repeat_finds_the_faulty_script_out_by_its_data_first(scripts: Repository) -> None:
    result = scripts.cli("repeat", "--json", *command("faulty.py", 50))
    assert result.code == 1, result.err
    assert result.json["verdict"] == "not repeatable"
    (run,) = result.json["runs"]
    first = run["metrics"]["first_divergence"]
    assert (first["metric"], first["step"]) == ("data/batch", 0)
    (file,) = run["checkpoints"]["files"]
    assert file["differences"][0]["name"] == "model.embedding.weight"
    groups = {difference["name"].partition(".")[0] for difference in file["differences"]}
    assert groups == {"model", "optimizer"}, "the generators of the main process were seeded"


@pytest.mark.slow
def test_on_a_cpu_the_workers_are_what_makes_it_differ(scripts: Repository) -> None:
    path = scripts.root / "faulty.py"
    text = path.read_text()
    path.write_text(text.replace("np.random.default_rng()", "np.random.default_rng(5)"))
    assert path.read_text() != text
    result = scripts.cli("repeat", *command("faulty.py", 50))
    assert result.code == 0, result.out


@pytest.mark.slow
def test_the_mended_script_repeats_over_2000_steps(scripts: Repository) -> None:
    result = scripts.cli("repeat", "--json", *command("fixed.py", 2000))
    assert result.code == 0, result.out
    assert (result.json["series"], result.json["points"]) == (2, 4000)
    control = result.json["control"]
    assert control["differs"]
    assert control["metrics"]["first_divergence"]["metric"] == "data/batch"


@pytest.mark.slow
def test_200_steps_trained_twice_give_checkpoints_equal_on_every_parameter(scripts: Repository) -> None:
    result = scripts.cli("repeat", "--json", "--no-control", *command("fixed.py", 200))
    assert result.code == 0, result.out
    (file,) = result.json["runs"][0]["checkpoints"]["files"]
    assert (file["path"], file["format"], file["differences"]) == ("checkpoints/step_200.pt", "torch", [])
    assert file["entries"] > 20, "parameters, the optimizer's state and the generators"
