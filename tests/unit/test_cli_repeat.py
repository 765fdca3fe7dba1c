"""``repeat`` through the command line, and the bitwise comparison of checkpoints that it rests on."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repositories import Repository, assert_golden

from e2e_registry.analysis.checkpoints import compare_checkpoints, find_checkpoints
from e2e_registry.comparison.checkpoints import EntryFault, FileComparison

TEST = "tests/e2e/test_stub.py"

#: Counts its runs, so that a recipe can differ from one run to the next and its reports stay the same.
COUNTED = """
import argparse, os, pathlib
import numpy as np
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--deterministic", action="store_true")
args = parser.parse_args()
counter = pathlib.Path("count")
count = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(count + 1))
folder = pathlib.Path(os.environ["E2E_REGISTRY_RUN_DIR"], "checkpoints")
folder.mkdir()
WEIGHT = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3) + args.seed
{change}
np.savez(folder / "step_5.npz", weight=WEIGHT, step=np.int64(5))
"""


def recipe(change: str = "") -> str:
    return COUNTED.replace("{change}", change)


def repeat(repository: Repository, *options: str) -> Any:
    result = repository.cli("repeat", "--test", TEST, "--json", *options)
    assert result.out, result.err
    return result.code, result.json


# ------------------------------------------------------------------------------------------------ verdicts


def test_a_repeatable_test_with_its_control(repository: Repository) -> None:
    repository.write_recipe(recipe("SCALE = 1.0 + args.seed"))
    repository.write_test(seed=3)
    result = repository.cli("repeat", "--test", TEST)
    assert result.code == 0, result.err
    assert_golden("repeat_repeatable", result.out, repository.root)
    assert "control, seed 4" in result.err
    runs = [json.loads((run / "run.json").read_text()) for run in repository.runs]
    assert [run["recipe"]["seed"] for run in runs] == [3, 3, 4]


def test_runs_that_differ_name_the_first_metric_step_and_parameter(repository: Repository) -> None:
    change = "SCALE = 1.0 + 2.0**-40 * (count == 2); WEIGHT[1, 2] = -0.0 if count == 2 else 0.0"
    repository.write_recipe(recipe(change))
    repository.write_test(seed=3)
    result = repository.cli("repeat", "--test", TEST, "--runs", "3")
    assert result.code == 1, result.err
    assert_golden("repeat_not_repeatable", result.out, repository.root)
    assert len(repository.runs) == 3, "a control that differs would show nothing"


def test_checkpoints_alone_may_differ(repository: Repository) -> None:
    repository.write_recipe(recipe("WEIGHT[0, 1] += count"))
    code, data = repeat(repository, "--no-control")
    assert (code, data["verdict"]) == (1, "not repeatable")
    (run,) = data["runs"]
    assert run["metrics"]["verdict"] == "match"
    ((difference,),) = [file["differences"] for file in run["checkpoints"]["files"]]
    assert (difference["name"], difference["differing"], difference["index"]) == ("weight", 1, [0, 1])


def test_an_equal_control_is_a_finding(repository: Repository) -> None:
    """Report: different seeds gave identical losses for months (behaviour 28)."""
    repository.write_recipe(recipe("WEIGHT *= 0; np.savez(folder / 'rng.npz', state=np.uint32(args.seed))"))
    repository.write_test(seed=3)
    result = repository.cli("repeat", "--test", TEST)
    assert result.code == 1
    assert_golden("repeat_control_equal", result.out, repository.root)
    assert repository.cli("repeat", "--test", TEST, "--no-control").code == 0


SEEDED_DATA = """
import random, sys
from e2e_registry import MetricRecorder
seed = int(sys.argv[sys.argv.index("--seed") + 1])
random.seed(seed)
with MetricRecorder() as recorder:
    for step in range(3):
        recorder.log_digest("data/ids", [random.randrange(100) for _ in range(4)], step=step)
        recorder.log({"train/loss": 1.0 / (step + 1) + SHIFT * seed, "train/grad_norm": 2.0, "tokens": step}, step=step)
