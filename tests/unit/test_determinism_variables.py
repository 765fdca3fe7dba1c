"""Profiles, child environments and pins, judged in real processes that load real libraries."""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e_registry.determinism import (
    PROFILES,
    Origin,
    child_environment,
    get_profile,
    pin_differences,
    runtime_env_variables,
)
from e2e_registry.determinism.profiles import NUMPY_BASELINE, NUMPY_TARGETS, numpy_disable_value
from e2e_registry.determinism.variables import capture_variables, captured_value
from e2e_registry.errors import UsageError

#: This machine's environment may pin libraries by itself; tests start from one that does not.
CALLER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OPENBLAS_", "OMP_", "MKL_", "NPY_", "PYTEST_", "GLIBC_", "PYTHONHASH"))
}

PRINT_STATE = "import json\nfrom e2e_registry.determinism import read_state\nprint(json.dumps(read_state()))"


def run(code: str, environment: Mapping[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], env=dict(environment), capture_output=True, text=True, timeout=120
    )


def state_of(code: str, environment: Mapping[str, str], *flags: str) -> dict[str, Any]:
    done = run(f"{code}\n{PRINT_STATE}", environment, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What a child gets


@pytest.mark.parametrize("profile", list(PROFILES))
def test_an_explicit_value_wins_in_the_documented_order(profile: str) -> None:
    name = "OMP_NUM_THREADS"
    sources: dict[str, Mapping[str, str]] = {
        "caller": {name: "2", "HOME": "/home/x"},
        "registration": {name: "3"},
        "train_env_vars": {name: "4"},
    }
    for given_names, value, origin in (
        (("caller", "registration", "train_env_vars"), "4", Origin.TRAIN_ENV_VARS),
        (("caller", "registration"), "3", Origin.REGISTRATION),
        (("caller",), "2", Origin.CALLER),
        ((), "1", Origin.PROFILE),
    ):
        arguments = {key: sources[key] for key in given_names}
        child = child_environment(profile, **{"caller": {}, **arguments})
        assert (child.variables[name], child.origin(name)) == (value, origin)
        assert [d.name for d in child.pin_differences] == ([] if value == "1" else [name])
        stated = runtime_env_variables(profile, **{"caller": {}, **arguments})
        assert stated[name] == value


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_an_actor_is_told_every_pin_and_nothing_private(profile: Any) -> None:
    stated = runtime_env_variables(profile, caller={"SECRET": "s", "OMP_NUM_THREADS": "8"}, registration={"A": "b"})
    assert {pin.name for pin in profile.pins if pin.value is not None} <= set(stated)
    assert stated["OMP_NUM_THREADS"] == "8", "the caller's value is explicit"
    assert stated["A"] == "b"
    assert "SECRET" not in stated


def test_a_variable_that_must_be_absent_is_named_when_the_caller_has_it() -> None:
    child = child_environment("cpu-native", caller={"OPENBLAS_CORETYPE": "Haswell", "GLIBC_TUNABLES": "a.b=1"})
    assert [(d.name, d.expected, d.actual, d.is_certain) for d in child.pin_differences] == [
        ("OPENBLAS_CORETYPE", None, "Haswell", False)
    ]


def test_an_unknown_profile_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no determinism profile 'gpu'") as error:
        get_profile("gpu")
    assert "cpu-portable" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "is_accepted"),
    [
        ("ATEN_CPU_CAPABILITY", "DEFAULT", False),  # torch warns and takes the best kernels
        ("MKL_CBWR", "compatible", False),  # MKL takes AUTO
        ("MKL_CBWR", "BRANCH=COMPATIBLE", True),
        ("ONEDNN_MAX_CPU_ISA", "sse41", True),
        ("OPENBLAS_CORETYPE", "nehalem", True),
        ("OMP_DYNAMIC", "false", True),
        ("NPY_DISABLE_CPU_FEATURES", ",".join(reversed(NUMPY_TARGETS)), True),
        ("NPY_DISABLE_CPU_FEATURES", "AVX2", False),
        ("GLIBC_TUNABLES", "glibc.malloc.check=1:glibc.cpu.hwcaps=-FMA4,-FMA,-AVX512F,-AVX2", True),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-avx2,-fma,-fma4,-avx512f", False),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F:glibc.cpu.hwcaps=-BMI1", False),
        ("CUDA_VISIBLE_DEVICES", None, True),
        ("PYTHONHASHSEED", "00", False),
    ],
)
def test_values_compare_as_their_readers_take_them(name: str, value: str | None, is_accepted: bool) -> None:
    variable = PROFILES["cpu-portable"].variable(name)
    assert variable is not None
    assert variable.accepts(value) is is_accepted


