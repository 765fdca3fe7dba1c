"""What the doctor says of real processes and of states that this machine cannot have (GPUs)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from e2e_registry.determinism import PROFILES, Severity, child_environment, judge, problems
from e2e_registry.determinism.profiles import Variable

CALLER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OPENBLAS_", "OMP_", "MKL_", "NPY_", "PYTEST_", "CUBLAS", "GLIBC_", "PYTHONHASH"))
}


def state_of(code: str, **variables: str) -> dict[str, Any]:
    """Run a program and return the state that it read, by way of JSON as between real processes."""
    script = f"import json\nfrom e2e_registry.determinism import *\n{code}\nprint(json.dumps(read_state()))"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**CALLER, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pinned_state(profile: str, *, gpus: bool = False) -> dict[str, Any]:
    """A state in which everything that a profile asks for holds."""
    child = child_environment(profile, caller={})
    torch = {
        "deterministic_algorithms": True,
        "warn_only": False,
        "fill_uninitialized_memory": False,
        "cudnn": {"enabled": True, "deterministic": True, "benchmark": False},
        "fp32_precision": {"cuda.matmul": "ieee", "cuda.conv": "ieee", "mkldnn.matmul": "ieee"},
        "num_threads": 1,
        "portable_operators": profile == "cpu-portable",
        "cpu_capability": "DEFAULT" if profile == "cpu-portable" else "AVX2",
        "mkl": {"max_threads": 1, "cbwr": child.variables["MKL_CBWR"]},
    }
    return {
        "process": {"hash_randomization": False, "initial_environment_known": True},
        "platform": {"machine": "x86_64", "cpu_flags": ["sse4_2", "avx2"], "libc": "glibc 2.39"},
        "software": {"torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.24.0", "transformer_engine": "2.9"}
        | {"mamba_ssm": "2.3.0", "causal_conv1d": "1.6.0", "torch._inductor": None},
        "gpus": [{"name": "NVIDIA H200"}] if gpus else None,
        "determinism": {
            "torch": torch,
            "numpy": {"dispatch_targets": [] if profile == "cpu-portable" else ["X86_V3"]},
            "openblas": [{"library": "libopenblas.so.0", "core": "Nehalem", "threads": 1}],
            "openmp": [{"library": "libgomp.so.1", "max_threads": 1}],
            "flush_denormal": False,
        },
        "variables": {
            name: {"initial": value, "current": value, "late": False} for name, value in child.variables.items()
        },
        "unreadable": {},
    }


def findings_on(subject: str, state: dict[str, Any], profile: str) -> tuple[str, Severity]:
    (finding,) = [finding for finding in judge(state, profile) if finding.subject == subject]
    assert (finding.fix is not None) is finding.is_problem or finding.severity is Severity.INFO
    return finding.code, finding.severity


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def test_the_cublas_workspace_unset_set_late_and_set_at_spawn_are_three_answers() -> None:
    """The doctor once told only set from unset, which a variable set after CUDA's start passes."""
    late = state_of(f"import torch, os\nos.environ['{CUBLAS}'] = ':4096:8'")
    assert findings_on(CUBLAS, state_of(""), "cuda") == ("variable-missing", Severity.ERROR)
    assert findings_on(CUBLAS, late, "cuda") == ("variable-late", Severity.WARNING)
    assert findings_on(CUBLAS, state_of("", **{CUBLAS: ":4096:8"}), "cuda") == ("variable-ok", Severity.OK)
    late["gpus"] = [{"name": "NVIDIA H200"}]  # what this machine lacks: CUDA has been started
    assert findings_on(CUBLAS, late, "cuda") == ("variable-late", Severity.ERROR)


def test_the_workspace_that_make_deterministic_sets_before_cuda_is_in_time() -> None:
    state = state_of("make_deterministic(1)")
    assert state["variables"][CUBLAS] == {"initial": None, "current": ":4096:8", "late": True, "set_in_time": True}
    assert findings_on(CUBLAS, state, "cuda") == ("variable-ok", Severity.OK)
    assert {finding.code for finding in problems(judge(state, "cuda"))} == {"variable-missing"}, "the switches are set"


@pytest.mark.parametrize("profile", list(PROFILES))
def test_a_pinned_process_has_no_problem(profile: str) -> None:
    state = pinned_state(profile, gpus=profile == "cuda")
    assert problems(judge(state, profile)) == []
    others = [f for f in judge(state, profile) if f.severity is not Severity.OK]
    assert all(f.code == "unremedied-operator" for f in others), "what no pin reaches is told, and is no problem"


