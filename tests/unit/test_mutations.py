"""Mutation tests of the comparer on real recordings: files that recorders wrote, changed in one place at a time.

Report: a gate was vacuous for six months, because it asked for a share of close points (behaviour 1). So the gate is
tested as such: thousands of single changes, none of which may pass, and changes that mean nothing, all of which must.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e_registry import MetricRecorder
from e2e_registry.comparison import Verdict, compare
from e2e_registry.dtypes import DTYPES, decode_bits, encode_value
from e2e_registry.errors import InvalidRunError, RecordingError
from e2e_registry.recording import read_run
from e2e_registry.tolerance import Policies

Line = dict[str, Any]
Files = dict[str, list[Line]]

GROUPS = ("float64", "float32", "float16", "int64", "uint64", "bool")
METRICS = ["train/loss", "train/grad_norm", "train/scale", "tokens", "seen", "is_warm", "data/batch", "reward"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three writers that holds every dtype, zeros of both signs, NaNs and infinities."""
    path = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    for rank in range(2):
        with MetricRecorder(role="train", rank=rank, run_dir=path) as recorder:
            for step in range(12):
                loss = np.float32(rng.standard_normal()) if step % 4 else np.float32(-0.0 if rank else 0.0)
                norm = np.float32("nan") if step == 0 else np.float32(rng.random())
                recorder.log_digest("data/batch", rng.bytes(8), step=step)
                recorder.log(
                    {"train/loss": loss, "train/grad_norm": norm, "train/scale": np.float16(2.0**step)}, step=step
                )
                recorder.log({"tokens": np.uint64(2**63 + step), "seen": 10 * step, "is_warm": step > 3}, step=step)
    with MetricRecorder(role="rollout", run_dir=path) as recorder:
        for step in range(0, 12, 3):
            for _ in range(2):
                recorder.log({"reward": rng.standard_normal() if step else float("inf")}, step=step)
    return path


def load(path: Path) -> Files:
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in path.glob("*.jsonl")}


