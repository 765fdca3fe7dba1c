"""``assert_matches_standard`` and ``metric_recorder`` in real pytest processes, and the gathering of values."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import rows_of
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository, assert_golden
from test_pytest_plugin import run

from e2e_registry import assert_matches_standard
from e2e_registry.determinism.holding import holding_profile
from e2e_registry.determinism.state import read_state
from e2e_registry.determinism.variables import child_environment
from e2e_registry.errors import RecordingError, UsageError
from e2e_registry.recording import gather
from e2e_registry.standard import Standard

TEST_FILE = "tests/unit/test_model.py"

BODY = """
def test_sgd():
    weight, losses = 1.0, []
    for step in range(5):
        losses.append(SCALE * (weight - 3) ** 2)
        weight -= 0.2 * (weight - 3)
    assert_matches_standard({"train/loss": losses, "tokens": [10, 20, 30, 40, 50]}, "sgd"ARGUMENTS)
"""


def write(repository: Repository, body: str = BODY, *, scale: str = "1.0", arguments: str = "") -> None:
    path = repository.root / TEST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"import pytest\nfrom e2e_registry import Tolerance, assert_matches_standard\nSCALE = {scale}\n"
    path.write_text(head + textwrap.dedent(body).replace("ARGUMENTS", arguments))


def kept(repository: Repository) -> list[str]:
    """Names of the standards beside the test, without their platforms."""
    folder = (repository.root / TEST_FILE).with_suffix("")
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.parquet"))


def the_standard(repository: Repository) -> Path:
    (path,) = (repository.root / TEST_FILE).with_suffix("").glob("*.parquet")
    return path


def message(outcome: pytest.RunResult) -> str:
    """The assertion's message, out of pytest's ``E`` lines."""
    lines = (line.removeprefix("E").removeprefix("       ") for line in outcome.outlines if line.startswith("E  "))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ in pytest


def test_a_standard_is_recorded_when_asked_and_compared_with_afterwards(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository)
    # Held from the start, so that no process has to start over for it, and the report is the same on every machine.
    for name, value in child_environment("cpu-portable", caller={}, python=sys.executable).variables.items():
        monkeypatch.setenv(name, value)
    first = run(repository, TEST_FILE)
    first.assert_outcomes(failed=1)
    assert "AssertionError: no-standard  tests/unit/test_model.py::test_sgd [sgd]" in message(first)
    assert kept(repository) == []
    recorded = run(repository, TEST_FILE, "--record-assertions")
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines(["created  tests/unit/test_model.py::test_sgd ?sgd?  cpu-*", "  one run: repeat*"])
    metadata = Standard(the_standard(repository)).metadata
    assert (metadata.kind, metadata.test) == ("assertion", "tests/unit/test_model.py::test_sgd")
    assert metadata.recorded["command"] == ["pytest", f"{TEST_FILE}::test_sgd", "--record-assertions"]
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    before = the_standard(repository).stat()
    again = run(repository, TEST_FILE, "--record-assertions")
    again.stdout.fnmatch_lines(["unchanged  *"])
    assert the_standard(repository).stat().st_mtime_ns == before.st_mtime_ns
    write(repository, scale="1.0000001")
    changed = run(repository, TEST_FILE)
    changed.assert_outcomes(failed=1)
    assert_golden("assertion_mismatch", message(changed), repository.root)
    changed.stdout.no_fnmatch_line("*/e2e_registry/*")
    # What failed is kept so that it can become the standard as it is: on another machine's platform, say.
    (candidate,) = (repository.root / ".e2e_runs/assertions/tests/unit/test_model").glob("*.parquet")
    shutil.copy(candidate, the_standard(repository))
    run(repository, TEST_FILE).assert_outcomes(passed=1)


def test_tolerances_judge_and_keep_old_rows(repository: Repository) -> None:
    write(repository)
    run(repository, TEST_FILE, "--record-assertions").assert_outcomes(passed=1)
    before = the_standard(repository).read_bytes()
    tolerance = ', tolerances={"train/*": Tolerance(rtol=1e-6, reason="sums are split by threads")}'
    write(repository, scale="1.0000001", arguments=tolerance)
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    recorded = run(repository, TEST_FILE, "--record-assertions")
    recorded.stdout.fnmatch_lines(
        ["rewritten, values unchanged  *", "  within their tolerance, so their old rows stay*"]
    )
    assert the_standard(repository).read_bytes() != before
    write(repository, scale="1.0000001")
    run(repository, TEST_FILE).assert_outcomes(failed=1)
    write(repository, scale="1.01", arguments=tolerance)
    run(repository, TEST_FILE).assert_outcomes(failed=1)


SHARED = """
    @pytest.mark.parametrize("rate", [1, 2])
    def test_rate(rate):
        assert_matches_standard({"loss": [0.5 * rate]}, NAME)
