"""Environment variables of a process: what a child gets, who decided each, and whether the pins held.

A pin is judged by its effect: a library that was loaded and can be asked decides, a library that the process never
loaded cannot have changed anything, and where nothing is known the variable in the process's **initial**
environment decides, since a variable set later may have come after its reader. What a process was started with
and what its libraries answered is in the state that :func:`e2e_registry.determinism.state.read_state` returns.

This module starts nothing, reads no ``/proc`` and needs the standard library alone.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e_registry.determinism.profiles import (
    NO_VARIABLES,
    NUMPY_BASELINE,
    PROFILES,
    Evidence,
    Profile,
    Variable,
    When,
    get_profile,
    numpy_disable_value,
)

__all__ = [
    "CAPTURED_PREFIXES",
    "CAPTURED_VARIABLES",
    "NO_VARIABLES",
    "PROFILES",
    "ChildEnvironment",
    "EffectiveVariable",
    "Evidence",
    "Origin",
    "PinDifference",
    "Profile",
    "Variable",
    "When",
    "at",
    "capture_variables",
    "captured_value",
    "child_environment",
    "get_profile",
    "is_captured",
    "judged_value",
    "numpy_disable_value",
    "pin_difference",
    "pin_differences",
    "runtime_env_variables",
]


class Origin(enum.Enum):
    """Who decided a variable's value."""

    TRAIN_ENV_VARS = "set by --train-env-vars"
    REGISTRATION = "set by the registration's env="
    CALLER = "set in the caller's environment"
    PROFILE = "set by the profile"
    UNSET = "set by nobody"
    PROCESS = "found in the process"


@dataclass(frozen=True, slots=True)
class PinDifference:
    """A pin that does not hold.

    Attributes:
        name: The variable.
        expected: The profile's value; None if it must be unset.
        actual: What was effective instead; None if unset.
        origin: Who decided it.
        read_from: Where ``actual`` was read: ``environment``, or the library that was asked.
        is_certain: False if only a process that loads the library is affected, and the process is not known yet.
    """

    name: str
    expected: str | None
    actual: str | None
    origin: Origin
    read_from: str = "environment"
    is_certain: bool = True

    def __str__(self) -> str:
        """Render as one line that names the pin, both values and the origin."""
        expected = "unset" if self.expected is None else repr(self.expected)
        actual = "unset" if self.actual is None else repr(self.actual)
        source = self.origin.value
        if self.read_from != "environment":
            source = f"{source}, read from {self.read_from}"
        return f"{self.name}: the profile pins {expected}, effective is {actual} ({source})"


@dataclass(frozen=True, slots=True)
class EffectiveVariable:
    """A profile's variable in one child's environment."""

    variable: Variable
    value: str | None
    origin: Origin

    @property
    def differs(self) -> bool:
        """Whether the child's value is not the profile's."""
        return not self.variable.accepts(self.value)


@dataclass(frozen=True, slots=True)
class ChildEnvironment:
    """The environment that a child process is to be started with.

    Attributes:
        profile: The profile.
        variables: The whole environment, for ``subprocess``.
        settings: What became of each variable of the profile, and who decided it.
        explicit: What registration and ``--train-env-vars`` set, whether or not the profile knows the name.
    """

    profile: Profile
    variables: Mapping[str, str]
    settings: tuple[EffectiveVariable, ...]
    explicit: Mapping[str, str] = field(default_factory=dict)

    @property
    def pin_differences(self) -> list[PinDifference]:
        """The pins whose variable differs, before anything has run; uncertain where a library decides."""
        return [
            PinDifference(
                setting.variable.name,
                setting.variable.value,
                setting.value,
                setting.origin,
                is_certain=setting.variable.evidence in (Evidence.VARIABLE, Evidence.VARIABLE_AND_LIBRARY),
            )
            for setting in self.settings
            if setting.variable.is_pin and setting.differs
        ]

    def origin(self, name: str) -> Origin:
        """Return who decided a variable of the profile; :attr:`Origin.CALLER` for any other name."""
        return next((s.origin for s in self.settings if s.variable.name == name), Origin.CALLER)