def store(files: Files, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, lines in files.items():
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def values(files: Files) -> Iterator[tuple[str, int, str, str, Any]]:
    """Yield (file, line number, group, metric, value) of every logged value."""
    for name, lines in files.items():
        for number, line in enumerate(lines[1:], 1):
            for group in (*GROUPS, "bits", "digest"):
                for metric, value in line.get(group, {}).items():
                    yield name, number, group, metric, value


def pattern(group: str, value: Any) -> tuple[str, int]:
    """Return dtype and bits of a logged value."""
    if group == "bits":
        return value[0], int(value[1], 16)
    return group, encode_value(DTYPES[group], value)


def put(line: Line, group: str, metric: str, dtype: str, bits: int) -> None:
    """Replace a value by raw bits of a dtype."""
    del line[group][metric]
    if not line[group]:
        del line[group]
    width = max(DTYPES[dtype].width // 4, 1)
    line.setdefault("bits", {})[metric] = [dtype, f"{bits:0{width}x}"]


# ------------------------------------------------------------------------------------------- single changes


def flip_bit(files: Files, rng: random.Random) -> None:
    name, number, group, metric, value = rng.choice([v for v in values(files) if v[2] != "digest"])
    dtype, bits = pattern(group, value)
    put(files[name][number], group, metric, dtype, bits ^ (1 << rng.randrange(DTYPES[dtype].width)))


def change_digest(files: Files, rng: random.Random) -> None:
    name, number, _, metric, value = rng.choice([v for v in values(files) if v[2] == "digest"])
    at = rng.randrange(len(value))
    files[name][number]["digest"][metric] = value[:at] + ("0" if value[at] != "0" else "1") + value[at + 1 :]


def drop_value(files: Files, rng: random.Random) -> None:
    name, number, group, metric, _ = rng.choice(list(values(files)))
    del files[name][number][group][metric]


def drop_line(files: Files, rng: random.Random) -> None:
    lines = files[rng.choice(sorted(files))]
    del lines[rng.randrange(1, len(lines))]


def double_line(files: Files, rng: random.Random) -> None:
    lines = files[rng.choice(sorted(files))]
    at = rng.randrange(1, len(lines))
    lines.insert(at, lines[at])


def relabel_step(files: Files, rng: random.Random) -> None:
    lines = files[rng.choice(sorted(files))]
    lines[rng.randrange(1, len(lines))]["step"] += rng.choice([-1, 1, 1000])


def renamed(metric: str, files: Files, chosen: list[str]) -> None:
    for name in chosen:
        for line in files[name][1:]:
            for group in (*GROUPS, "bits", "digest"):
                if metric in line.get(group, {}):
                    line[group][metric + "_"] = line[group].pop(metric)


def rename_metric(files: Files, rng: random.Random) -> None:
    renamed(rng.choice(METRICS), files, sorted(files))


def drop_metric(files: Files, rng: random.Random) -> None:
    metric = rng.choice(METRICS)
    for name, number, group, found, _ in list(values(files)):
        if found == metric:
            del files[name][number][group][metric]


def rename_writer(files: Files, rng: random.Random) -> None:
    name = rng.choice(sorted(files))
    lines = files.pop(name)
    header = lines[0]
    role, rank = rng.choice([("other", header["rank"]), (header["role"], header["rank"] + 5)])
    lines[0] = {**header, "role": role, "rank": rank}
    files[f"metrics.{role}.rank{rank}.jsonl"] = lines


def drop_writer(files: Files, rng: random.Random) -> None:
    del files[rng.choice(sorted(files))]


def change_dtype(files: Files, rng: random.Random) -> None:
    """Keep the number, where the other dtype has it, and change its type alone."""
    name, number, group, metric, value = rng.choice([v for v in values(files) if v[2] != "digest"])
    dtype, bits = pattern(group, value)
    other = rng.choice([d for d in DTYPES.values() if d.name not in (dtype, "digest")])
    number_itself = decode_bits(DTYPES[dtype], bits)
    try:
        as_other = encode_value(other, type(decode_bits(other, 0))(number_itself))
    except (RecordingError, OverflowError, ValueError):  # the other dtype has no such number
        as_other = bits & ((1 << other.width) - 1)
    put(files[name][number], group, metric, other.name, as_other)


def flip_sign_of_zero(files: Files, rng: random.Random) -> None:
    zeros = [v for v in values(files) if v[2] == "float32" and v[4] == 0]
    name, number, group, metric, value = rng.choice(zeros)
    dtype, bits = pattern(group, value)
    put(files[name][number], group, metric, dtype, bits ^ DTYPES[dtype].sign_bit)


def put_nan_in(files: Files, rng: random.Random) -> None:
    floats = [v for v in values(files) if v[2] in ("float64", "float32", "float16")]
    name, number, group, metric, _ = rng.choice(floats)
    put(files[name][number], group, metric, group, DTYPES[group].infinity_bits + 1)


def change_nan(files: Files, rng: random.Random) -> None:
    """Take a NaN out, or change its payload."""
    nans = [v for v in values(files) if v[3] == "train/grad_norm" and v[2] == "bits"]
    name, number, group, metric, value = rng.choice(nans)
    dtype, bits = pattern(group, value)
    changed = rng.choice([0, DTYPES[dtype].infinity_bits, bits ^ (1 << rng.randrange(DTYPES[dtype].mantissa - 1))])
    put(files[name][number], group, metric, dtype, changed)


MUTATIONS: list[Callable[[Files, random.Random], None]] = [
    *(flip_bit, change_digest, drop_value, drop_line, double_line, relabel_step, rename_metric, drop_metric),
    *(rename_writer, drop_writer, change_dtype, flip_sign_of_zero, put_nan_in, change_nan),
]


def is_match(got: Path, want: Path, policies: Policies) -> bool:
    try:
        comparison = compare(read_run(got).batches(), read_run(want).batches(), policies=policies)
    except InvalidRunError:
        return False
    assert comparison.num_judged >= len(METRICS)
    return comparison.verdict is Verdict.MATCH


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_no_single_change_of_a_recording_is_judged_a_match(
    recording: Path, tmp_path: Path, mutation: Callable[[Files, random.Random], None]
) -> None:
    rng = random.Random(mutation.__name__)
    policies = Policies(metrics=METRICS, pinned=frozenset(METRICS))
    whole = json.dumps(load(recording))
    for _ in range(250):
        files: Files = json.loads(whole)
        mutation(files, rng)
        store(files, tmp_path / "mutant")
        assert not is_match(tmp_path / "mutant", recording, policies)
        assert not is_match(recording, tmp_path / "mutant", policies)


def test_changes_that_mean_nothing_always_match(recording: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    policies = Policies(metrics=METRICS, pinned=frozenset(METRICS))
    whole = json.dumps(load(recording))
    for _ in range(100):
        files: Files = json.loads(whole)
        for lines in files.values():
            shift = rng.randrange(10**9)
            for line in lines[1:]:  # other times order the lines of different writers differently, and renumber them
                line["time_ns"] += shift
            lines[0]["pid"] = rng.randrange(10**5)
        store(files, tmp_path / "same")
        assert is_match(tmp_path / "same", recording, policies)