"""


def test_two_tests_cannot_share_a_standard(repository: Repository) -> None:
    write(repository, SHARED.replace("NAME", '"loss"'))
    shared = run(repository, TEST_FILE, "--record-assertions")
    shared.assert_outcomes(passed=1, failed=1)
    assert "the standard 'loss' is kept by tests/unit/test_model.py::test_rate[1]" in message(shared)
    compared = run(repository, TEST_FILE)
    compared.assert_outcomes(passed=1, failed=1)
    assert "the standard was recorded by tests/unit/test_model.py::test_rate[1]: do two" in message(compared)
    write(repository, SHARED.replace("NAME", 'f"loss-{rate}"'))
    recorded = run(repository, TEST_FILE, "-n2", "--record-assertions")
    recorded.assert_outcomes(passed=2)
    recorded.stdout.fnmatch_lines_random(["created  *test_rate?1? ?loss-1?*", "created  *test_rate?2? ?loss-2?*"])
    assert kept(repository) == ["loss", "loss-1", "loss-2"]
    unused = run(repository, TEST_FILE, "--unused-assertions", "-n1")
    unused.assert_outcomes(passed=2)
    unused.stdout.fnmatch_lines(["standards that no test of this session used: 1", "  tests/unit/test_model/loss.cpu*"])
    # A test that was renamed keeps its standard: whoever recorded it is gone.
    write(repository, SHARED.replace("NAME", 'f"loss-{rate}"').replace("test_rate", "test_renamed"))
    renamed = run(repository, TEST_FILE, "--record-assertions")
    renamed.stdout.fnmatch_lines(["rewritten, values unchanged  tests/unit/test_model.py::test_renamed*"])


def test_a_recorder_keeps_dtypes_and_steps(repository: Repository) -> None:
    body = """
    import numpy
    def train(log):
        for step in (0, 5, 5, 10):
            log.log({"loss": numpy.float32(0.1) * step, "done": step == 10}, step=step)
        log.log_digest("weights", b"weights", step=10)
    class TestTraining:
        def test_it(self, metric_recorder):
            train(metric_recorder)
            assert_matches_standard(metric_recorder, "training")
    """
    write(repository, body)
    run(repository, TEST_FILE, "--record-assertions").assert_outcomes(passed=1)
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    standard = Standard(the_standard(repository))
    assert standard.metadata.test == "tests/unit/test_model.py::TestTraining::test_it"
    rows = [(row.metric, row.step, row.dtype.name) for row in rows_of(standard.batches())]
    steps = (0, 5, 5, 10)
    expected = [("done", step, "bool") for step in steps] + [("loss", step, "float32") for step in steps]
    assert rows == [*expected, ("weights", 10, "digest")]


def test_the_platform_is_the_profile_that_the_process_holds(repository: Repository) -> None:
    write(repository)
    repository.record()
    write_native_test(repository)
    under = ["--determinism-profile", "cpu-portable"]
    recorded = run(repository, "tests", *under, "--record-assertions", "--e2e", "-m", "not e2e")
    recorded.assert_outcomes(passed=1, deselected=2)
    assert the_standard(repository).name == "sgd.cpu-x86_64-portable.parquet"
    # Also in a worker; and a recipe of another profile is launched as if pytest were under none.
    run(repository, "tests", *under, "--e2e", "-n1").assert_outcomes(passed=3)
    (repository.root / "pytest.ini").write_text("[pytest]\ndeterminism_profile = cpu-portable\n")
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    (repository.root / "pytest.ini").unlink()
    other = run(repository, TEST_FILE)
    other.assert_outcomes(failed=1)
    assert "unpinned; there is one for cpu-x86_64-portable\n" in message(other)
    assert "warning: this process holds no determinism profile" in message(other)
    assert "2 series equal" in message(other)


def test_a_process_that_is_not_on_the_profile_asked_for_compares_and_records_nothing(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository)
    under = ["--determinism-profile", "cpu-portable"]
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    overridden = run(repository, TEST_FILE, *under)
    assert "not on the profile 'cpu-portable': MKL_CBWR: the profile pins 'COMPATIBLE'" in message(overridden)
    assert "next: unset what overrides the profile" in message(overridden)
    refused = run(repository, TEST_FILE, *under, "--record-assertions")
    assert "RefusedError" in message(refused)
    assert kept(repository) == []
    unknown = run(repository, TEST_FILE, "--determinism-profile", "cpu")
    assert unknown.ret == pytest.ExitCode.USAGE_ERROR
    unknown.stderr.fnmatch_lines(["ERROR: no determinism profile 'cpu'"])


def test_of_a_process_on_a_gpu_the_gpu_names_the_platform() -> None:
    state = {**read_state(), "gpus": [{"name": "NVIDIA H200"}]}
    holding = holding_profile(state)
    assert holding.profile == "cuda"
    assert "CUBLAS_WORKSPACE_CONFIG" in [pin.name for pin in holding.pins]
    assert "CUDA_VISIBLE_DEVICES" in [pin.name for pin in holding_profile(state, "cpu-portable").pins]


def write_native_test(repository: Repository) -> None:
    """Add a registered test of profile cpu-native, with its standard."""
    test = repository.write_test("test_native", profile="cpu-native")
    assert repository.cli("record", "--test", test).code == 0


def test_a_platform_axis_is_read_whether_or_not_its_library_is_loaded(repository: Repository) -> None:
    (repository.root / "pyproject.toml").write_text('[tool.e2e_registry]\nplatform_axes = ["torch", "python"]\n')
    write(repository)
    run(repository, TEST_FILE, "--record-assertions").assert_outcomes(passed=1)
    assert re.search(r"-torch\d+\.\d+-python3\.\d+-unpinned\.parquet$", the_standard(repository).name)


def test_a_stated_platform_is_one_standard_for_every_machine(repository: Repository) -> None:
    write(repository, arguments=', platform="any"')
    run(repository, TEST_FILE, "--record-assertions", "--determinism-profile", "cpu-portable").assert_outcomes(passed=1)
    assert the_standard(repository).name == "sgd.any.parquet"
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    the_standard(repository).rename(the_standard(repository).with_name("sgd.other.parquet"))
    # Found by its name, when comparing and when recording, and as the nearest.
    for stated, options in (("other", []), ("other", ["--record-assertions"]), ("elsewhere", [])):
        write(repository, arguments=f', platform="{stated}"')
        mislabelled = run(repository, TEST_FILE, *options)
        mislabelled.assert_outcomes(failed=1)
        mislabelled.stdout.fnmatch_lines(["*its name says other, and it was recorded on any*"])


MISUSES = {
    "twice": ('{"a": [1]}, "x0"); assert_matches_standard({"a": [1]}, "x0"', "twice with the name 'x0' in one test"),
    "name": ('{"a": [1]}, "lr-0.1"', "'lr-0.1' cannot name a standard"),
    "platform": ('{"a": [1]}, "x2", platform="a/b"', "'a/b' is not a platform slug"),
    "no mapping": ('[1, 2], "x3"', "takes a mapping of metric names to values, not a list"),
    "no tolerance": ('{"a": [1]}, "x4", {"a": 0.1}', "tolerances['a'] is 0.1"),
    "unused tolerance": ('{"a": [1]}, "x5", {"b": Tolerance(atol=1, reason="r")}', "tolerances['b'] is for no series"),
    "unfit tolerance": ('{"a": [1]}, "x6", {"a": Tolerance(ulp=1, reason="r")}', "a is int64, and ulp=1 has a meaning"),
    "not finite": ('{"a": [1.0, float("nan")]}, "x7"', "a is not finite at 1 point, first at step 1: nan"),
}


def test_misuse_says_what_is_wrong_and_writes_nothing(repository: Repository) -> None:
    calls = "".join(
        f"def test_{at}():\n    assert_matches_standard({arguments})\n"
        for at, (arguments, _) in enumerate(MISUSES.values())
    )
    write(repository, calls)
    outcome = run(repository, TEST_FILE, "--record-assertions")
    outcome.assert_outcomes(failed=len(MISUSES))
    for _, text in MISUSES.values():
        assert text in message(outcome)
    outcome.stdout.no_fnmatch_line("*/e2e_registry/*")
    assert kept(repository) == ["x0"]  # the first of the two calls


def test_outside_a_test_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("e2e_registry.assertion._running", [])
    with pytest.raises(UsageError, match="outside a test"):
        assert_matches_standard({"a": [1]}, "a")


def test_values_that_are_not_finite_match_when_they_are_permitted(repository: Repository) -> None:
    body = 'def test_it():\n    assert_matches_standard({"a": [float(SCALE)]}, "x")\n'
    write(repository, body, scale="'nan'")
    said = message(run(repository, TEST_FILE))
    assert "there is no tests/unit/test_model/x." in said
    assert "next: correct what is not finite; if NaN or infinity is right there, pass finite=False" in said
    assert "next: then record it: pytest " in said
    write(repository, body.replace('"x"', '"x", finite=False'), scale="'nan'")
    run(repository, TEST_FILE, "--record-assertions").assert_outcomes(passed=1)
    run(repository, TEST_FILE).assert_outcomes(passed=1)
    (repository.root / TEST_FILE).write_text((repository.root / TEST_FILE).read_text().replace("'nan'", "'inf'"))
    run(repository, TEST_FILE).assert_outcomes(failed=1)


# ------------------------------------------------------------------------------------------------ gathering


DTYPES = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16, "int64": np.uint64, "uint64": np.uint64}


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    width = np.dtype(dtype).itemsize * 8
    patterns = draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=6))
    return np.array(patterns, DTYPES[dtype]).view(dtype)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), arrays(), min_size=1))
def test_gathering_keeps_every_bit(series: dict[str, Any]) -> None:
    found: dict[str, list[Any]] = {}
    for row in rows_of(gather(series).batches()):
        found.setdefault(row.metric, []).append((row.step, row.dtype.name, row.bits))
    assert found == {
        name: [(step, str(a.dtype), int(bits)) for step, bits in enumerate(a.view(DTYPES[str(a.dtype)]))]
        for name, a in series.items()
    }


def test_what_can_be_gathered() -> None:
    series = {
        "tensor": torch.tensor([1.5, -0.0], dtype=torch.bfloat16, requires_grad=True),
        "pairs": [(np.int64(3), 1.0), (3, 2.0), (torch.tensor(7), 3.0)],
        "tuple": (True, False),
        "scalar": np.float32(0.1),
        "zero-dimensional": torch.tensor(3),
    }
    rows = [(row.metric, row.step, row.dtype.name, row.bits) for row in rows_of(gather(series).batches())]
    assert rows == [
        *(("pairs", step, "float64", bits) for step, bits in ((3, 0x3FF << 52), (3, 1 << 62), (7, 0x4008 << 48))),
        ("scalar", 0, "float32", 0x3DCCCCCD),
        *(("tensor", step, "bfloat16", bits) for step, bits in enumerate((0x3FC0, 0x8000))),
        *(("tuple", step, "bool", bits) for step, bits in enumerate((1, 0))),
        ("zero-dimensional", 0, "int64", 3),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "the series is empty"),
        (np.zeros((2, 2)), r"shape \(2, 2\) is no series"),
        ([(2, 1.0), (1, 1.0)], "step 1 comes after step 2"),
        ([(0, 1.0), 2.0], "some of the values are"),
        ([(0.5, 1.0)], "step 0.5 is not an integer"),
        ("text", "a value of type str is not a real number"),
        ([1.0, None], "step 1: a value of type NoneType"),
    ],
)
def test_what_cannot_be_gathered_names_the_metric(values: Any, message: str) -> None:
    with pytest.raises(RecordingError, match=message) as caught:
        gather({"train/loss": values})
    assert "'train/loss'" in str(caught.value)


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(RecordingError, match="no series holds a value"):
        gather({})
