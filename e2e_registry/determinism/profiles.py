"""The determinism profiles: which environment variables decide bits, what reads each, and when.

A *profile* is a set of variables that a process must be started with, and the torch switches that go with it
(:mod:`~e2e_registry.determinism.switches`). A variable is a *pin* if the bits of two runs (or two machines) are
comparable only while it holds, else it is *advisory*. Needs the standard library alone.

Facts were checked with torch 2.13.0 (CPU build, MKL 2024.2, oneDNN 3.12), NumPy 2.2, 2.3 and 2.4, glibc 2.36.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from e2e_registry.errors import UsageError

#: An absent mapping argument.
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class When(enum.Enum):
    """The latest moment at which setting a variable still has an effect.

    Some libraries read theirs at their first call rather than when they are loaded (MKL its ``MKL_CBWR``), which
    cannot be seen from outside; both are ``LIBRARY_LOAD``.
    """

    PROCESS_START = "process start"
    LIBRARY_LOAD = "library load"
    CUDA_START = "CUDA start"
    NCCL_INIT = "NCCL init"
    CALL = "each call"


class Evidence(enum.Enum):
    """What decides whether a pin held."""

    VARIABLE = "the initial variable"
    VARIABLE_AND_LIBRARY = "the initial variable, and the library where it can be asked"
    LIBRARY = "the library where the process is known, else the initial variable"
    VARIABLE_IF_LOADED = "the initial variable, if a library that reads it was loaded"


def _exact(value: str) -> str:
    return value


def _hwcaps(value: str) -> str:
    """Reduce GLIBC_TUNABLES to the CPU features that it hides from libm; other tunables change no bits.

    glibc takes the last ``glibc.cpu.hwcaps``; case matters, order does not.
    """
    hidden: set[str] = set()
    for tunable in value.split(":"):
        name, _, text = tunable.partition("=")
        if name == "glibc.cpu.hwcaps":
            hidden = {item.removesuffix("_Usable") for item in text.split(",")} & _HIDDEN_FROM_LIBM
    return ",".join(sorted(hidden))


def _names(value: str) -> str:
    return " ".join(sorted(set(value.replace(",", " ").split())))


def _cnr_branch(value: str) -> str:
    return value.removeprefix("BRANCH=")


def _off_by_default(value: str) -> str:
    return "" if value in ("", "0") else value


_HIDDEN_FROM_LIBM = frozenset({"-AVX2", "-FMA", "-FMA4", "-AVX512F"})

#: glibc 2.29 to 2.32 chooses by the ``_Usable`` names, later versions by the plain ones; each ignores the other's.
HIDE_FROM_LIBM = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX2_Usable,-FMA_Usable,-FMA4_Usable,-AVX512F_Usable"

#: NumPy dispatch targets that every CPU of the portable platform has (x86-64-v2); NumPy 2.4 builds them in.
NUMPY_BASELINE = frozenset({"SSE", "SSE2", "SSE3", "SSSE3", "SSE41", "POPCNT", "SSE42", "X86_V2"})

#: Every dispatch target above x86-64-v2 that a NumPy from 1.26 to 2.4 has. NumPy refuses to load when a name of
#: its baseline is disabled, and ignores unknown names with an ImportWarning (hidden by default, fatal under
#: ``-W error``); :func:`numpy_disable_value` leaves them out for one interpreter.
NUMPY_TARGETS = (
    *("AVX", "F16C", "XOP", "FMA4", "FMA3", "AVX2", "AVX512F", "AVX512CD", "AVX512_KNL", "AVX512_KNM"),
    *("AVX512_SKX", "AVX512_CLX", "AVX512_CNL", "AVX512_ICL", "AVX512_SPR", "X86_V3", "X86_V4"),
)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of a profile.

    Attributes:
        name: The variable.
        value: What the profile sets; None if it must be absent.
        reader: What reads it.
        when: The latest moment at which setting it has an effect.
        is_pin: Whether bits are comparable only while it holds.
        why: What it does, and what happens without it.
        evidence: What decides whether it held. Advisory variables are judged by the variable.
        modules: Python modules whose import loads the reader, for :attr:`When.LIBRARY_LOAD` and
            :attr:`Evidence.VARIABLE_IF_LOADED`; empty if anything may load it.
        canonical: Reduces a value to what its reader makes of it, so that spellings compare equal.
    """

    name: str
    value: str | None
    reader: str
    when: When
    is_pin: bool
    why: str
    evidence: Evidence = Evidence.VARIABLE
    modules: tuple[str, ...] = ()
    canonical: Callable[[str], str] = _exact

    def accepts(self, value: str | None) -> bool:
        """Whether the reader makes the same of ``value`` as of the profile's value; None and "" are unset."""
        return self.canonical(value or "") == self.canonical(self.value or "")

    @property
    def setting(self) -> str:
        """The variable as one writes it."""
        return f"{self.name}={self.value}" if self.value is not None else f"{self.name} unset"