def child_environment(
    profile: str | Profile,
    *,
    caller: Mapping[str, str],
    registration: Mapping[str, str] = NO_VARIABLES,
    train_env_vars: Mapping[str, str] = NO_VARIABLES,
    python: str | None = None,
) -> ChildEnvironment:
    """Return the environment for a child under a profile. Explicit values win: the profile only fills gaps.

    Precedence: ``train_env_vars``, ``registration``, ``caller``, the profile.

    Args:
        profile: The profile or its name.
        caller: The environment to inherit, usually ``os.environ``.
        registration: The registration's ``env=``.
        train_env_vars: What ``--train-env-vars`` gave.
        python: The child's interpreter, if it is known to be Python: its NumPy is asked for the names to disable.

    Raises:
        UsageError: There is no such profile.
    """
    explicit = {**registration, **train_env_vars}
    inherited = {**caller, **explicit}
    profile = get_profile(profile)
    if python is not None and "NPY_DISABLE_CPU_FEATURES" not in inherited:
        profile = profile.for_python(python, inherited)
    sources = (
        (Origin.TRAIN_ENV_VARS, train_env_vars),
        (Origin.REGISTRATION, registration),
        (Origin.CALLER, caller),
        (Origin.PROFILE, profile.variables),
    )

    def resolve(variable: Variable) -> EffectiveVariable:
        for origin, source in sources:
            if variable.name in source:
                return EffectiveVariable(variable, source[variable.name], origin)
        return EffectiveVariable(variable, None, Origin.UNSET)

    return ChildEnvironment(
        profile,
        {**profile.variables, **inherited},
        tuple(resolve(variable) for variable in profile.settings),
        explicit,
    )


def runtime_env_variables(
    profile: str | Profile,
    *,
    caller: Mapping[str, str],
    registration: Mapping[str, str] = NO_VARIABLES,
    train_env_vars: Mapping[str, str] = NO_VARIABLES,
    python: str | None = None,
) -> dict[str, str]:
    """Return what a Ray actor's ``runtime_env={"env_vars": ...}`` must state: every variable of the profile.

    An actor inherits the raylet's environment, not the driver's, and Ray sets ``OMP_NUM_THREADS`` by itself where
    nothing states it. These variables are in the worker's initial environment, so the ones read at process start
    take effect.

    Raises:
        UsageError: There is no such profile.
    """
    child = child_environment(
        profile, caller=caller, registration=registration, train_env_vars=train_env_vars, python=python
    )
    stated = {s.variable.name: s.value for s in child.settings if s.value is not None}
    return {**stated, **child.explicit}


