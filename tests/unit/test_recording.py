"""Recording and reading back, through files and processes as recipes use them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_registry.dtypes import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT64,
    UINT64,
    DType,
    decode_bits,
    encode_value,
)
from e2e_registry.errors import InvalidRunError, RecordingError, RegistryError, StorageError, UsageError
from e2e_registry.recording import MetricRecorder, RunRecording, digest_of, read_run
from e2e_registry.recording.layout import name_fault
from e2e_registry.series import SeriesKey, iter_series

ROOT = Path(__file__).resolve().parents[2]
ENDED = {"outcome": {"exit_code": 0}}

Point = tuple[str, int, int | str]  # dtype, step, bits or digest


def points_of(run: RunRecording) -> dict[SeriesKey, list[Point]]:
    """Return every point of a run, through the checks that every consumer of its stream makes."""
    found: dict[SeriesKey, list[Point]] = {}
    for key, batches in iter_series(run.batches()):
        found[key] = []
        for batch in batches:
            contents = batch.bits.tolist() if batch.digests is None else batch.digests
            found[key] += zip([batch.dtype.name] * len(batch), batch.steps.tolist(), contents, strict=True)
    return found


def seq_of(run: RunRecording) -> dict[SeriesKey, list[int]]:
    found: defaultdict[SeriesKey, list[int]] = defaultdict(list)
    for batch in run.batches():
        found[batch.key] += batch.load_seq().tolist()
    return found


def main_points(run: RunRecording) -> dict[str, list[Point]]:
    return {key.metric: points for key, points in points_of(run).items()}


def end_run(run_dir: Path, outcome: dict[str, Any] | None = None) -> None:
    (run_dir / "run.json").write_text(json.dumps(ENDED if outcome is None else outcome))


def run_python(script: str, *args: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=check,
        timeout=180,
    )


# --- values -----------------------------------------------------------------------------------------------------------

_NUMPY_FLOATS = {FLOAT64: (np.uint64, np.float64), FLOAT32: (np.uint32, np.float32), FLOAT16: (np.uint16, np.float16)}


def numpy_scalar(dtype: DType, bits: int) -> Any:
    if dtype in _NUMPY_FLOATS:
        pattern, native = _NUMPY_FLOATS[dtype]
        return np.array(bits, pattern).view(native)[()]
    return {INT64: np.int64, UINT64: np.uint64, BOOL: np.bool_}[dtype](decode_bits(dtype, bits))


def torch_scalar(dtype: DType, bits: int) -> torch.Tensor:
    if dtype is BOOL:
        return torch.tensor(bool(bits))
    signed = {64: (torch.int64, "<q"), 32: (torch.int32, "<i"), 16: (torch.int16, "<h")}[dtype.width]
    (number,) = struct.unpack(signed[1], bits.to_bytes(dtype.width // 8, "little"))
    return torch.tensor(number, dtype=signed[0]).view(getattr(torch, dtype.name))


def natives(dtype: DType, bits: int) -> list[Any]:
    """Return the objects that a recipe might hold for one bit pattern."""
    tensor = torch_scalar(dtype, bits)
    if dtype is BFLOAT16:
        return [tensor, torch.nn.Parameter(tensor), torch.nn.Parameter(tensor) * torch.ones((), dtype=torch.bfloat16)][
            :2
        ]
    scalar = numpy_scalar(dtype, bits)
    array = np.array(scalar)
    forms = [tensor, scalar, array, array.astype(array.dtype.newbyteorder(">"), copy=True)]
    if dtype.is_float:
        forms.append(torch.nn.Parameter(tensor))
    if dtype in (FLOAT64, INT64, BOOL):
        forms.append(struct.unpack("<d", bits.to_bytes(8, "little"))[0] if dtype.is_float else decode_bits(dtype, bits))
    return forms


def interesting_bits(dtype: DType) -> list[int]:
    top = (1 << dtype.width) - 1
    if not dtype.is_float:
        return [0, 1, top >> 1, (top >> 1) + 1, top] if dtype.width > 1 else [0, 1]
    inf, sign = dtype.infinity_bits, dtype.sign_bit
    smallest_nan, quiet_nan = inf | 1, inf | 1 << (dtype.mantissa - 1)
    positive = [
        0,
        1,
        (1 << dtype.mantissa) - 1,
        1 << dtype.mantissa,
        inf - 1,
        inf,
        smallest_nan,
        quiet_nan,
        quiet_nan | 1,
    ]
    return positive + [bits | sign for bits in positive] + [top]


NUMERIC = [dtype for dtype in DTYPES.values() if not dtype.is_digest]
observed = st.sampled_from(NUMERIC).flatmap(
    lambda dtype: st.tuples(
        st.just(dtype),
        st.sampled_from(interesting_bits(dtype)) | st.integers(0, (1 << dtype.width) - 1),
        st.integers(0, 99),
    )
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name_fault(name) is None
)
INT64_STEPS = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60)
@given(
    names=st.lists(names, min_size=1, max_size=4, unique=True),
    rows=st.lists(st.lists(st.none() | observed, min_size=4, max_size=4), max_size=12),
    steps=st.lists(INT64_STEPS | st.integers(0, 5), min_size=12, max_size=12).map(sorted),
)
def test_every_bit_pattern_survives_recording_and_reading(names: list[str], rows: list[Any], steps: list[int]) -> None:
    expected: defaultdict[str, list[Point]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with MetricRecorder(run_dir=folder) as recorder:
            for step, row in zip(steps, rows, strict=False):
                metrics = {}
                for name, item in zip(names, row, strict=False):
                    if item is not None:
                        dtype, bits, form = item
                        forms = natives(dtype, bits)
                        metrics[name] = forms[form % len(forms)]
                        expected[name].append((dtype.name, step, bits))
                recorder.log(metrics, step=step)
        end_run(Path(folder))
        run = read_run(folder)
        lines = (Path(folder) / "metrics.main.rank0.jsonl").read_bytes().split(b"\n")
    assert main_points(run) == dict(expected)
    assert run.is_complete
    assert run.metrics == tuple(sorted(expected, key=str.encode))
    for line in lines[:-1]:
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.name)
def test_every_form_of_a_value_is_recorded_with_the_same_bits(dtype: DType, tmp_path: Path) -> None:
    forms = {
        f"{bits:x}/{at}": (bits, form)
        for bits in interesting_bits(dtype)
        for at, form in enumerate(natives(dtype, bits))
    }
    with MetricRecorder(run_dir=tmp_path) as recorder:
        recorder.log({name: form for name, (_, form) in forms.items()}, step=7)
    wanted = {name: [(dtype.name, 7, bits)] for name, (bits, _) in forms.items()}
    assert main_points(read_run(tmp_path)) == wanted


def test_narrow_integers_widen_and_finite_values_are_exact_json_numbers(tmp_path: Path) -> None:
    narrow = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
    with MetricRecorder(run_dir=tmp_path) as recorder:
        for name in narrow:
            info = np.iinfo(name)
            tensors = {f"torch/{name}": torch.tensor(info.max, dtype=getattr(torch, name))}
            recorder.log({f"numpy/{name}": np.dtype(name).type(info.min), **tensors}, step=0)
        recorder.log(
            {"f32": np.float32(0.1), "bf16": torch.tensor(0.1, dtype=torch.bfloat16), "u": np.uint64(2**64 - 1)}, step=1
        )
        recorder.log({"x": torch.tensor(float("nan")), "y": -np.float32(np.inf), "z": -0.0}, step=np.int32(2))
    points = main_points(read_run(tmp_path))
    for name in narrow:
        assert points[f"torch/{name}"] == [("int64", 0, int(np.iinfo(name).max))]
        assert points[f"numpy/{name}"] == [("int64", 0, int(np.iinfo(name).min) % 2**64)]
    header, *_, exact, bits = map(json.loads, recorder.path.read_text().splitlines())
    assert header == {"format": 1, "role": "main", "rank": 0, "pid": os.getpid()}
    assert exact.pop("time_ns") > 0
    assert exact == {
        "step": 1,
        "float32": {"f32": 0.10000000149011612},
        "bfloat16": {"bf16": 0.10009765625},
        "uint64": {"u": 2**64 - 1},
    }
    assert bits["bits"] == {"x": ["float32", "7fc00000"], "y": ["float32", "ff800000"]}
    assert (bits["step"], str(bits["float64"]["z"])) == (2, "-0.0")


def test_subnormals_are_recorded_where_the_processor_flushes_them(tmp_path: Path) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with MetricRecorder(run_dir=tmp_path) as recorder:
            forms = {
                "torch": torch_scalar(FLOAT32, 5),
                "numpy": numpy_scalar(FLOAT64, 9),
                "python": struct.unpack("<d", bytes([7, *[0] * 7]))[0],
            }
            recorder.log(forms, step=0)
    finally:
        torch.set_flush_denormal(False)
    points = main_points(read_run(tmp_path))
    assert points == {"torch": [("float32", 0, 5)], "numpy": [("float64", 0, 9)], "python": [("float64", 0, 7)]}


@pytest.mark.parametrize(
    ("metrics", "step", "said"),
    [
        ({"x": torch.ones(1)}, 0, ["metric 'x', step 0", "shape (1,)", "value.item()"]),
        ({"x": np.ones((2, 3))}, 0, ["shape (2, 3)", "reduce it", "log_digest"]),
        ({"x": 2**63}, 4, ["metric 'x', step 4", "numpy.uint64", "int64"]),
        ({"x": -(2**63) - 1}, 0, ["out of its range", "log_digest"]),
        ({"x": "abc"}, 0, ["a value of type str is not a real number", "log_digest"]),
        ({"x": None}, 0, ["a value of type NoneType is not"]),
        ({"x": 1j}, 0, ["a value of type complex is not a real number"]),
        ({"x": np.complex64(1)}, 0, ["dtype complex64", "log_digest"]),
        ({"x": np.longdouble(1)}, 0, ["dtype float128" if sys.maxsize > 2**32 else "dtype", "log_digest"]),
        ({"x": np.timedelta64(1, "s")}, 0, ["dtype timedelta64"]),
        ({"x": np.array("a")}, 0, ["dtype str"]),
        ({"x": np.array(1.0, dtype=object)}, 0, ["dtype object"]),
        ({"x": np.ma.masked}, 0, ["MaskedConstant"]),
        ({"x": torch.tensor(1.0).to(torch.float8_e4m3fn)}, 0, ["torch.float8_e4m3fn", "log_digest"]),
        ({"x": torch.tensor(1j)}, 0, ["torch.complex64"]),
        ({"": 1.0}, 0, ["must not be empty"]),
        ({"a\nb": 1.0}, 0, ["control character"]),
        ({"\ud800": 1.0}, 0, ["lone surrogate"]),
        ({"train/\u202essol": 1.0}, 0, ["direction mark"]),
        ({3: 1.0}, 0, ["must be a string, not 3"]),
        ([("x", 1.0)], 0, ["a mapping of names to values, not a list"]),
        ({"x": 1.0}, 1.0, ["step 1.0 is not an int64"]),
        ({"x": 1.0}, True, ["step True is not an int64"]),
        ({"x": 1.0}, 2**63, ["is not an int64"]),
        ({"x": 1.0}, np.uint64(2**63), ["is not an int64"]),
        ({"x": 1.0}, torch.tensor([1]), ["is not an int64"]),
        ({"x": 1.0}, None, ["step None is not an int64"]),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_leaves_no_line(
    metrics: Any, step: Any, said: list[str], tmp_path: Path
) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:
        if isinstance(metrics, dict):
            metrics = {"ok": 1.0, **metrics}
        with pytest.raises(RecordingError) as caught:
            recorder.log(metrics, step=step)
        assert all(part in str(caught.value) for part in said), str(caught.value)
        recorder.log({"ok": 1}, step=torch.tensor(3, dtype=torch.uint8))
    assert main_points(read_run(tmp_path)) == {"ok": [("int64", 3, 1)]}


# --- digests ----------------------------------------------------------------------------------------------------------


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_digests_are_of_the_documented_bytes() -> None:
    raw = np.arange(6, dtype="<f4").tobytes()
    grid = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest_of(grid) == sha(b"float32 [2,3]\n" + raw)
    same = [
        grid.t().contiguous().t(),  # strided
        torch.nn.Parameter(grid),
        torch.arange(12, dtype=torch.float32).reshape(6, 2).t()[0].div(2).reshape(2, 3),
        grid.numpy(),
        np.asfortranarray(grid.numpy()),
        grid.numpy().astype(">f4"),
    ]
    assert {digest_of(value) for value in same} == {digest_of(grid)}
    conjugated = torch.tensor([1 + 2j]).conj()
    assert digest_of(conjugated) == digest_of(np.array([1 - 2j], np.complex64))
    assert digest_of(torch.tensor(1.0)) == digest_of(np.float32(1)) == sha(b"float32 []\n" + struct.pack("<f", 1))
    assert digest_of(torch.tensor(1.0, dtype=torch.bfloat16)) == sha(b"bfloat16 []\n\x80\x3f")
    assert digest_of(torch.tensor([1.0]).to(torch.float8_e5m2)) == sha(b"float8_e5m2 [1]\n\x3c")
    assert digest_of(torch.tensor([True, False])) == digest_of(np.array([True, False])) == sha(b"bool [2]\n\x01\x00")
    assert digest_of(torch.empty(0, 3)) == sha(b"float32 [0,3]\n")
    assert digest_of(b"abc") == digest_of(bytearray(b"abc")) == digest_of(memoryview(b"aXbXcX")[::2]) == sha(b"abc")
    assert digest_of("é") == sha("é".encode())
    assert digest_of([3, 1, 2]) == digest_of((3, 1, 2)) == sha(b"[3,1,2]")
    assert digest_of(["a", "é"]) == sha(b'["a","\\u00e9"]')
    assert digest_of([np.int64(3)]) == sha(f"{digest_of(np.int64(3))}\n".encode())


def test_digests_of_states_ignore_order_and_see_every_bit() -> None:
    model = torch.nn.Linear(2, 2)
    state = model.state_dict()
    expected = sha(f'{digest_of(state["bias"])}  "bias"\n{digest_of(state["weight"])}  "weight"\n'.encode())
    assert digest_of(state) == digest_of(dict(reversed(state.items()))) == expected
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = digest_of(optimizer.state_dict())
    with torch.no_grad():
        optimizer.state[model.weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    assert digest_of(optimizer.state_dict()) != before
    zeros = [
        torch.zeros(2),
        -torch.zeros(2),
        torch.zeros(2).bfloat16(),
        torch.zeros(1, 2),
        np.zeros(2),
        [0, 0],
        "[0, 0]",
    ]
    assert len({digest_of(value) for value in zeros}) == len(zeros)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "a value of type object has no bytes to digest"),
        ({1, 2}, "a value of type set has no bytes"),
        ({"w": {"deep": object()}}, "in 'w': in 'deep': a value of type object"),
        ({1: 2, "1": 3}, "have the same name"),
        ({1.5: 2}, "neither a string nor an int"),
        (np.array(["a"]), "dtype str"),
        (np.array([1, None]), "dtype object has no fixed bytes"),
        (np.zeros(1, np.longdouble), "no fixed bytes"),
        (np.zeros(1, [("a", "f4")]), "no fixed bytes"),
        (np.ma.masked_equal([1, 2], 2), "MaskedArray"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "device meta"),
        ("\ud800", "no UTF-8 form"),
    ],
)
def test_what_has_no_fixed_bytes_is_not_digested(value: object, said: str, tmp_path: Path) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:
        with pytest.raises(RecordingError) as caught:
            recorder.log_digest("d", value, step=2)
        assert "metric 'd', step 2" in str(caught.value)
        assert said in str(caught.value)
        recorder.log_digest("d", b"", step=3)
    assert main_points(read_run(tmp_path)) == {"d": [("digest", 3, sha(b""))]}


def test_wrapper_tensors_are_refused_rather_than_read_through_a_null_address() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(RecordingError, match="TwoTensor holds no elements of its own"):
        digest_of(TwoTensor(torch.ones(2), torch.ones(2)))


def test_a_metric_may_change_between_numbers_and_digests(tmp_path: Path) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:
        for step in range(4):
            recorder.log({"x": float(step)}, step=step) if step % 2 else recorder.log_digest("x", str(step), step=step)
            recorder.log({"y": step if step else 0.5}, step=step)
    run = read_run(tmp_path)
    x = [("digest", 0, sha(b"0")), ("float64", 1, encode_value(FLOAT64, 1.0)), ("digest", 2, sha(b"2"))]
    assert main_points(run)["x"][:3] == x
    assert [dtype for dtype, _, _ in main_points(run)["y"]] == ["float64", "int64", "int64", "int64"]
    assert [d.name for d in run.dtypes[SeriesKey("x", "main", 0)]] == ["digest", "float64"]


# --- processes --------------------------------------------------------------------------------------------------------


def test_recording_needs_the_standard_library_alone(tmp_path: Path) -> None:
    # -S leaves site-packages out, so that NumPy and torch could not even be imported.
    script = """
        import sys
        from e2e_registry.recording import MetricRecorder
        before = set(sys.modules)
        with MetricRecorder() as recorder:
            recorder.log({"a": 1.5, "b": 2, "c": float("nan")}, step=0)
            recorder.log_digest("ids", [1, 2], step=0)
        heavy = {"numpy", "pandas", "pyarrow", "torch"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
    """
    for flags in (["-S"], []):
        folder = tmp_path / str(len(flags))
        command = [sys.executable, *flags, "-c", textwrap.dedent(script)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "E2E_REGISTRY_RUN_DIR": str(folder)}
        subprocess.run(command, env=env, check=True, timeout=180)
        run = read_run(folder)
        assert set(main_points(run)) == {"a", "b", "c", "ids"}
        assert run.writer_states["main", 0], run.unknown_states


_ENDLESS = """
    import os, sys
    from e2e_registry.recording import MetricRecorder
    recorder = MetricRecorder(run_dir=sys.argv[1])
    for step in range(10**9):
        recorder.log({f"m{i}": step + i for i in range(200)}, step=step)
        os.write(1, b"%d\\n" % step)
"""


def test_a_killed_run_keeps_every_line_it_logged_and_is_marked(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_ENDLESS), str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            killer = threading.Timer(random.uniform(0, 0.1), process.kill)
            killer.start()
            confirmed = process.stdout.read().split()
        run = read_run(folder)
        assert process.returncode == -signal.SIGKILL
        assert not run.is_complete
        points = main_points(run)
        steps = len(points["m0"])
        assert steps >= len(confirmed) + 1
        assert points == {f"m{i}": [("int64", step, step + i) for step in range(steps)] for i in range(200)}


def test_wherever_a_file_is_cut_its_whole_lines_are_read(tmp_path: Path) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:
        for step in range(3):
            recorder.log({"é": float("nan") if step == 1 else 0.5, "n": step}, step=step)
    end_run(tmp_path)
    path = tmp_path / "metrics.main.rank0.jsonl"
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        run = read_run(tmp_path)
        # A line is whole when its closing brace is there; only then is nothing of it missing.
        whole = max(0, sum(data[:cut].count(end) for end in (b"}\n",)) + data[:cut].endswith(b"}}") - 1)
        assert len(points_of(run).get(SeriesKey("n", "main", 0), [])) == whole, cut
        assert run.is_complete == (cut > 0 and data[cut - 1 : cut] == b"\n"), cut
        if not run.is_complete:
            assert str(path) in run.incomplete_reasons[0]


def test_one_file_has_one_writer(tmp_path: Path) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:
        recorder.log({"x": 1}, step=0)
        script = "import sys; from e2e_registry.recording import MetricRecorder; MetricRecorder(run_dir=sys.argv[1])"
        second = run_python(script, tmp_path, check=False)
        assert second.returncode != 0
        assert f"claimed by process {os.getpid()}" in second.stderr
        assert "its own role or rank" in second.stderr
        with pytest.raises(RecordingError, match="exists already"):
            MetricRecorder(run_dir=tmp_path)
        with MetricRecorder(run_dir=tmp_path, rank=1) as other:
            other.log({"x": 2}, step=0)
    with pytest.raises(RecordingError, match="exists already"):
        MetricRecorder(run_dir=tmp_path)
    assert len(points_of(read_run(tmp_path))) == 2


def test_a_fork_may_not_write_into_its_parents_file(tmp_path: Path) -> None:
    script = """
        import os, sys
        from e2e_registry.errors import RecordingError
        from e2e_registry.recording import MetricRecorder
        recorder = MetricRecorder(run_dir=sys.argv[1])
        recorder.log({"x": 0}, step=0)
        if os.fork() == 0:
            for call in (lambda: recorder.log({"x": 9}, step=1), lambda: recorder.log_digest("d", b"", step=1)):
                try:
                    call()
                except RecordingError as error:
                    print(error, flush=True)
            recorder.close()
            with MetricRecorder(run_dir=sys.argv[1], rank=1) as own:
                own.log({"x": 2}, step=0)
            os._exit(0)
        os.wait()
        recorder.log({"x": 1}, step=1)
        recorder.close()
    """
    output = run_python(script, tmp_path).stdout
    assert output.count("was forked from process") == 2
    assert output.count("a role or rank of its own") == 2
    points = points_of(read_run(tmp_path))
    assert points[SeriesKey("x", "main", 0)] == [("int64", 0, 0), ("int64", 1, 1)]
    assert points[SeriesKey("x", "main", 1)] == [("int64", 0, 2)]


def test_a_full_disk_ends_the_recording_at_a_tear(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from e2e_registry.errors import RecordingError, StorageError
        from e2e_registry.recording import MetricRecorder
        recorder = MetricRecorder(run_dir=sys.argv[1])
        recorder.log({"x": 0}, step=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (recorder.path.stat().st_size + 10, resource.RLIM_INFINITY))
        for attempt in (StorageError, RecordingError):
            try:
                recorder.log({"x": 1}, step=1)
            except attempt as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            recorder.log({"x": 2}, step=2)
        except RecordingError as error:
            print(error)
        recorder.close()
    """
    output = run_python(script, tmp_path).stdout
    assert "cannot write: File too large" in output
    assert output.count("was ended by a failed write") == 2
    end_run(tmp_path)
    run = read_run(tmp_path)
    assert main_points(run) == {"x": [("int64", 0, 0)]}
    assert run.incomplete_reasons == (
        f"{tmp_path}/metrics.main.rank0.jsonl:3: the last line is torn: it has no line end",
    )


def test_threads_share_a_recorder(tmp_path: Path) -> None:
    with MetricRecorder(run_dir=tmp_path) as recorder:

        def work(thread: int) -> None:
            for step in range(200):
                recorder.log({f"t{thread}/{i}": step for i in range(50)}, step=step)

        threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = read_run(tmp_path)
    wanted = [("int64", step, step) for step in range(200)]
    assert main_points(run) == {f"t{thread}/{i}": wanted for thread in range(4) for i in range(50)}
    assert sorted({seq for found in seq_of(run).values() for seq in found}) == list(range(800))


def test_the_run_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2E_REGISTRY_RUN_DIR", str(tmp_path / "new"))
    with MetricRecorder(role="actor", rank=3) as recorder:
        recorder.log({"x": 1}, step=0)
        assert recorder.path == tmp_path / "new" / "metrics.actor.rank3.jsonl"
    recorder.close()
    with pytest.raises(RecordingError, match="was closed"):
        recorder.log({"x": 1}, step=1)
    assert list(points_of(read_run(tmp_path / "new"))) == [("x", "actor", 3)]
    monkeypatch.delenv("E2E_REGISTRY_RUN_DIR")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with MetricRecorder() as silent:
            silent.log({"x": 1}, step=0)
            silent.log_digest("d", b"", step=0)
    assert ["E2E_REGISTRY_RUN_DIR" in str(warning.message) for warning in caught] == [True]
    assert silent.path is None
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    "writer", [{"role": "a.b"}, {"role": ""}, {"role": "../x"}, {"rank": -1}, {"rank": True}, {"rank": "0"}]
)
def test_writers_need_names_that_can_be_file_names(writer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecordingError):
        MetricRecorder(run_dir=tmp_path, **writer)
    assert not list(tmp_path.iterdir())