_NUMERIC = ("torch", "numpy", "scipy", "sklearn")

_HASH_SEED = Variable(
    *("PYTHONHASHSEED", "0", "the Python interpreter", When.PROCESS_START, True),
    why="fixes the iteration order of sets of strings; set inside a running interpreter it does nothing, and "
    "`python -I` and `-E` ignore it",
    evidence=Evidence.VARIABLE_AND_LIBRARY,
)

_THREADS = (
    Variable(
        *("OMP_NUM_THREADS", "1", "the OpenMP runtime of torch, MKL, oneDNN and scikit-learn", When.LIBRARY_LOAD, True),
        why="the number of threads decides how sums are split, hence their bits; Ray sets it to an actor's CPUs",
        evidence=Evidence.LIBRARY,
        modules=_NUMERIC,
    ),
    Variable(
        *("MKL_NUM_THREADS", "1", "MKL inside torch", When.LIBRARY_LOAD, True),
        why="MKL takes it before OMP_NUM_THREADS, and torch takes MKL's number",
        evidence=Evidence.LIBRARY,
        modules=_NUMERIC,
    ),
    Variable(
        *("OPENBLAS_NUM_THREADS", "1", "OpenBLAS inside NumPy and SciPy", When.LIBRARY_LOAD, True),
        why="OpenBLAS takes it before OMP_NUM_THREADS",
        evidence=Evidence.LIBRARY,
        modules=("numpy", "scipy"),
    ),
    Variable(
        *("OMP_DYNAMIC", "FALSE", "the OpenMP runtime", When.LIBRARY_LOAD, True),
        why="keeps the runtime from using fewer threads under load; of no effect while one thread is used",
        evidence=Evidence.LIBRARY,
        modules=_NUMERIC,
        canonical=str.casefold,
    ),
    Variable(
        *("MKL_DYNAMIC", "FALSE", "MKL inside torch", When.LIBRARY_LOAD, True),
        why="keeps MKL from using fewer threads as it sees fit; of no effect while one thread is used",
        evidence=Evidence.LIBRARY,
        modules=_NUMERIC,
        canonical=str.casefold,
    ),
)

_NO_GPU = Variable(
    *("CUDA_VISIBLE_DEVICES", "", "the CUDA driver", When.CUDA_START, True),
    why="keeps a recipe that prefers CUDA on the CPU; judged by whether the process started CUDA",
    evidence=Evidence.LIBRARY,
)

_REPEATABLE_MKL = Variable(
    *("MKL_CBWR", "AUTO", "MKL inside torch", When.LIBRARY_LOAD, True),
    why="without it MKL picks kernels by the alignment of memory: one float32 matrix-vector product gave four "
    "results at sixteen alignments, on one thread",
    evidence=Evidence.VARIABLE_AND_LIBRARY,
    modules=("torch",),
    canonical=_cnr_branch,
)

