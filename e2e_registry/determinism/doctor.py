"""Judges the determinism state of a process against a profile: what is set, effective, late or missing.

Pure: it looks at a state that :func:`~e2e_registry.determinism.state.read_state` returned, in this process or,
through JSON, in another one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from e2e_registry.determinism.portable import PORTABLE_OPERATORS, UNREMEDIED_OPERATORS
from e2e_registry.determinism.profiles import Profile, Variable, When, get_profile
from e2e_registry.determinism.variables import ChildEnvironment, State, at, has_loaded, judged_value, pin_difference


class Severity(enum.Enum):
    """How much a finding matters; the order is the order of weight."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        code: Stable name of the kind of finding, such as ``variable-late``.
        severity: How much it matters.
        subject: The variable or switch.
        message: What is so.
        fix: What to do about it; None if there is nothing to do.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    fix: str | None = None

    @property
    def is_problem(self) -> bool:
        """Whether the finding speaks against the run's bits."""
        return self.severity in (Severity.WARNING, Severity.ERROR)

    def __str__(self) -> str:
        """Render as one line, and the fix on a line of its own."""
        text = f"{self.severity.value}: {self.subject}: {self.message} [{self.code}]"
        return text if self.fix is None else f"{text}\n  {self.fix}"


def judge(state: State | None, profile: str | Profile, *, child: ChildEnvironment | None = None) -> list[Finding]:
    """Return what can be said of a process under a profile: each variable, each switch, and the platform.

    Good news is reported too, as :attr:`Severity.OK`; :attr:`Finding.is_problem` tells the rest apart.

    Args:
        state: The state as the process read it; None if it left none.
        profile: The profile or its name.
        child: What the process was started with, if known: it stands in for an unknown state.

    Raises:
        UsageError: There is no such profile.
    """
    profile = get_profile(profile)
    findings: list[Finding] = []
    if state is None:
        findings.append(
            Finding(
                *("state-unknown", Severity.WARNING, "state", "the process left no determinism state"),
                fix="log through MetricRecorder, or call read_state() in the process",
            )
        )
    else:
        findings += _platform(state, profile)
    if state is not None or child is not None:
        findings += [_variable(variable, state, child) for variable in profile.settings]
    if state is not None:
        findings += judge_switches(state, profile)
        findings += [
            Finding("unreadable", Severity.WARNING, str(name), f"could not be read: {error}")
            for name, error in _items(at(state, "unreadable"))
        ]
    return findings


