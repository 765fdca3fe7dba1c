"""The torch switches hold, are read back, and are undone; programs start over with their pins."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from e2e_registry.determinism import (
    DeterminismError,
    Switches,
    apply,
    child_environment,
    deterministic_mode,
    read_state,
)
from e2e_registry.determinism.relaunch import MARKER
from e2e_registry.errors import UsageError

EVERYTHING = Switches(num_threads=1, portable_operators=False)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch_state()
    with deterministic_mode(EVERYTHING):
        _undo()
        yield
    assert torch_state() == before


def _undo() -> None:
    """Set every switch to what a careless program has."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)


def torch_state() -> dict[str, Any]:
    state = read_state()
    assert state["unreadable"] == {}
    return {**state["determinism"]["torch"], "flush_denormal": state["determinism"]["flush_denormal"]}


def test_the_switches_of_a_profile_hold_after_they_are_set() -> None:
    careless = torch_state()
    assert careless["flush_denormal"], "the probe sees what torch set"
    assert careless["fp32_precision"]["cuda.matmul"] == "tf32"
    apply("cpu-portable")
    state = torch_state()
    assert (state["deterministic_algorithms"], state["warn_only"]) == (True, False)
    assert state["cudnn"] == {"enabled": True, "deterministic": True, "benchmark": False}
    assert set(state["fp32_precision"].values()) == {"ieee"}
    assert (state["float32_matmul_precision"], state["num_threads"]) == ("highest", 1)
    assert (state["fill_uninitialized_memory"], state["flush_denormal"]) == (False, False)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 1]]]), 2)


def test_the_debug_option_fills_uninitialised_memory_with_nan() -> None:
    apply(Switches.for_profile("cpu-portable", debug=True))
    assert torch.empty(64).isnan().all()
    apply("cpu-portable")
    assert not torch_state()["fill_uninitialized_memory"]


def _mixed_precision_switches() -> None:
    # After these, torch's own getter of allow_tf32 raises: the old and the new switches disagree.
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


@pytest.mark.parametrize(
    "prepare",
    [
        lambda: None,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.set_float32_matmul_precision("medium"),
        _mixed_precision_switches,
        lambda: apply("cpu-portable"),
    ],
    ids=["careless", "warn-only", "medium", "mixed", "pinned"],
)
def test_the_block_leaves_no_trace(prepare: Any) -> None:
    prepare()
    before = torch_state()
    inside = {}

    @deterministic_mode("cpu-portable")
    def fails() -> None:
        inside.update(torch_state())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert inside["deterministic_algorithms"]
    assert set(inside["fp32_precision"].values()) == {"ieee"}
    assert torch_state() == before


def test_a_switch_that_was_not_asked_for_is_the_programs_own() -> None:
    with deterministic_mode(Switches(num_threads=None, cudnn_benchmark=None)):
        torch.set_num_threads(3)
        assert torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("owner", "name", "switch"),
    [
        (torch, "set_num_threads", "num_threads"),
        (torch, "set_flush_denormal", "flush_denormal"),
        (torch, "use_deterministic_algorithms", "deterministic_algorithms"),
        (torch._C, "_set_fp32_precision_setter", "tf32"),
    ],
)
def test_a_switch_that_does_not_hold_is_an_error(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, switch: str
) -> None:
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_, **__: None)
        with pytest.raises(DeterminismError, match=switch):
            apply("cpu-portable")


def test_an_unknown_profile_is_refused_before_anything_is_set() -> None:
    before = torch_state()
    with pytest.raises(UsageError, match="no determinism profile"), deterministic_mode("gpu"):
        pass
    assert torch_state() == before


# Starting over

CALLER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OPENBLAS_", "OMP_", "MKL_", "NPY_", "PYTEST_", "GLIBC_", "PYTHONHASH"))
}

SCRIPT = """
import json, os, sys
from e2e_registry.determinism import bootstrap, pin_differences, read_state
{before}
bootstrap("cpu-portable")
bootstrap("cpu-portable")
import numpy
print(json.dumps({{"pid": os.getpid(), "argv": sys.argv[1:], "dev": sys.flags.dev_mode,
    "pins": [d.name for d in pin_differences("cpu-portable", read_state())],
    "set": os.environ.get("OMP_NUM_THREADS")}}))
"""