#: Variables that may be recorded with a run, beside those of the profiles. An allow-list, because an environment
#: holds secrets; none of these does.
CAPTURED_VARIABLES: frozenset[str] = frozenset(
    variable.name for profile in PROFILES.values() for variable in profile.settings
) | {
    *("CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("TORCH_LINALG_PREFER_CUSOLVER", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_USE_HEURISTIC_MODE_B"),
    *("TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE", "TORCH_LINEAR_FLATTEN_3D"),
    *("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "PYTORCH_JIT", "PYTORCH_TUNABLEOP_TUNING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
    *("DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_ATTN_CHECKS", "XFORMERS_DISABLED", "VLLM_BATCH_INVARIANT"),
    *("TRITON_CACHE_AUTOTUNING", "TRITON_F32_DEFAULT", "TOKENIZERS_PARALLELISM", "GOTO_NUM_THREADS"),
    *("PYTHONOPTIMIZE", "PYTHONMALLOC", "LD_PRELOAD", "MALLOC_ARENA_MAX", "OMP_WAIT_POLICY"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}

#: Families of variables that may be recorded whole.
CAPTURED_PREFIXES = ("NCCL_", "NVTE_", "MKL_", "OMP_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "OPENBLAS_", "NPY_")

_LONGEST_VALUE = 400


def is_captured(name: str) -> bool:
    """Whether a variable may be recorded."""
    return name in CAPTURED_VARIABLES or name.startswith(CAPTURED_PREFIXES)


def captured_value(value: str) -> str:
    """Return a value as it is recorded: whole, or cut with a digest of the rest, so that two long ones differ."""
    if len(value) <= _LONGEST_VALUE:
        return value
    digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{value[:_LONGEST_VALUE]}... ({len(value)} characters, sha256 {digest})"


def capture_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that may be recorded, in name order."""
    return {name: captured_value(environment[name]) for name in sorted(environment) if is_captured(name)}


State = Mapping[str, Any]


def at(state: State | None, *path: str) -> Any:
    """Return a value out of nested mappings, None where a level is missing: a state may be another version's."""
    value: Any = state
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def judged_value(
    variable: Variable, state: State | None, child: ChildEnvironment | None = None
) -> tuple[str | None, bool]:
    """Return the value that decides whether ``variable`` holds, and whether any is known.

    It is what the process was started with, except that the current value counts for a variable that is read at
    each call, and for one that :func:`~e2e_registry.determinism.seeding.make_deterministic` set in time. Where
    the system does not tell the initial environment the current one stands in, and without a state what the
    launcher gave.
    """
    variables = at(state, "variables")
    if isinstance(variables, Mapping):
        entry = variables.get(variable.name)
        is_current = (
            variable.when is When.CALL
            or at(entry, "set_in_time") is True
            or at(state, "process", "initial_environment_known") is False
        )
        return at(entry, "current" if is_current else "initial"), True
    if child is not None:
        return child.variables.get(variable.name), True
    return None, state is not None  # a state without variables is judged as if none was set


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a library said of a pin: whether it holds, what is effective instead, and which library was asked."""

    holds: bool
    actual: str = ""
    source: str = ""


def _first_other(found: Mapping[str, Any], expected: str) -> _Answer | None:
    """Judge several libraries' answers by the first that differs; None if one could not be asked."""
    if None in found.values():
        return None
    other = [(source, str(value)) for source, value in found.items() if str(value).casefold() != expected.casefold()]
    return _Answer(False, other[0][1], other[0][0]) if other else _Answer(True)


def _openblas(key: str) -> Callable[[Variable, State], _Answer | None]:
    def ask(variable: Variable, state: State) -> _Answer | None:
        libraries = at(state, "determinism", "openblas")
        if not isinstance(libraries, list):
            return None
        if libraries and variable.value is None:
            return None
        return _first_other({str(at(lib, "library")): at(lib, key) for lib in libraries}, variable.value or "")

    return ask


def _numpy(variable: Variable, state: State) -> _Answer | None:
    determinism = at(state, "determinism")
    if not isinstance(determinism, Mapping) or "numpy" not in determinism or at(state, "unreadable", "numpy"):
        return None
    if determinism["numpy"] is None:
        return _Answer(True)
    targets = at(determinism, "numpy", "dispatch_targets")
    if not isinstance(targets, list) or variable.name != "NPY_DISABLE_CPU_FEATURES" or variable.value is None:
        return None
    above = [str(name) for name in targets if str(name) not in NUMPY_BASELINE]
    return _Answer(not above, f"{' '.join(above)} enabled", "numpy's __cpu_features__")


def _torch(state: State) -> Any:
    return at(state, "determinism", "torch")


def _threads(variable: Variable, state: State) -> _Answer | None:
    if _torch(state) is None:
        return None
    runtimes = {str(at(lib, "library")): at(lib, "max_threads") for lib in at(state, "determinism", "openmp") or []}
    return _first_other({"torch.get_num_threads()": at(_torch(state), "num_threads"), **runtimes}, variable.value or "")


def _mkl_threads(variable: Variable, state: State) -> _Answer | None:
    threads = at(_torch(state), "mkl", "max_threads")
    return None if threads is None else _first_other({"mkl_get_max_threads()": threads}, variable.value or "")


def _dynamic(_: Variable, state: State) -> _Answer | None:
    # One thread cannot become fewer, so the runtime's freedom to use fewer changes nothing.
    return _Answer(True) if at(_torch(state), "num_threads") == 1 else None


def _capability(variable: Variable, state: State) -> _Answer | None:
    actual = at(_torch(state), "cpu_capability")
    if actual is None or variable.value is None:
        return None
    return _first_other({"torch.backends.cpu.get_cpu_capability()": actual}, variable.value)


def _mkl_branch(variable: Variable, state: State) -> _Answer | None:
    actual = at(_torch(state), "mkl", "cbwr")
    if actual is None:
        return None
    if variable.value == "AUTO":  # MKL may answer with the branch that it chose for this CPU
        return _Answer(actual not in ("OFF", "COMPATIBLE"), str(actual), "mkl_cbwr_get()")
    return _first_other({"mkl_cbwr_get()": actual}, variable.value or "")


def _hash_seed(variable: Variable, state: State) -> _Answer | None:
    if at(state, "process", "hash_randomization") is None:
        return None
    return _Answer(not at(state, "process", "hash_randomization"), "random", "sys.flags.hash_randomization")


def _no_gpu(_: Variable, state: State) -> _Answer | None:
    if at(state, "unreadable", "gpus"):
        return None
    gpus = at(state, "gpus")
    used = len(gpus) if isinstance(gpus, list) else 0
    return _Answer(used == 0, f"{used} GPU(s) in use", "torch.cuda.is_initialized()")


_ASK: Mapping[str, Callable[[Variable, State], _Answer | None]] = {
    "OPENBLAS_CORETYPE": _openblas("core"),
    "OPENBLAS_NUM_THREADS": _openblas("threads"),
    "NPY_DISABLE_CPU_FEATURES": _numpy,
    "NPY_ENABLE_CPU_FEATURES": _numpy,
    "OMP_NUM_THREADS": _threads,
    "MKL_NUM_THREADS": _mkl_threads,
    "OMP_DYNAMIC": _dynamic,
    "MKL_DYNAMIC": _dynamic,
    "ATEN_CPU_CAPABILITY": _capability,
    "MKL_CBWR": _mkl_branch,
    "PYTHONHASHSEED": _hash_seed,
    "CUDA_VISIBLE_DEVICES": _no_gpu,
}


def pin_differences(
    profile: str | Profile, state: State | None, *, child: ChildEnvironment | None = None
) -> list[PinDifference]:
    """Return the pins of a profile that did not hold in a process, in the profile's order; empty if all held.

    Args:
        profile: The profile or its name.
        state: What the process read of itself (:func:`~e2e_registry.determinism.state.read_state`), perhaps back
            from JSON; None if nothing is known of it.
        child: What the process was started with, if the launcher knows: names who set a variable, and stands in
            for an unknown state.

    Raises:
        UsageError: There is no such profile.
    """
    differences = (pin_difference(variable, state, child) for variable in get_profile(profile).pins)
    return [difference for difference in differences if difference is not None]


def pin_difference(variable: Variable, state: State | None, child: ChildEnvironment | None) -> PinDifference | None:
    """Return how one pin fails to hold in a process; None if it holds, or if nothing is known of it."""
    value, is_known = judged_value(variable, state, child)
    answer = _ASK[variable.name](variable, state) if state is not None and variable.name in _ASK else None
    if variable.evidence is Evidence.LIBRARY and answer is not None and answer.holds:
        return None
    if variable.evidence is Evidence.VARIABLE_IF_LOADED and state is not None and not has_loaded(state, variable):
        return None
    is_given = child is not None and child.variables.get(variable.name) == value
    origin = child.origin(variable.name) if child is not None and is_given else Origin.PROCESS
    if answer is not None and not answer.holds and (variable.evidence is Evidence.LIBRARY or variable.accepts(value)):
        source = Origin.PROCESS if variable.accepts(value) else origin
        return PinDifference(variable.name, variable.value, answer.actual, source, answer.source)
    if not is_known or variable.accepts(value):
        return None
    return PinDifference(variable.name, variable.value, value, origin)


def has_loaded(state: State, variable: Variable) -> bool:
    """Whether a process had imported a module that reads ``variable``."""
    software = at(state, "software")
    return isinstance(software, Mapping) and any(module in software for module in variable.modules)