_PORTABLE_KERNELS = (
    Variable(
        *("ATEN_CPU_CAPABILITY", "default", "torch's own CPU kernels", When.LIBRARY_LOAD, True),
        why="torch compiles each kernel for several instruction sets; 'default' is the baseline (case matters: "
        "'DEFAULT' is ignored with a warning)",
        evidence=Evidence.VARIABLE_AND_LIBRARY,
        modules=("torch",),
    ),
    Variable(
        *("MKL_CBWR", "COMPATIBLE", "MKL inside torch", When.LIBRARY_LOAD, True),
        why="one code path on every CPU; on CPUs that are not Intel's every other value means AUTO (case matters)",
        evidence=Evidence.VARIABLE_AND_LIBRARY,
        modules=("torch",),
        canonical=_cnr_branch,
    ),
    Variable(
        *("ONEDNN_MAX_CPU_ISA", "SSE41", "oneDNN inside torch", When.LIBRARY_LOAD, True),
        why="convolutions and low-precision products; takes precedence over the older DNNL_MAX_CPU_ISA",
        modules=("torch",),
        canonical=str.casefold,
    ),
    Variable(
        *("NPY_DISABLE_CPU_FEATURES", " ".join(NUMPY_TARGETS), "NumPy's own kernels", When.LIBRARY_LOAD, True),
        why="exp, log, pow and others have kernels per instruction set",
        evidence=Evidence.LIBRARY,
        modules=("numpy",),
        canonical=_names,
    ),
    Variable(
        *("NPY_ENABLE_CPU_FEATURES", None, "NumPy's own kernels", When.LIBRARY_LOAD, True),
        why="NumPy refuses to load where both this and NPY_DISABLE_CPU_FEATURES are set",
        evidence=Evidence.LIBRARY,
        modules=("numpy",),
        canonical=_names,
    ),
    Variable(
        *("OPENBLAS_CORETYPE", "Nehalem", "OpenBLAS inside NumPy and SciPy", When.LIBRARY_LOAD, True),
        why="each core type has kernels of its own; OPENBLAS_L2_SIZE and OPENBLAS_BLOCK_FACTOR change the block "
        "of rows only and no bits",
        evidence=Evidence.LIBRARY,
        modules=("numpy", "scipy"),
        canonical=str.casefold,
    ),
    Variable(
        *("GLIBC_TUNABLES", HIDE_FROM_LIBM, "glibc's libm (Python's math, and C code)", When.PROCESS_START, True),
        why="exp, sin, cos, pow have FMA variants that round differently",
        canonical=_hwcaps,
    ),
)

_NATIVE_KERNELS = (
    *(
        dataclasses.replace(variable, value=None, why="would hide instructions that the platform's name promises")
        for variable in _PORTABLE_KERNELS
        if variable.name != "MKL_CBWR"
    ),
    Variable(
        *("DNNL_MAX_CPU_ISA", None, "oneDNN inside torch", When.LIBRARY_LOAD, True),
        why="the older name of ONEDNN_MAX_CPU_ISA, read where that one is unset",
        modules=("torch",),
    ),
)