def _items(value: object) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are problems, the gravest first."""
    order = list(Severity)
    return sorted((f for f in findings if f.is_problem), key=lambda f: order.index(f.severity), reverse=True)


def _variable(variable: Variable, state: State | None, child: ChildEnvironment | None) -> Finding:
    if variable.is_pin:
        return _pin(variable, state, child)
    value, _ = judged_value(variable, state, child)
    if variable.accepts(value):
        return Finding("variable-ok", Severity.OK, variable.name, f"{variable.setting}; read by {variable.reader}")
    message = f"is {_shown(value)} where the profile sets {variable.value!r}; advisory: {variable.why}"
    return Finding("variable-advisory", Severity.INFO, variable.name, message)


def _pin(variable: Variable, state: State | None, child: ChildEnvironment | None) -> Finding:
    difference = pin_difference(variable, state, child)
    value, _ = judged_value(variable, state, child)
    current = at(state, "variables", variable.name, "current")
    if difference is None:
        return Finding("variable-ok", Severity.OK, variable.name, _why_it_holds(variable, value, current))
    name = variable.name
    if state is not None and not variable.accepts(value) and variable.accepts(current):
        severity = Severity.ERROR if _has_passed(variable, state) else Severity.WARNING
        what = f"set to {current!r}" if current else "removed"
        message = (
            f"{what} inside the process, which was started with it {_shown(value)}; it is read by {variable.reader}, "
            f"at {variable.when.value}{'' if severity is Severity.ERROR else ', which has not happened here yet'}"
        )
        return Finding("variable-late", severity, name, message, fix=_start_with(variable))
    if variable.accepts(value):
        message = f"{variable.setting} was given, but {difference.read_from} says {difference.actual!r}"
        return Finding("variable-not-effective", Severity.ERROR, name, message, fix=_NOT_EFFECTIVE.get(name))
    if value in (None, ""):
        message = f"is missing; {variable.why}"
        return Finding("variable-missing", Severity.ERROR, name, message, fix=_start_with(variable))
    wanted = "must be unset" if variable.value is None else f"the profile pins {variable.value!r}"
    message = f"is {value!r} ({difference.origin.value}); {wanted}; {variable.why}"
    return Finding("variable-differs", Severity.ERROR, name, message, fix=_start_with(variable))


_NOT_EFFECTIVE: Mapping[str, str] = {
    "PYTHONHASHSEED": "start Python without -I and -E, which make it ignore the variable",
    "ATEN_CPU_CAPABILITY": "only the spelling 'default' is accepted; torch warns of others when it is imported",
    "MKL_CBWR": "something called mkl_cbwr_set in this process",
    "OMP_NUM_THREADS": "remove torch.set_num_threads, omp_set_num_threads or threadpoolctl from the recipe",
    "MKL_NUM_THREADS": "remove torch.set_num_threads or mkl_set_num_threads from the recipe",
    "OPENBLAS_NUM_THREADS": "remove threadpoolctl or openblas_set_num_threads from the recipe",
    "NPY_DISABLE_CPU_FEATURES": "this NumPy has dispatch targets that the value does not name; add them",
}


def _why_it_holds(variable: Variable, value: str | None, current: Any) -> str:
    if not variable.accepts(value):
        return f"is {_shown(value)}, without effect here: {variable.reader} was not loaded, or answers as pinned"
    if value != current and current is not None:
        return f"{variable.setting} at process start; {_shown(current)} now, which its reader does not see"
    return (
        f"{variable.setting}, {'in time for' if value else 'as'} {variable.reader} {'' if value else 'expects'}".strip()
    )


def _has_passed(variable: Variable, state: State) -> bool:
    """Whether a variable's moment has passed, as far as a state tells."""
    if variable.when is When.CUDA_START:
        return at(state, "gpus") is not None
    if variable.when is When.LIBRARY_LOAD:
        return has_loaded(state, variable)
    return True


def _start_with(variable: Variable) -> str:
    if variable.value is None:
        return f"start the process without it: env -u {variable.name} ..."
    return (
        f"start the process with {variable.name}={variable.value}: in the launcher's environment, in a Ray actor's "
        "runtime_env, or by bootstrap() as the script's first statement"
    )


def _shown(value: object) -> str:
    return "unset" if value in (None, "") else repr(value)


def _platform(state: State, profile: Profile) -> Iterator[Finding]:
    if at(state, "process", "initial_environment_known") is False:
        message = "this system does not tell what the process was started with; the current variables stand in"
        yield Finding("initial-environment-unknown", Severity.WARNING, "environment", message)
    if profile.name != "cpu-portable":
        return
    machine, flags = at(state, "platform", "machine"), at(state, "platform", "cpu_flags") or []
    if machine not in ("x86_64", "AMD64") or "sse4_2" not in flags:
        message = f"{machine} with {' '.join(flags) or 'unknown instruction sets'} is not x86-64-v2"
        yield Finding(
            *("platform-not-portable", Severity.ERROR, "cpu", message), fix="use cpu-native, which names its machine"
        )
    libc = at(state, "platform", "libc")
    if not str(libc).startswith("glibc"):
        message = f"{libc or 'an unknown libc'} does not read GLIBC_TUNABLES: its math functions are not pinned"
        yield Finding("libc-not-pinned", Severity.WARNING, "libc", message, fix="use an image with glibc")