def start(
    path: Path, before: str = "", *, arguments: tuple[str, ...] = (), **variables: str
) -> tuple[int, dict[str, Any] | str]:
    """Run the script and return its process id and what it printed, or its error."""
    path.write_text(SCRIPT.format(before=before), encoding="utf-8")
    command = [sys.executable, "-X", "dev", "-W", "error", str(path), *arguments]
    process = subprocess.Popen(
        command, env={**CALLER, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, error = process.communicate(timeout=120)
    return process.pid, json.loads(out) if process.returncode == 0 else error


def test_a_program_starts_over_once_with_the_pins_and_is_otherwise_the_same(tmp_path: Path) -> None:
    pid, result = start(tmp_path / "recipe.py", arguments=("--seed", "a b"))
    assert result == {"pid": pid, "argv": ["--seed", "a b"], "dev": True, "pins": [], "set": "1"}


def test_a_program_that_a_test_launches_runs_no_test_itself(tmp_path: Path) -> None:
    _, result = start(tmp_path / "recipe.py", PYTEST_CURRENT_TEST="test_of_the_caller (call)")
    assert isinstance(result, dict), result
    assert result["pins"] == []


def test_an_explicit_value_survives_the_start_over_and_is_named(tmp_path: Path) -> None:
    before = "os.environ.setdefault('MKL_CBWR', 'AUTO')"
    _, result = start(tmp_path / "recipe.py", before, OMP_NUM_THREADS="2")
    assert isinstance(result, dict), result
    assert (result["pins"], result["set"]) == (["MKL_CBWR", "OMP_NUM_THREADS"], "2")


CALLERS = """
import json, os
from e2e_registry.determinism import bootstrap
from e2e_registry.determinism.relaunch import callers_environment
bootstrap("cpu-portable")
os.environ["MKL_DYNAMIC"] = "TRUE"  # from here on the program's own wish
kept = callers_environment()
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC", "CUDA_VISIBLE_DEVICES")
print(json.dumps([[os.environ.get(name), kept.get(name)] for name in names]))
"""


def test_what_a_program_was_started_over_with_is_not_its_callers_wish() -> None:
    environment = {name: value for name, value in CALLER.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", f"exec({CALLERS!r})"],
        env={**environment, "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [["1", None], ["1", "1"], ["TRUE", "TRUE"], ["", None]]


def test_a_program_that_was_started_with_the_pins_goes_on(tmp_path: Path) -> None:
    variables = child_environment("cpu-portable", caller={}, python=sys.executable).variables
    # With threads running it could not start over, so that it goes on shows that it did not try.
    _, result = start(tmp_path / "recipe.py", "import numpy", **dict(variables))
    assert isinstance(result, dict), result
    assert result["pins"] == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads"),
        ("sys.argv = ['-']", "standard input"),
        ("sys.ps1 = '>>> '", "interactive"),
        ("os.environ['PYTEST_CURRENT_TEST'] = 'x'", "runs a test"),
        (f"os.environ['{MARKER}'] = str(os.getpid())", "started over, but still lacks"),
    ],
    ids=["threads", "stdin", "interactive", "test", "marker"],
)
def test_a_program_that_would_lose_something_is_refused(tmp_path: Path, before: str, reason: str) -> None:
    _, error = start(tmp_path / "recipe.py", before)
    assert isinstance(error, str)
    assert "DeterminismError" in error
    assert reason in error
    assert "MKL_CBWR=COMPATIBLE" in error, "the hint says how to start it"


def _try_bootstrap(queue: Any) -> None:
    from e2e_registry.determinism import bootstrap

    os.environ.pop("PYTEST_CURRENT_TEST", None)
    os.environ["PYTHONHASHSEED"] = "12345"
    try:
        bootstrap("cpu-portable")
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test says so
        queue.put(f"{type(error).__name__}: {error}")


def test_a_worker_of_another_program_is_not_replaced() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_try_bootstrap, args=(queue,))
    worker.start()
    error = queue.get(timeout=180)
    assert error.startswith("DeterminismError: ")
    assert "multiprocessing worker" in error
    worker.join()


LATE = """
import json, os, sys
{code}
from e2e_registry.determinism import late_variables
print(json.dumps({{late.name: late.reason for late in late_variables()}}))
"""


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ("", {}),
        ("os.environ['OMP_NUM_THREADS'] = '1'", {}),
        ("import numpy; os.environ['OPENBLAS_NUM_THREADS'] = '1'", {"OPENBLAS_NUM_THREADS": "numpy is loaded"}),
        ("os.environ.pop('GLIBC_TUNABLES')", {"GLIBC_TUNABLES": "it is read at process start"}),
        ("os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'", {}),
        ("os.environ['PYTHONHASHSEED'] = '0'", {"PYTHONHASHSEED": "it is read at process start"}),
    ],
)
def test_a_variable_is_late_once_its_reader_has_started(code: str, late: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(code=code)],
        env={**CALLER, "GLIBC_TUNABLES": "glibc.malloc.check=0"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert json.loads(done.stdout) == late, done.stderr


def test_the_portable_profile_replaces_the_operators_that_differ_by_vendor() -> None:
    x = torch.rand(512, dtype=torch.float64)
    apply("cpu-portable")
    assert torch_state()["portable_operators"] is True
    assert x.sqrt().numpy().tobytes() == numpy.sqrt(x.numpy()).tobytes()
    apply(Switches(portable_operators=False))
    assert torch_state()["portable_operators"] is False


STARTED = """
import torch
from e2e_registry.determinism import make_deterministic
from e2e_registry.determinism.portable import portable_operators_are_enabled
make_deterministic(0)
print(portable_operators_are_enabled())
"""


def test_a_process_started_under_the_portable_profile_gets_them_by_itself() -> None:
    for profile, expected in (("cpu-portable", "True"), ("cpu-native", "False")):
        environment = dict(child_environment(profile, caller={}).variables) | {"PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