"""


def test_a_seed_that_reaches_the_data_alone_is_a_finding(repository: Repository) -> None:
    """Report: the loss was the same under both seeds, the sample ids were not, and that was "repeatable"."""
    repository.write_recipe(body=f"SHIFT = 0.0\n{SEEDED_DATA}")
    repository.write_test(metrics=["train/*", "data/ids", "tokens"], observe=[], seed=3)
    result = repository.cli("repeat", "--test", TEST)
    assert (result.code, result.out.startswith("control equal")) == (1, True)
    assert "seed 4 changes data/ids, and no judged number: all equal those of seed 3" in result.out
    repository.write_recipe(body=f"SHIFT = 1e-6\n{SEEDED_DATA}")
    code, data = repeat(repository)
    assert (code, data["control"]["idle_series"]) == (0, ["tokens", "train/grad_norm"])
    assert data["warnings"] == [
        "the same under seed 4 as under seed 3, so equal runs say little of it: tokens, train/grad_norm"
    ]
    repository.write_test(metrics=["data/ids", "tokens"], observe=["train/*"], seed=3)
    assert repeat(repository)[0] == 0, "where no float is judged, digests are what there is to move"


def test_a_test_without_a_seed_has_no_control_unless_one_is_given(repository: Repository) -> None:
    repository.write_recipe(recipe())
    code, data = repeat(repository)
    assert (code, data["control"], len(data["warnings"])) == (0, None, 1)
    assert "declares no seed=" in data["warnings"][0]
    code, data = repeat(repository, "--control-seed", "9")
    assert (code, data["control"]["seed"], data["seed"]) == (0, 9, 0)
    assert "only checkpoints differ" in data["warnings"][0]


def test_observed_metrics_are_not_judged_and_tolerances_do_not_count(repository: Repository) -> None:
    noisy = "import time; SCALE = 1.0 + 1e-9 * count"
    path = repository.write_recipe(recipe(noisy))
    path.write_text(path.read_text().replace("100.0 + step", "time.perf_counter()"))
    test = repository.root / TEST
    tolerance = 'tolerances={"train/loss": Tolerance(atol=1e-3, reason="noise")},\n)'
    test.write_text(test.read_text().replace("\n)", f"\n    {tolerance}", 1))
    _, data = repeat(repository, "--no-control")
    verdicts = {series["metric"]: series["verdict"] for series in data["runs"][0]["metrics"]["series"]}
    assert verdicts["train/loss"] == "mismatch"
    assert verdicts["speed"] == "observed"


# ------------------------------------------------------------------------------------------------ commands


def test_a_command_with_a_seed_in_it(repository: Repository) -> None:
    repository.write_recipe(recipe("SCALE = 1.0 + args.seed"))
    command = ("--json", "--", sys.executable, "scripts/recipe.py", "--seed={seed}")
    result = repository.cli("repeat", "--seed", "5", *command)
    assert result.code == 0, result.err
    assert (result.json["seed"], result.json["control"]["seed"]) == (5, 6)
    assert result.json["control"]["metrics"]["first_divergence"]["metric"] == "train/loss"
    path = repository.root / "scripts/recipe.py"
    path.write_text(path.read_text().replace("100.0 + step", "100.0 + count"))
    assert repository.cli("repeat", *command).code == 1
    assert repository.cli("repeat", "--observe", "spee*", *command).code == 0


def test_a_recipe_may_leave_checkpoints_and_log_nothing(repository: Repository) -> None:
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(b'abcd')"
    command = ("--", sys.executable, "-c", script, "{run_dir}/weights.pt")
    result = repository.cli("repeat", *command)
    assert result.code == 0, result.err
    assert "1 checkpoint, 1 entry" in result.out
    assert "no different-seed control: {seed} stands nowhere in the command" in result.out
    changing = ("--", sys.executable, "-c", script.replace("b'abcd'", "__import__('os').urandom(8)"), command[-1])
    different = repository.cli("repeat", *changing)
    assert different.code == 1
    assert "weights.pt, compared as bytes" in different.out


def test_refusals_come_before_anything_runs(repository: Repository) -> None:
    repository.write_test(seed=3)
    python = ("--", sys.executable, "scripts/recipe.py")
    for options in (
        (),
        ("--test", TEST, *python),
        ("--test", TEST, "--control-seed", "3"),
        ("--control-seed", "3", *python),
        ("--test", TEST, "--cost", "--not-there"),
        ("--test", TEST, "--cost", "'open"),
        ("--test", TEST, "--runs", "1"),
    ):
        assert repository.cli("repeat", *options).code == 2, options
    assert not repository.runs


def test_failing_runs_and_runs_that_leave_nothing(repository: Repository) -> None:
    assert repository.cli("repeat", "--", "false").code == 4
    nothing = repository.cli("repeat", "--", "true")
    assert nothing.code == 4
    assert "left no checkpoint" in nothing.err
    assert "--checkpoints names other files" in nothing.err
    assert "logged nothing" in nothing.err
    missing = repository.cli("repeat", "--test", TEST, "--checkpoints", "weights/*.pt")
    assert missing.code == 2
    assert "weights/*.pt" in missing.err
    absolute = repository.cli("repeat", "--test", TEST, "--checkpoints", "/tmp/*.pt")
    assert absolute.code == 2


def test_the_cost_is_measured_in_interleaved_pairs(repository: Repository) -> None:
    log = "print(args.deterministic, os.environ.get('MKL_CBWR'), file=open('modes', 'a'))"
    repository.write_recipe(recipe(log))
    repository.write_test(args=["--deterministic"])
    code, data = repeat(repository, "--no-control", "--cost", "--deterministic", "--cost-pairs", "2")
    assert code == 0
    modes = (repository.root / "modes").read_text().splitlines()
    on, off = "True COMPATIBLE", "False None"
    assert modes == [on, on, on, off, off, on], "two runs, then a pair in each order"
    assert len(data["cost"]["pairs"]) == 2
    assert data["cost"]["removed_arguments"] == ["--deterministic"]
    ratios = [pair["deterministic_s"] / pair["plain_s"] for pair in data["cost"]["pairs"]]
    assert data["cost"]["median_ratio"] == pytest.approx(sum(ratios) / 2)
    shown = repository.cli("repeat", "--test", TEST, "--no-control", "--cost", "", "--cost-pairs", "1")
    assert "plain mode runs without the profile's variables" in shown.out


# ------------------------------------------------------------------------------------------------ checkpoints


def compared(got: Path, want: Path) -> FileComparison:
    (file,) = compare_checkpoints({"file": got}, {"file": want}).files
    return file


DTYPES = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64", ">f4")


@settings(max_examples=60)
@given(data=st.data())
def test_any_single_bit_of_any_array_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    names = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    arrays = {}
    for name in names:
        dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
        shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
        size = int(np.prod(shape)) * dtype.itemsize
        raw = data.draw(st.binary(min_size=size, max_size=size))
        raw = bytes(byte & 1 for byte in raw) if dtype.kind == "b" else raw
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape)
    np.savez(folder / "want.npz", **arrays)
    np.savez(folder / "same.npz", **dict(reversed(arrays.items())))
    assert compared(folder / "same.npz", folder / "want.npz").is_equal
    name = data.draw(st.sampled_from(names))
    changed = arrays[name].copy()
    flat = changed.reshape(-1).view(np.uint8)
    at, bit = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(0, 0 if changed.dtype.kind == "b" else 7))
    flat[at] ^= 1 << bit
    np.savez(folder / "got.npz", **{**arrays, name: changed})
    (difference,) = compared(folder / "got.npz", folder / "want.npz").differences
    assert (difference.name, difference.fault, difference.num_differing) == (name, EntryFault.BITS, 1)
    assert difference.index == np.unravel_index(at // changed.itemsize, changed.shape)


def torch_state() -> dict[str, Any]:
    """What training saves: model, optimizer, generators, and values that ``torch.equal`` is wrong about."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    special = {
        "nan": torch.tensor([float("nan"), 1.0]),
        "zero": torch.tensor(0.0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "eight": torch.ones(2).to(torch.float8_e4m3fn),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "sparse": torch.eye(2).to_sparse(),
    }
    generators = {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(0).get_state(), "python": (3, (1, 2))}
    nested = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": generators}
    return {**nested, "special": special, "step": 7, "loss": float("nan"), "names": []}