def judge_switches(state: State, profile: str | Profile) -> Iterator[Finding]:
    """Yield what can be said of the switches inside a process: a part of what :func:`judge` returns.

    Raises:
        UsageError: There is no such profile.
    """
    profile = get_profile(profile)
    if at(state, "determinism", "flush_denormal"):
        yield Finding(
            *("flush-denormal", Severity.ERROR, "flush_denormal", "subnormal numbers are taken for zero here"),
            fix="a library built with -ffast-math switched it on; torch.set_flush_denormal(False) switches it off",
        )
    torch = at(state, "determinism", "torch")
    if torch is None:
        message = "torch is not loaded in this process, so its switches cannot be judged"
        yield Finding("torch-not-loaded", Severity.INFO, "torch", message)
        return
    call = "call make_deterministic(seed) before the model is built"
    if not at(torch, "deterministic_algorithms"):
        message = "torch.use_deterministic_algorithms is off: nondeterministic kernels run without a word"
        yield Finding("deterministic-off", Severity.ERROR, "deterministic_algorithms", message, fix=call)
    elif at(torch, "warn_only"):
        message = "warn_only=True leaves the backward of fused attention nondeterministic, silently"
        fix = "torch.use_deterministic_algorithms(True, warn_only=False)"
        yield Finding("warn-only", Severity.ERROR, "deterministic_algorithms", message, fix=fix)
    else:
        yield Finding("deterministic-on", Severity.OK, "deterministic_algorithms", "on, and strict")
    weight = Severity.ERROR if profile.name == "cuda" else Severity.WARNING
    if at(torch, "cudnn", "benchmark"):
        message = "cuDNN times its algorithms and may take another one on another day"
        yield Finding("cudnn-benchmark", weight, "cudnn.benchmark", message, fix=call)
    if profile.name == "cuda" and not at(torch, "cudnn", "deterministic"):
        message = "cuDNN may pick nondeterministic algorithms"
        yield Finding("cudnn-nondeterministic", Severity.ERROR, "cudnn.deterministic", message, fix=call)
    yield from _precision(torch, profile, call)
    if profile.name == "cpu-portable":
        yield from _portable_operators(torch)
    if at(torch, "fill_uninitialized_memory") and at(torch, "deterministic_algorithms"):
        message = "torch.empty fills its memory, which costs time and can hide reads of it"
        fix = "torch.utils.deterministic.fill_uninitialized_memory = False, except for debugging"
        yield Finding("fill-memory", Severity.INFO, "fill_uninitialized_memory", message, fix=fix)


def _portable_operators(torch: Any) -> Iterator[Finding]:
    if at(torch, "portable_operators"):
        yield Finding("portable-operators-on", Severity.OK, "portable_operators", "on")
    else:
        names = ", ".join(operator.name for operator in PORTABLE_OPERATORS)
        message = f"torch's own kernels of {names} give bits that depend on the CPU's vendor"
        fix = "call make_deterministic(seed) in the process, or enable_portable_operators()"
        yield Finding("portable-operators-off", Severity.WARNING, "portable_operators", message, fix=fix)
    for operator in UNREMEDIED_OPERATORS:
        message = f"differs between CPUs whatever is set, if it is used; use {operator.instead} instead"
        yield Finding("unremedied-operator", Severity.INFO, operator.name, message)


def _precision(torch: Any, profile: Profile, fix: str) -> Iterator[Finding]:
    """Judge float32 rounding: torch lets cuDNN round by default, which no CPU run sees."""
    backends = ("cuda",) if profile.name == "cuda" else ("mkldnn",)
    for name, precision in _items(at(torch, "fp32_precision")):
        if name.split(".")[0] in backends and precision not in ("ieee", "none"):
            message = f"float32 inputs are rounded to {precision}"
            yield Finding("reduced-precision", Severity.WARNING, name, message, fix=fix)