# --- the writer's state -----------------------------------------------------------------------------------------------


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for the reading of the state: each call returns, or raises, the next of the list."""
    waiting: list[Any] = []

    def read_state() -> Any:
        state = waiting.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    module = types.ModuleType("e2e_registry.determinism.state")
    vars(module)["read_state"] = read_state
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return waiting


def test_the_state_is_read_at_opening_first_line_new_libraries_and_closing(
    states: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states += [{"at": "opening"}, {"at": "first line"}, {"at": "torch"}, {"at": "closing"}]
    kept = sys.modules["torch"]
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.chdir(tmp_path.parent)
    recorder = MetricRecorder(run_dir=tmp_path.name)
    seen = []

    def look() -> None:
        seen.append(read_run(tmp_path).writer_states["main", 0])

    look()
    for torch_module in (None, None, kept, kept):
        if torch_module is not None:
            monkeypatch.setitem(sys.modules, "torch", torch_module)
        recorder.log({"x": 1}, step=0)
        look()
    monkeypatch.chdir("/")
    recorder.close()
    look()
    assert [state and state["at"] for state in seen] == ["opening", *["first line"] * 2, *["torch"] * 2, "closing"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.main.rank0.json", "metrics.main.rank0.jsonl"]


def test_a_state_that_cannot_be_read_is_unknown_and_does_not_stop_training(states: list[Any], tmp_path: Path) -> None:
    states += [RuntimeError("no such device"), {"set": {1, 2}}, RuntimeError("gone")]
    with MetricRecorder(run_dir=tmp_path) as recorder:
        assert read_run(tmp_path).unknown_states == {("main", 0): "reading it failed: RuntimeError: no such device"}
        recorder.log({"x": 1}, step=0)
    run = read_run(tmp_path)
    assert run.writer_states == {("main", 0): None}
    assert run.unknown_states == {("main", 0): "reading it failed: RuntimeError: gone"}
    (tmp_path / "env.main.rank0.json").unlink()
    assert read_run(tmp_path).unknown_states == {("main", 0): "it left no state file"}


# --- whole runs -------------------------------------------------------------------------------------------------------


def write_log(folder: Path, role: str, rank: int, lines: list[str | dict[str, Any]]) -> Path:
    """Write a recorder's file by hand: step and time default to the line's position."""
    path = folder / f"metrics.{role}.rank{rank}.jsonl"
    texts = [json.dumps({"format": 1, "role": role, "rank": rank, "pid": 1})]
    for at, line in enumerate(lines):
        texts.append(line if isinstance(line, str) else json.dumps({"step": at, "time_ns": at, **line}))
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_lines_of_all_writers_are_numbered_by_time_then_role_rank_and_line(tmp_path: Path) -> None:
    times = {("rollout", 0): [5, 1, 9], ("actor", 10): [5, 6], ("actor", 2): [5, 9]}
    for (role, rank), stamps in times.items():
        write_log(tmp_path, role, rank, [{"time_ns": t, "int64": {f"{role}/x": 0, f"{role}/y": 0}} for t in stamps])
    end_run(tmp_path)
    run = read_run(tmp_path)
    # rollout's clock was set back to 1 after its first line: its lines still keep their own order.
    wanted = {("actor", 2): [0, 5], ("actor", 10): [1, 4], ("rollout", 0): [2, 3, 6]}
    assert seq_of(run) == {
        SeriesKey(f"{role}/{name}", role, rank): found for (role, rank), found in wanted.items() for name in "xy"
    }
    assert [str(key) for key in run.keys[:2]] == ["actor/x [actor rank 2]", "actor/x [actor rank 10]"]
    assert run.run == ENDED
    assert run.is_complete


@pytest.mark.parametrize(
    ("run_json", "said"), [(None, "run.json is missing"), ('{"outcome": null}', "no outcome"), ("{}", "no outcome")]
)
def test_a_run_without_outcome_is_incomplete_and_a_single_file_is_not(
    run_json: str | None, said: str, tmp_path: Path
) -> None:
    path = write_log(tmp_path, "main", 0, [{"int64": {"x": 1}}])
    if run_json is not None:
        (tmp_path / "run.json").write_text(run_json)
    run = read_run(tmp_path)
    assert not run.is_complete
    assert said in run.incomplete_reasons[0]
    single = read_run(path)
    assert single.is_complete
    assert points_of(single) == points_of(run)
    renamed = path.rename(tmp_path / "kept.jsonl")
    assert points_of(read_run(renamed)) == points_of(single)


def test_empty_runs(tmp_path: Path) -> None:
    end_run(tmp_path)
    run = read_run(tmp_path)
    assert run.is_complete
    assert not run.has_series
    (tmp_path / "metrics.jsonl").touch()
    assert not read_run(tmp_path).has_series
    write_log(tmp_path, "main", 0, [])
    assert read_run(tmp_path).is_complete
    (tmp_path / "metrics.main.rank1.jsonl").touch()
    assert "not even its header" in read_run(tmp_path).incomplete_reasons[0]
    with pytest.raises(InvalidRunError, match=r"metrics\.jsonl: the file is empty"):
        read_run(tmp_path / "metrics.jsonl")
    (tmp_path / "nothing").mkdir()
    assert len(read_run(tmp_path / "nothing").incomplete_reasons) == 2
    with pytest.raises(UsageError, match="no such run"):
        read_run(tmp_path / "missing")


def test_ranks_that_disagree_are_invalid_unless_the_run_was_cut_before_they_could_agree(tmp_path: Path) -> None:
    both, one = {"int64": {"a": 1, "b": 2}}, {"int64": {"a": 1}}
    write_log(tmp_path, "train", 0, [one, both])
    write_log(tmp_path, "train", 1, [one])
    run = read_run(tmp_path)
    assert run.incomplete_reasons[1:] == ("not every rank of role 'train' came to log b",)
    silent = write_log(tmp_path, "train", 2, [])
    assert read_run(tmp_path).incomplete_reasons[1:] == ("not every rank of role 'train' came to log a, b",)
    silent.unlink()
    end_run(tmp_path)
    with pytest.raises(
        InvalidRunError, match=r"train\.rank0\.jsonl:3: b is logged by rank 0 of role 'train' and not by rank 1"
    ):
        read_run(tmp_path)
    (tmp_path / "run.json").unlink()
    write_log(tmp_path, "train", 1, [one, one])
    with pytest.raises(InvalidRunError, match="not by rank 1"):
        read_run(tmp_path)
    write_log(tmp_path, "train", 1, [both, one])
    assert len(read_run(tmp_path).keys) == 4
    end_run(tmp_path)
    write_log(tmp_path, "rollout", 0, [])
    write_log(tmp_path, "rollout", 1, [])
    assert read_run(tmp_path).is_complete, "ranks that all log nothing agree"


def test_a_rank_that_logs_nothing_beside_ranks_that_log_is_invalid(tmp_path: Path) -> None:
    """Report: rank 1 opened a recorder and logged nothing, and the run was recorded as whole."""
    for rank, lines in enumerate([[{"int64": {"a": 1}}], []]):
        write_log(tmp_path, "train", rank, lines)
    end_run(tmp_path)
    with pytest.raises(InvalidRunError, match="a is logged by rank 0 of role 'train' and not by rank 1") as raised:
        read_run(tmp_path)
    assert "no recorder" in str(raised.value)


def test_series_longer_than_a_batch_come_back_whole(tmp_path: Path) -> None:
    count = 40_000
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f'{{"step": {s // 3}, "x": {s}.5, "y": {s}}}\n' for s in range(count)))
    run = read_run(path)
    assert main_points(run)["y"] == [("int64", s // 3, s) for s in range(count)]
    assert [bits for _, _, bits in main_points(run)["x"]] == np.arange(0.5, count).view(np.uint64).tolist()
    assert set(map(tuple, seq_of(run).values())) == {tuple(range(count))}
    assert sum(1 for _ in run.batches()) > 2
    damaged = path.read_text().splitlines(keepends=True)
    damaged[30_000] = '{"step": 10000, "x": 1.5, "y": 9223372036854775808}\n'
    path.write_text("".join(damaged))
    with pytest.raises(
        InvalidRunError, match=r"long\.jsonl:30001: y: 9223372036854775808 is out of the range of int64"
    ):
        read_run(path)


# --- plain lines ------------------------------------------------------------------------------------------------------


def test_plain_lines_of_recipes_that_know_nothing_of_this_package(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step_key": "train/step", "train/step": 1.0, "train/grad_norm": 0.0018, "train/ok": true}\n'
        '{"step_key": "rollout/step", "rollout/step": 0, "rollout/reward": NaN}\r\n'
        '{"step": 2, "train/grad_norm": -Infinity, "rollout/reward": 1, "train/ok": false}\n'
        '{"train/grad_norm": -0.0, "step": 2e0, "rollout/reward": -9223372036854775808}\n'
    )
    end_run(tmp_path)
    run = read_run(tmp_path)
    assert main_points(run) == {
        "rollout/reward": [("float64", 0, 0x7FF8 << 48), ("int64", 2, 1), ("int64", 2, 1 << 63)],
        "train/grad_norm": [
            ("float64", 1, encode_value(FLOAT64, 0.0018)),
            ("float64", 2, 0xFFF0 << 48),
            ("float64", 2, 1 << 63),
        ],
        "train/ok": [("bool", 1, 1), ("bool", 2, 0)],
    }
    assert seq_of(run)["rollout/reward", "main", 0] == [1, 2, 3]
    assert run.is_complete
    assert run.writer_states == {("main", 0): None}
    assert points_of(read_run(tmp_path / "metrics.jsonl")) == points_of(run)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/grad')
    assert read_run(tmp_path).incomplete_reasons == (
        f"{tmp_path}/metrics.jsonl:5: the last line is torn: it has no line end",
    )
    assert points_of(read_run(tmp_path)) == points_of(run)


PLAIN = '{"step": 0, "x": 1.5}'


@pytest.mark.parametrize(
    ("lines", "place", "said"),
    [
        ([PLAIN, "garbage", PLAIN], 2, "not a JSON object"),
        ([PLAIN, "", PLAIN], 2, "not a JSON object"),
        ([PLAIN, PLAIN[:-5]], 2, "not a JSON object"),  # torn, yet its line ends: not the end of a killed run
        (["[1]", PLAIN], 1, "it is not an object"),
        (["[" * 100_000], 1, "not a JSON object"),
        ([PLAIN, '{"step": 1, "x": "\udcff"}'], 2, "codec can't decode"),
        (['{"x": 1.5}'], 1, "no key 'step'"),
        ([PLAIN, '{"step_key": "train/step", "step": 1, "x": 1.5}'], 2, "no key 'train/step'"),
        (['{"step_key": 3, "x": 1.5}'], 1, "step_key 3 is not a string"),
        (['{"step": NaN, "x": 1.5}'], 1, "step 'step' is nan"),
        (['{"step": Infinity, "x": 1.5}'], 1, "step 'step' is inf"),
        (['{"step": 1e400, "x": 1.5}'], 1, "step 'step' is inf"),
        (['{"step": 1.5, "x": 1.5}'], 1, "step 'step' is 1.5"),
        (['{"step": true, "x": 1.5}'], 1, "step 'step' is True"),
        (['{"step": "1", "x": 1.5}'], 1, "step 'step' is '1'"),
        (['{"step": 9223372036854775808, "x": 1.5}'], 1, "is not an int64"),
        ([PLAIN, '{"step": 1, "x": "high"}'], 2, "x: a string is not a number"),
        ([PLAIN, '{"step": 1, "x": [1]}'], 2, "x: a list is not a number"),
        ([PLAIN, '{"step": 1, "x": {"y": 1}}'], 2, "x: an object is not a number"),
        ([PLAIN, '{"step": 1, "x": null}'], 2, "x: null is not a number"),
        ([PLAIN, '{"step": 1, "x": 1, "x": 2}'], 2, "key 'x' stands twice"),
        ([PLAIN, '{"step": 1, "step": 2, "x": 2}'], 2, "key 'step' stands twice"),
        ([PLAIN, '{"step": 1, "x": -9223372036854775809}'], 2, "out of the range of int64"),
        ([PLAIN, '{"step": 1, "x": ' + "9" * 5000 + "}"], 2, "not a JSON object"),
        ([PLAIN, '{"step": 1, "x": 1e999}'], 2, "too large for float64"),
        ([PLAIN, '{"step": 1, "": 1.0}'], 2, "must not be empty"),
        ([PLAIN, '{"step": 1, "a\\u0000b": 1.0}'], 2, "control character"),
        (
            [PLAIN, '{"step": 3, "x": 1.5}', '{"step": 9, "y": 1}', '{"step": 2, "x": 1.5}'],
            4,
            "x: step 2 comes after step 3 (line 2)",
        ),
    ],
)
def test_bad_plain_lines_are_named_by_file_and_line(lines: list[str], place: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    for run in (tmp_path, path):
        with pytest.raises(InvalidRunError) as caught:
            read_run(run)
        assert caught.value.where == f"{path}:{place}"
        assert said in caught.value.message


GOOD = '{"step": 0, "time_ns": 0, "float32": {"x": 0.5}}'


@pytest.mark.parametrize(
    ("lines", "place", "said"),
    [
        ([GOOD, "garbage", GOOD], 3, "not a JSON object"),
        ([GOOD, "\0" * 8, GOOD], 3, "not a JSON object"),
        ([GOOD, '{"time_ns": 0, "float32": {"x": 0.5}}'], 3, "has no step"),
        ([GOOD, '{"step": 1.0, "time_ns": 0}'], 3, "step 1.0 is not an int64"),
        ([GOOD, '{"step": true, "time_ns": 0}'], 3, "step True is not an int64"),
        ([GOOD, '{"step": 1}'], 3, "time_ns None"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float8": {"x": 0.5}}'], 3, "key 'float8' is neither"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": [0.5]}'], 3, "float32 is not an object"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": NaN}}'], 3, "NaN is not JSON"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": 0.1}}'], 3, "x: 0.1 is not exact in float32"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float16": {"x": 65536.0}}'], 3, "x: 65536.0 is not exact in float16"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bfloat16": {"x": 1.00390625}}'], 3, "is not exact in bfloat16"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": 1e40}}'], 3, "is not exact in float32"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float64": {"y": 1e999}}'], 3, "too large for float64"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": 1}}'], 3, "x: 1 is not of dtype float32"),
        ([GOOD, '{"step": 1, "time_ns": 0, "int64": {"y": 1.0}}'], 3, "y: 1.0 is not of dtype int64"),
        ([GOOD, '{"step": 1, "time_ns": 0, "int64": {"y": true}}'], 3, "y: True is not of dtype int64"),
        ([GOOD, '{"step": 1, "time_ns": 0, "int64": {"y": 9223372036854775808}}'], 3, "out of the range of int64"),
        ([GOOD, '{"step": 1, "time_ns": 0, "uint64": {"y": -1}}'], 3, "y: -1 is out of the range of uint64"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bool": {"y": 1}}'], 3, "y: 1 is not of dtype bool"),
        ([GOOD, '{"step": 1, "time_ns": 0, "digest": {"y": "abc"}}'], 3, "64 lower-case hex digits"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bits": {"x": ["float32", "7fc000"]}}'], 3, "hex pattern"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bits": {"x": ["int64", "7fc0000000000000"]}}'], 3, "hex pattern"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bits": {"x": "7fc00000"}}'], 3, "hex pattern"),
        ([GOOD, '{"step": 1, "time_ns": 0, "bits": []}'], 3, "bits is not an object"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": 0.5, "x": 0.5}}'], 3, "key 'x' stands twice"),
        ([GOOD, '{"step": 1, "time_ns": 0, "float32": {}, "float32": {"x": 0.5}}'], 3, "key 'float32' stands twice"),
        (
            [GOOD, '{"step": 1, "time_ns": 0, "float32": {"x": 0.5}, "int64": {"x": 1}}'],
            3,
            "x stands twice in one line, as float32 and as int64",
        ),
        (
            [GOOD, '{"step": 1, "time_ns": 0, "bits": {"x": ["float32", "7fc00000"]}, "float32": {"x": 0.5}}'],
            3,
            "as float32 and as bits",
        ),
        (
            [GOOD, '{"step": 1, "time_ns": 0, "bits": {"x": ["float64", "7ff8000000000000"]}, "float32": {"x": 0.5}}'],
            3,
            "as float64 and as float32",
        ),
        (
            [
                GOOD,
                '{"step": 4, "time_ns": 0, "float32": {"x": 0.5}}',
                '{"step": 3, "time_ns": 0, "float32": {"x": 0.5}}',
            ],
            4,
            "x: step 3 comes after step 4 (line 3)",
        ),
    ],
)
def test_damage_in_a_recorders_file_is_named_by_file_and_line(
    lines: list[str], place: int, said: str, tmp_path: Path
) -> None:
    path = write_log(tmp_path, "main", 0, list(lines))
    end_run(tmp_path)
    for run in (tmp_path, path):
        with pytest.raises(InvalidRunError) as caught:
            read_run(run)
        assert caught.value.where == f"{path}:{place}"
        assert said in caught.value.message


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (GOOD, "header line is missing"),
        ('{"format": 2, "role": "main", "rank": 0, "pid": 1}', "format 2 is unknown"),
        ('{"format": true, "role": "main", "rank": 0, "pid": 1}', "format True is unknown"),
        ('{"format": 1, "role": "a.b", "rank": 0, "pid": 1}', "name no writer"),
        ('{"format": 1, "role": "main", "rank": 1, "pid": 1}', "the file was renamed"),
    ],
)
def test_a_recorders_file_begins_with_its_header(header: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.main.rank0.jsonl"
    path.write_text(f"{header}\n{GOOD}\n")
    for run in (tmp_path, path):
        with pytest.raises(InvalidRunError) as caught:
            read_run(run)
        assert caught.value.where == f"{path}:1"
        assert said in caught.value.message


def test_contradictions_between_files_are_named(tmp_path: Path) -> None:
    def refused(said: str) -> RegistryError:
        with pytest.raises(InvalidRunError) as caught:
            read_run(tmp_path)
        assert said in str(caught.value)
        return caught.value

    actor = write_log(tmp_path, "actor", 0, [{"int64": {"kl": 1}}])
    rollout = write_log(tmp_path, "rollout", 0, [{"int64": {"reward": 1}}, {"int64": {"kl": 1}}])
    end_run(tmp_path)
    error = refused(f"kl is logged by two roles: 'rollout' and 'actor' ({actor}:2)")
    assert error.where == f"{rollout}:3"
    rollout.unlink()
    (tmp_path / "metrics.jsonl").write_text(PLAIN + "\n")
    assert "metrics.actor.rank0.jsonl" in refused("the run holds plain lines and a recorder's").message
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.extra.jsonl")
    refused("metrics.extra.jsonl: the name says neither role nor rank")
    (tmp_path / "metrics.extra.jsonl").unlink()
    (tmp_path / "run.json").write_text("[]")
    refused("run.json: the file is not a JSON object")
    (tmp_path / "run.json").write_text('{"outcome"')
    refused("run.json: the file is not JSON")
    end_run(tmp_path)
    (tmp_path / "env.actor.rank0.json").write_text("{")
    refused("env.actor.rank0.json: the file is not JSON")


def test_a_file_that_cannot_be_written_or_read_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="the run directory is a file"):
        MetricRecorder(run_dir=tmp_path / "file")
    (tmp_path / "run" / "metrics.main.rank0.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"metrics\.main\.rank0\.jsonl: cannot read the run: Is a directory"):
        read_run(tmp_path / "run")


def test_time_is_wall_time_in_nanoseconds(tmp_path: Path) -> None:
    before = time.time_ns()
    with MetricRecorder(run_dir=tmp_path) as recorder:
        recorder.log({"x": 1}, step=0)
        assert recorder.path is not None
        line = json.loads(recorder.path.read_text().splitlines()[1])
    assert before <= line["time_ns"] <= time.time_ns()