# NumPy's names


def test_numpy_is_told_the_names_it_knows_and_takes_them_without_a_warning() -> None:
    value = numpy_disable_value(sys.executable)
    known = state_of("import numpy", CALLER)["determinism"]["numpy"]["dispatch_targets"]
    assert set(known) - NUMPY_BASELINE <= set(value.split())
    state = state_of("import numpy", {**CALLER, "NPY_DISABLE_CPU_FEATURES": value}, "-W", "error")
    assert state["determinism"]["numpy"] == {"dispatch_targets": []}


def test_without_an_interpreter_to_ask_every_known_name_is_disabled(tmp_path: Path) -> None:
    value = numpy_disable_value(str(tmp_path / "no-python"))
    assert value.split() == list(NUMPY_TARGETS)
    state = state_of("import numpy", {**CALLER, "NPY_DISABLE_CPU_FEATURES": value})
    assert state["determinism"]["numpy"] == {"dispatch_targets": []}


# Whether pins held


def test_a_library_that_was_never_loaded_breaks_no_pin() -> None:
    child = child_environment("cpu-portable", caller={**CALLER, "OPENBLAS_CORETYPE": "Haswell"}, python=sys.executable)
    assert pin_differences("cpu-portable", state_of("", child.variables), child=child) == []
    (difference,) = pin_differences("cpu-portable", state_of("import numpy", child.variables), child=child)
    assert (difference.name, difference.expected, difference.actual) == ("OPENBLAS_CORETYPE", "Nehalem", "Haswell")
    assert difference.origin is Origin.CALLER
    assert "openblas" in difference.read_from


def test_every_pin_holds_in_a_process_that_loads_everything() -> None:
    child = child_environment("cpu-portable", caller=CALLER, python=sys.executable)
    state = state_of("import numpy, scipy.linalg, sklearn.linear_model, torch", child.variables)
    assert pin_differences("cpu-portable", state, child=child) == []
    assert state["determinism"]["torch"]["cpu_capability"] in ("DEFAULT", "NO AVX")
    assert state["determinism"]["torch"]["mkl"] in (None, {"max_threads": 1, "cbwr": "COMPATIBLE"})
    assert {library["core"] for library in state["determinism"]["openblas"]} == {"Nehalem"}
    assert {library["max_threads"] for library in state["determinism"]["openmp"]} == {1}
    assert state["unreadable"] == {}


def test_pins_of_torch_are_named_even_where_torch_is_not_loaded() -> None:
    child = child_environment("cpu-portable", caller=CALLER, registration={"MKL_CBWR": "AVX2"}, python=sys.executable)
    state = state_of("", child.variables)
    (difference,) = pin_differences("cpu-portable", state, child=child)
    assert str(difference) == (
        "MKL_CBWR: the profile pins 'COMPATIBLE', effective is 'AVX2' (set by the registration's env=)"
    )


def test_what_a_script_changes_afterwards_counts_by_its_effect() -> None:
    child = child_environment("cpu-portable", caller=CALLER, python=sys.executable)
    code = (
        "import os, torch\ntorch.set_num_threads(2)\ntorch.ones(9, 9) @ torch.ones(9, 9)\n"
        "os.environ.update(MKL_CBWR='AUTO', PYTHONHASHSEED='7')"
    )
    differences = pin_differences("cpu-portable", state_of(code, child.variables), child=child)
    assert {(d.name, d.actual, d.read_from) for d in differences} == {
        ("OMP_NUM_THREADS", "2", "torch.get_num_threads()"),
        ("MKL_NUM_THREADS", "2", "mkl_get_max_threads()"),
    }, "variables that came after their reader changed nothing"