def test_torch_checkpoints_are_compared_by_raw_bytes(tmp_path: Path) -> None:
    import torch

    def saved(name: str, **changes: Any) -> Path:
        state = torch_state()
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = state
            for key in parents:
                target = target[int(key) if key.isdigit() else key]
            if value is None:
                del target[last]
            else:
                target[last] = value
        torch.save(state, tmp_path / name)
        return tmp_path / name

    want = saved("want.pt")
    same = compared(saved("same.pt"), want)
    assert (same.is_equal, same.format, same.groups["model"], same.groups["step"]) == (True, "torch", (0, 2), (0, 1))
    assert same.num_entries > 25
    payload = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    numpy_state = np.random.RandomState(1).get_state()
    cases = [
        ({"special__nan": payload}, "special.nan", EntryFault.BITS),
        ({"special__zero": torch.tensor(-0.0)}, "special.zero", EntryFault.BITS),
        ({"special__half": torch.ones(2)}, "special.half", EntryFault.DTYPE),
        ({"special__eight": torch.zeros(2).to(torch.float8_e4m3fn)}, "special.eight", EntryFault.BITS),
        ({"special__turned": torch.arange(6.0).reshape(3, 2)}, "special.turned", EntryFault.BITS),
        ({"special__turned": torch.arange(6.0).reshape(2, 3)}, "special.turned", EntryFault.SHAPE),
        ({"special__sparse": 2 * torch.eye(2).to_sparse()}, "special.sparse.values", EntryFault.BITS),
        ({"model__bias": None}, "model.bias", EntryFault.ONLY_WANT),
        ({"model__scale": torch.ones(1)}, "model.scale", EntryFault.ONLY_GOT),
        ({"optimizer__state__0__exp_avg": torch.zeros(2, 3)}, "optimizer.state.0.exp_avg", EntryFault.BITS),
        ({"rng__numpy": numpy_state}, "rng.numpy.1", EntryFault.BITS),
        ({"rng__python": (3, (1, 3))}, "rng.python.1", EntryFault.BITS),
        ({"step": 7.0}, "step", EntryFault.DTYPE),
        ({"loss": 1.0}, "loss", EntryFault.BITS),
        ({"names": None}, "names", EntryFault.ONLY_WANT),
    ]
    for changes, name, fault in cases:
        found = [
            (difference.name, difference.fault) for difference in compared(saved("got.pt", **changes), want).differences
        ]
        assert found == [(name, fault)], changes
    plain = {key: value for key, value in torch_state().items() if key != "special"}
    torch.save(plain, tmp_path / "new.pt")
    torch.save(plain, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert compared(tmp_path / "old.pt", tmp_path / "new.pt").is_equal


class Executed:
    """Runs code when it is unpickled by anything that runs what it reads."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    import torch

    marker = tmp_path / "executed"
    torch.save({"weight": torch.ones(2), "object": Executed(marker)}, tmp_path / "want.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Executed(marker)))
    np.savez(tmp_path / "objects.npz", array=np.array([Executed(marker)], dtype=object))
    names = ("want.pt", "plain.pt", "objects.npz")
    for name in names:
        same = compared(tmp_path / name, tmp_path / name)
        assert (same.format, same.is_equal, same.note) == ("bytes", True, None)
    different = compared(tmp_path / "want.pt", tmp_path / "plain.pt")
    assert not different.is_equal
    assert "weights_only=True" in (different.note or "")
    assert not marker.exists()


def test_safetensors_and_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"weight": torch.ones(2, 2, dtype=torch.bfloat16), "bias": torch.zeros(0)}
    save_file(tensors, tmp_path / "want.safetensors", metadata={"time": "1"})
    save_file(tensors, tmp_path / "same.safetensors", metadata={"time": "2"})
    assert compared(tmp_path / "same.safetensors", tmp_path / "want.safetensors").is_equal
    save_file({**tensors, "weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, tmp_path / "got.safetensors")
    (difference,) = compared(tmp_path / "got.safetensors", tmp_path / "want.safetensors").differences
    assert (difference.name, difference.num_differing, difference.want) == ("weight", 4, "bfloat16 [2, 2]")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    as_bytes = compared(tmp_path / "got.safetensors", tmp_path / "want.safetensors")
    assert as_bytes.format == "bytes"
    assert "not installed" in (as_bytes.note or "")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("a")
    assert compared(tmp_path / "empty", tmp_path / "empty").is_equal
    assert not compared(tmp_path / "empty", tmp_path / "text").is_equal


def test_which_files_are_checkpoints(tmp_path: Path) -> None:
    names = ["checkpoints/a/step_10/x.bin", "checkpoints/a/step_9/x.bin", "deep/er/model.pt", "run.json", "output.log"]
    for name in [*names, "metrics.main.rank0.jsonl", "checkpoints/.x.1.tmp", "notes.txt", "last.safetensors"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = list(find_checkpoints(tmp_path))
    assert found == [names[1], names[0], "deep/er/model.pt", "last.safetensors"]
    assert list(find_checkpoints(tmp_path, ["*"])) == ["last.safetensors", "notes.txt"]


def test_a_torch_file_without_torch_is_a_usage_error(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.save({"weight": torch.ones(1)}, repository.root / "made.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = repository.cli("repeat", "--", "cp", "made.pt", "{run_dir}/made.pt")
    assert result.code == 2
    assert "torch is not installed" in result.err
    assert "e2e-registry[recipes]" in result.err