_CUDA = (
    Variable(
        *("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuBLAS and torch", When.CUDA_START, True),
        why="without it cuBLAS may reorder sums, and torch's deterministic mode raises at the first matrix product; "
        ":16:8 is deterministic too but limits cuBLASLt's workspace; about 32 MiB a handle",
    ),
    Variable(
        *("NCCL_ALGO", "^NVLS", "NCCL", When.NCCL_INIT, True),
        why="reductions inside the switch have no fixed order; torch sets the same in deterministic mode, but only "
        "before the process's first communicator and only if unset",
    ),
    Variable(
        *("NCCL_DETERMINISTIC", "1", "nothing", When.NCCL_INIT, False),
        why="no current NCCL reads it (2.30.7 does not); set because frameworks expect it, not to be relied on",
    ),
    Variable(
        *("FLASH_ATTENTION_DETERMINISTIC", "1", "transformers", When.CALL, True),
        why="makes transformers pass deterministic=True to flash-attn, which does not read it by itself",
        evidence=Evidence.VARIABLE_IF_LOADED,
        modules=("transformers",),
    ),
    Variable(
        *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "Transformer Engine", When.CALL, True),
        why="its attention backward uses atomics otherwise",
        evidence=Evidence.VARIABLE_IF_LOADED,
        modules=("transformer_engine",),
    ),
    Variable(
        *("MAMBA_DETERMINISTIC", "1", "mamba_ssm", When.CALL, True),
        why="its scan's backward adds atomically and times kernels otherwise",
        evidence=Evidence.VARIABLE_IF_LOADED,
        modules=("mamba_ssm",),
    ),
    Variable(
        *("CAUSAL_CONV1D_DETERMINISTIC", "1", "causal_conv1d", When.CALL, True),
        why="its weight gradient adds atomically otherwise",
        evidence=Evidence.VARIABLE_IF_LOADED,
        modules=("causal_conv1d",),
    ),
    Variable(
        *("TORCHINDUCTOR_DETERMINISTIC", "1", "torch.compile", When.LIBRARY_LOAD, False),
        why="choices by timing off; use_deterministic_algorithms(True) sets the same in its own process",
        modules=("torch._inductor",),
    ),
    Variable(
        *("NVIDIA_TF32_OVERRIDE", None, "cuBLAS and cuDNN", When.CUDA_START, True),
        why="1 turns TF32 on whatever torch says",
        canonical=_off_by_default,
    ),
    Variable(
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None, "torch", When.LIBRARY_LOAD, True),
        why="1 starts the process with TF32 matrix products",
        modules=("torch",),
        canonical=_off_by_default,
    ),
    Variable(
        *("PYTORCH_TUNABLEOP_ENABLED", None, "torch", When.CALL, True),
        why="picks kernels by timing them",
        modules=("torch",),
        canonical=_off_by_default,
    ),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """The determinism settings that a test runs under.

    Attributes:
        name: ``cpu-portable``, ``cpu-native`` or ``cuda``.
        promise: For what its bits are comparable.
        settings: The variables, in the order in which reports show them.
    """

    name: str
    promise: str
    settings: tuple[Variable, ...]

    @property
    def variables(self) -> dict[str, str]:
        """Name to value of everything that the profile sets."""
        return {variable.name: variable.value for variable in self.settings if variable.value is not None}

    @property
    def pins(self) -> tuple[Variable, ...]:
        """The variables that must hold."""
        return tuple(variable for variable in self.settings if variable.is_pin)

    def variable(self, name: str) -> Variable | None:
        """Return the profile's variable of that name."""
        return next((variable for variable in self.settings if variable.name == name), None)

    def for_python(self, python: str, environment: Mapping[str, str] = NO_VARIABLES) -> Profile:
        """Return the profile with the names that the NumPy of one interpreter knows, so that it does not warn.

        Args:
            python: The child's interpreter.
            environment: The child's environment (a ``PYTHONPATH`` may choose another NumPy).
        """
        if "NPY_DISABLE_CPU_FEATURES" not in self.variables:
            return self
        value = numpy_disable_value(python, environment.get("PYTHONPATH", ""))
        return dataclasses.replace(
            self,
            settings=tuple(
                dataclasses.replace(v, value=value) if v.name == "NPY_DISABLE_CPU_FEATURES" else v
                for v in self.settings
            ),
        )


#: The profile of what names none.
DEFAULT_PROFILE = "cpu-portable"

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(
                "cpu-portable",
                "one set of bits on every x86-64 CPU (x86-64-v2 or later), for one software stack",
                (*_PORTABLE_KERNELS, *_THREADS, _HASH_SEED, _NO_GPU),
            ),
            Profile(
                "cpu-native",
                "one set of bits on CPUs of one instruction set, for one software stack",
                (*_NATIVE_KERNELS, _REPEATABLE_MKL, *_THREADS, _HASH_SEED, _NO_GPU),
            ),
            Profile(
                "cuda",
                "one set of bits on one kind of GPU, topology and software stack",
                (*_CUDA, _REPEATABLE_MKL, *_THREADS, _HASH_SEED),
            ),
        )
    }
)


def get_profile(profile: str | Profile) -> Profile:
    """Return a profile by name; a :class:`Profile` is passed through.

    Raises:
        UsageError: There is no such profile.
    """
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise UsageError(f"no determinism profile {profile!r}", hint=f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[profile]


_READ_DISPATCH = (
    "import json\n"
    "try: from numpy._core._multiarray_umath import __cpu_dispatch__ as names\n"
    "except ImportError: from numpy.core._multiarray_umath import __cpu_dispatch__ as names\n"
    "print(json.dumps(list(names)))"
)


@functools.cache
def numpy_disable_value(python: str = sys.executable, python_path: str = "") -> str:
    """Return ``NPY_DISABLE_CPU_FEATURES`` for the NumPy of one interpreter: its dispatch targets above x86-64-v2.

    The interpreter is asked once per process (about 0.15 s); NumPy is not imported here. Where it has no NumPy
    or cannot be asked, the answer is every known name (:data:`NUMPY_TARGETS`), which is right but makes NumPy
    warn of the names that it does not know.
    """
    import json
    import subprocess

    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPY_")}
    if python_path:
        environment["PYTHONPATH"] = python_path
    try:
        answer = subprocess.run(
            [python, "-c", _READ_DISPATCH], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        names = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        names = list(NUMPY_TARGETS)
    return " ".join(name for name in names if name not in NUMPY_BASELINE)