def test_an_interpreter_that_ignores_its_environment_breaks_the_hash_seed() -> None:
    child = child_environment("cpu-portable", caller=CALLER, python=sys.executable)
    code = f"import sys\nsys.path[:0] = {sys.path!r}"
    differences = pin_differences("cpu-portable", state_of(code, child.variables, "-E"), child=child)
    assert [(d.name, d.read_from) for d in differences] == [("PYTHONHASHSEED", "sys.flags.hash_randomization")]


def test_without_a_state_what_the_launcher_gave_decides() -> None:
    child = child_environment("cuda", caller={"NCCL_ALGO": "Tree", "NCCL_DETERMINISTIC": "0"})
    differences = pin_differences("cuda", None, child=child)
    assert [(d.name, d.origin) for d in differences] == [("NCCL_ALGO", Origin.CALLER)], "the other one is no pin"
    assert pin_differences("cuda", None) == [], "nothing is known"


def test_a_cpu_profile_is_broken_by_a_process_that_started_cuda() -> None:
    child = child_environment("cpu-portable", caller={})
    state = {"gpus": [{"name": "NVIDIA H200"}], "process": {}, "determinism": {}, "software": {}}
    assert [d.name for d in pin_differences("cpu-portable", state, child=child)] == ["CUDA_VISIBLE_DEVICES"]


STATE_KEYS = (
    *("determinism", "torch", "numpy", "openblas", "openmp", "mkl", "cbwr", "variables", "process", "gpus", "library"),
    *("core", "dispatch_targets", "num_threads", "MKL_CBWR", "initial", "software"),
)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(STATE_KEYS), inner, max_size=4),
        max_leaves=12,
    )
)
def test_a_state_of_another_version_never_raises(state: Any) -> None:
    if isinstance(state, dict):
        assert isinstance(pin_differences("cpu-portable", state), list)


def test_the_block_sizes_of_openblas_change_no_bits() -> None:
    """OPENBLAS_L2_SIZE is no pin: it moves the blocks of rows only, so sums keep their order."""
    code = (
        "import numpy as np, hashlib\nr = np.random.default_rng(0)\nh = hashlib.sha256()\n"
        "for t in (np.float32, np.float64):\n"
        "    for m, k, n in ((129, 257, 65), (300, 1000, 200), (1, 3000, 500)):\n"
        "        h.update((r.standard_normal((m, k)).astype(t) @ r.standard_normal((k, n)).astype(t)).tobytes())\n"
        "print(h.hexdigest())"
    )
    base = {**CALLER, "OPENBLAS_NUM_THREADS": "1"}
    done = [
        run(code, {**base, "OPENBLAS_CORETYPE": "Nehalem", **extra})
        for extra in ({}, {"OPENBLAS_L2_SIZE": "64"}, {"OPENBLAS_L2_SIZE": "4096", "OPENBLAS_BLOCK_FACTOR": "10"})
    ]
    assert [process.returncode for process in done] == [0, 0, 0], done
    (digest,) = {process.stdout for process in done}
    assert re.fullmatch(r"[0-9a-f]{64}\n", digest)


# What is recorded


@given(st.dictionaries(st.text(string.ascii_uppercase + "_", min_size=1), st.text(max_size=40), max_size=8))
def test_only_allowed_variables_are_recorded(environment: dict[str, str]) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x", "WANDB_API_KEY": "x", "TORCHINDUCTOR_REMOTE": "x"}
    recorded = capture_variables({**environment, **secrets, "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not set(secrets) & set(recorded)
    assert {"NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"} <= set(recorded)
    assert list(recorded) == sorted(recorded)


def test_long_values_are_cut_and_still_differ() -> None:
    one, other = captured_value("x" * 5000 + "a"), captured_value("x" * 5000 + "b")
    assert one != other
    assert max(len(one), len(other)) < 500