PINS = [(name, pin) for name, profile in PROFILES.items() for pin in profile.pins if pin.value]


@pytest.mark.parametrize(("profile", "pin"), PINS, ids=[f"{profile}-{pin.name}" for profile, pin in PINS])
def test_each_pin_is_found_missing_late_and_different(profile: str, pin: Variable) -> None:
    state = pinned_state(profile, gpus=profile == "cuda")
    # The libraries answer as they would without the pin.
    state["determinism"]["openblas"][0].update(core="Haswell", threads=4)
    state["determinism"]["torch"].update(num_threads=4, cpu_capability="AVX2", mkl={"max_threads": 4, "cbwr": "OFF"})
    state["determinism"]["numpy"]["dispatch_targets"] = ["X86_V3"]
    state["process"]["hash_randomization"] = True
    entry = {"initial": None, "current": pin.value, "late": True}
    state["variables"][pin.name] = entry
    is_read_at_call = pin.when.name == "CALL"
    assert findings_on(pin.name, state, profile)[0] == ("variable-ok" if is_read_at_call else "variable-late")
    entry["current"] = None
    assert findings_on(pin.name, state, profile) == ("variable-missing", Severity.ERROR)
    entry.update(initial="other", current="other")
    assert findings_on(pin.name, state, profile) == ("variable-differs", Severity.ERROR)


def test_a_pin_that_was_given_but_does_not_hold_is_told_from_one_that_was_not_given() -> None:
    state = pinned_state("cpu-portable")
    state["determinism"]["torch"]["num_threads"] = 2
    assert findings_on("OMP_NUM_THREADS", state, "cpu-portable") == ("variable-not-effective", Severity.ERROR)


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("torch", "deterministic_algorithms"), False, "deterministic-off"),
        (("torch", "warn_only"), True, "warn-only"),
        (("torch", "cudnn"), {"deterministic": True, "benchmark": True}, "cudnn-benchmark"),
        (("torch", "cudnn"), {"deterministic": False, "benchmark": False}, "cudnn-nondeterministic"),
        (("torch", "fp32_precision"), {"cuda.conv": "tf32"}, "reduced-precision"),
        (("flush_denormal",), True, "flush-denormal"),
    ],
)
def test_each_switch_that_is_off_is_a_problem_of_its_own(path: tuple[str, ...], value: object, code: str) -> None:
    state = pinned_state("cuda", gpus=True)
    *parents, last = path
    target = state["determinism"]
    for key in parents:
        target = target[key]
    target[last] = value
    assert [finding.code for finding in problems(judge(state, "cuda"))] == [code]


def test_the_portable_profile_wants_its_platform() -> None:
    state = pinned_state("cpu-portable")
    state["platform"].update(machine="aarch64", libc="musl 1.2")
    assert [finding.code for finding in problems(judge(state, "cpu-portable"))] == [
        "platform-not-portable",
        "libc-not-pinned",
    ]


def test_operators_whose_bits_depend_on_the_vendor_are_named() -> None:
    state = pinned_state("cpu-portable")
    state["determinism"]["torch"]["portable_operators"] = False
    (found,) = problems(judge(state, "cpu-portable"))
    assert found.code == "portable-operators-off"
    assert "sqrt" in found.message
    unremedied = [f.subject for f in judge(state, "cpu-portable") if f.code == "unremedied-operator"]
    assert any("lstsq" in subject for subject in unremedied)
    assert not problems(judge(pinned_state("cpu-native"), "cpu-native"))


def test_an_unknown_state_is_a_problem_and_the_launcher_still_knows_something() -> None:
    child = child_environment("cuda", caller={"NCCL_ALGO": "Ring"})
    found = {finding.code: finding for finding in problems(judge(None, "cuda", child=child))}
    assert set(found) == {"state-unknown", "variable-differs"}
    assert "NCCL_ALGO" in str(found["variable-differs"])
    assert "caller's environment" in str(found["variable-differs"])


def test_importing_the_toolkit_loads_no_numeric_library() -> None:
    """A recipe's first import must not decide when torch, and with it OpenMP, is loaded."""
    code = (
        "import sys, e2e_registry.determinism as d\n"
        "for name in d.__all__: getattr(d, name)\n"
        "d.judge(d.read_state(), 'cuda'); d.late_variables()\n"
        "print(*sorted({'torch', 'numpy', 'pandas', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=CALLER, capture_output=True, text=True, timeout=180)
    assert (done.stdout.strip(), done.stderr) == ("", "")
