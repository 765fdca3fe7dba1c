"""The effective determinism state of this process, as its libraries answer, not as they were asked to be.

Reads only: it imports no library by itself, starts no CUDA and loads no shared object. A library that is not
loaded is reported as None, a value that cannot be read is None too. One trace remains: a loaded MKL that had not
been used yet reads its variables when it is asked. Needs the standard library alone, takes a few milliseconds,
and never raises: what failed is listed under ``unreadable``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from e2e_registry.determinism.variables import capture_variables

T = TypeVar("T")

STATE_FORMAT = 1

#: Modules whose version is part of a run's environment, if they are loaded.
SOFTWARE = (
    *("torch", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "polars", "ray", "diffusers", "transformers"),
    *("accelerate", "peft", "trl", "datasets", "tokenizers", "safetensors", "bitsandbytes", "deepspeed"),
    *("flash_attn", "flash_attn_3", "xformers", "sageattention", "triton", "transformer_engine", "megatron"),
    *("mamba_ssm", "causal_conv1d", "apex", "vllm", "sglang", "jax", "jaxlib", "tensorflow", "torchvision", "PIL"),
)

#: Instruction sets that numeric libraries choose kernels by, as ``/proc/cpuinfo`` names them.
CPU_FLAGS = (
    *("sse4_1", "sse4_2", "avx", "f16c", "fma", "fma4", "avx2", "avx512f", "avx512cd", "avx512bw", "avx512dq"),
    *("avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "asimdfhm", "sve", "sve2", "bf16", "i8mm"),
)

#: Variables that this package set inside this process, and whether their reader had not yet started by then.
_SET_IN_PROCESS: dict[str, bool] = {}


def set_in_process(name: str, value: str, *, in_time: bool) -> None:
    """Set a variable of this process and remember whether it came in time, which cannot be seen afterwards."""
    os.environ[name] = value
    _SET_IN_PROCESS[name] = in_time


def was_set_in_time(name: str) -> bool:
    """Whether this package set the variable inside this process before its reader had started."""
    return _SET_IN_PROCESS.get(name, False)


@functools.cache
def initial_environment() -> Mapping[str, str] | None:
    """Return the environment that this process was started with; None where the system does not keep it.

    Linux keeps it in ``/proc/self/environ``: ``os.environ`` and ``setenv`` never reach it. A program that writes
    its title over that memory destroys it, which shows as entries without ``=``. Forked children share their
    parent's, which is right: they share its loaded libraries too.
    """
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    entries = raw.rstrip(b"\0").split(b"\0") if raw.strip(b"\0") else []
    if any(b"=" not in entry for entry in entries):
        return None
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries)


def read_state() -> dict[str, Any]:
    """Return the state of this process as a JSON-able mapping.

    Groups: ``process``, ``platform``, ``software`` (loaded modules of :data:`SOFTWARE` with their versions),
    ``gpus`` (None unless CUDA was started here), ``determinism``, ``variables`` (name to ``initial`` and
    ``current`` value of the captured ones, ``late`` if they differ), and ``unreadable`` (what failed, and how).
    """
    unreadable: dict[str, str] = {}

    def attempt(name: str, probe: Callable[[], T]) -> T | None:
        try:
            return probe()
        except Exception as error:  # noqa: BLE001 - a probe of foreign libraries must not end someone's training
            unreadable[name] = f"{type(error).__name__}: {error}"[:200]
            return None

    libraries = attempt("libraries", mapped_libraries) or []
    return {
        "format": STATE_FORMAT,
        "process": attempt("process", _process),
        "platform": attempt("platform", _platform),
        "software": attempt("software", _software),
        "gpus": attempt("gpus", _gpus),
        "determinism": {
            "torch": attempt("torch", lambda: _torch(libraries)),
            "numpy": attempt("numpy", _numpy),
            "openblas": attempt("openblas", lambda: _openblas(libraries)),
            "openmp": attempt("openmp", lambda: _openmp(libraries)),
            "flush_denormal": attempt("flush_denormal", flushes_denormals),
        },
        "variables": attempt("variables", read_variables),
        "unreadable": unreadable,
    }


def read_variables() -> dict[str, dict[str, Any]]:
    """Return the captured variables: what the process was started with, and what they are now.

    A variable whose values differ was set (or removed) late: a library that read it before still has the old one.
    ``set_in_time`` is there only where this package set it, and says whether its reader had not started yet.
    """
    initial = initial_environment()
    then = capture_variables(os.environ if initial is None else initial)
    now = capture_variables(os.environ)
    variables: dict[str, dict[str, Any]] = {}
    for name in sorted({*then, *now}):
        entry: dict[str, Any] = {"initial": then.get(name), "current": now.get(name)}
        entry["late"] = entry["initial"] != entry["current"]
        if name in _SET_IN_PROCESS and entry["late"]:
            entry["set_in_time"] = _SET_IN_PROCESS[name]
        variables[name] = entry
    return variables


def _process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": os.path.basename(sys.executable),
        "optimize": sys.flags.optimize,
        "hash_randomization": bool(sys.flags.hash_randomization),
        "ignores_environment": bool(sys.flags.ignore_environment),
        "initial_environment_known": initial_environment() is not None,
    }


def _platform() -> dict[str, Any]:
    cpu = _first_cpu()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_model": cpu.get("model name") or cpu.get("CPU part"),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "libc": _libc(),
        "kernel": platform.release(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return " ".join(platform.libc_ver()).strip() or None


@functools.cache
def _first_cpu() -> dict[str, str]:
    """Read the first CPU's entry only: the kernel makes the others on demand, and there may be hundreds."""
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(1 << 14).decode("utf-8", "replace")
    except OSError:
        return {}
    entry = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in entry.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _software() -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for name in SOFTWARE:
        module = sys.modules.get(name)
        if module is not None:
            version = getattr(module, "__version__", None)
            versions[name] = None if version is None else str(version)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        versions["torch_build"] = _torch_build(torch)
    return versions


def _torch_build(torch: Any) -> dict[str, Any]:
    config = torch.__config__.show()
    found = {
        name: match.group(1)
        for name, pattern in (("mkl", r"Math Kernel Library Version (\S+)"), ("onednn", r"MKL-DNN (v\S+)"))
        if (match := re.search(pattern, config))
    }
    has_nccl = torch.version.cuda is not None and hasattr(torch._C, "_nccl_version")
    # The CPU's capability stands in the text too, which is no property of the build.
    text = "\n".join(line for line in config.splitlines() if "CPU capability usage" not in line)
    return {
        "git": getattr(torch.version, "git_version", None),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda is not None else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        **found,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def _gpus() -> list[dict[str, Any]] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    driver = _driver_version()
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "memory_bytes": device.total_memory,
            "driver": driver,
        }
        for device in properties
    ]


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else None


def _torch(libraries: Sequence[str]) -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C") or not hasattr(torch, "backends"):
        return None  # not loaded, or in the middle of its import
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": {
            "enabled": torch.backends.cudnn.enabled,
            "deterministic": torch.backends.cudnn.deterministic,
            "benchmark": torch.backends.cudnn.benchmark,
        },
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "fp32_precision": fp32_precisions(torch),
        "reduced_precision_reduction": {
            "fp16": _plain(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
            "bf16": _plain(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        },
        "num_threads": torch.get_num_threads(),
        "portable_operators": _portable_operators(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": _mkl(torch, libraries),
        "cublas_workspace_bytes": _cublas_workspace(torch),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        },
    }


def _portable_operators() -> bool:
    portable = sys.modules.get("e2e_registry.determinism.portable")
    return portable is not None and bool(portable.portable_operators_are_enabled())


def _cublas_workspace(torch: Any) -> int | None:
    reader = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    return int(reader()) if reader is not None and torch.cuda.is_initialized() else None


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str | None) else str(value)


#: The float32 precisions that do not round their inputs, as ``tf32`` and ``bf16`` do; ``none`` is the default.
FULL_PRECISION = ("ieee", "none")

_FP32_OPERATIONS = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)


def fp32_precisions(torch: Any) -> dict[str, str]:
    """Return torch's precision of float32 work by backend and operation.

    Read by the getter that cannot raise: ``allow_tf32`` does where a program mixed the old and new switches.
    """
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        return {f"{backend}.{operation}": getter(backend, operation) for backend, operation in _FP32_OPERATIONS}
    allowed = {"cuda.matmul": torch.backends.cuda.matmul.allow_tf32, "cuda.conv": torch.backends.cudnn.allow_tf32}
    return {name: "tf32" if is_allowed else "ieee" for name, is_allowed in allowed.items()}


#: The option of ``mkl_cbwr_get`` that asks for the branch, and its answers. Source: mkl_types.h.
_CNR_BRANCH = 1
_CNR_BRANCHES = {
    0: "OFF",
    1: "OFF",
    2: "AUTO",
    3: "COMPATIBLE",
    4: "SSE2",
    6: "SSSE3",
    7: "SSE4_1",
    8: "SSE4_2",
    9: "AVX",
    10: "AVX2",
    11: "AVX512_MIC",
    12: "AVX512",
    13: "AVX512_MIC_E1",
    14: "AVX512_E1",
}


def _mkl(torch: Any, libraries: Sequence[str]) -> dict[str, Any] | None:
    """Ask the MKL inside torch for its threads and for the code branch that MKL_CBWR left it with.

    Source: mkl_service.h (``mkl_cbwr_get``); a static MKL exports it by its internal name.
    """
    if not torch.backends.mkl.is_available():
        return None
    branch = None
    for path in _matching(libraries, r"lib(torch_cpu|mkl_core|mkl_rt)\."):
        get_branch = _function(path, ("MKL_CBWR_Get", "mkl_serv_cbwr_get"))
        if get_branch is not None:
            code = int(get_branch(ctypes.c_int(_CNR_BRANCH)))
            branch = _CNR_BRANCHES.get(code, str(code))
            break
    threads = re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    return {"max_threads": int(threads.group(1)) if threads else None, "cbwr": branch}


def _numpy() -> dict[str, Any] | None:
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules.get("numpy.core._multiarray_umath")
    if core is None:
        return None
    features: Mapping[str, bool] = core.__cpu_features__
    return {"dispatch_targets": [name for name in core.__cpu_dispatch__ if features.get(name)]}


def _openblas(libraries: Sequence[str]) -> list[dict[str, Any]]:
    """Ask every OpenBLAS that is mapped into this process; names as in NumPy's, SciPy's and distributions' builds."""
    answers = []
    for path in _matching(libraries, r"lib.*openblas.*\."):
        core = _openblas_function(path, "get_corename")
        config = _openblas_function(path, "get_config")
        threads = _openblas_function(path, "get_num_threads")
        answers.append(
            {
                "library": os.path.basename(path),
                "core": _text(core),
                "threads": int(threads()) if threads is not None else None,
                "version": (_text(config) or "").removeprefix("OpenBLAS ").split(" ")[0] or None,
            }
        )
    return answers


def _openblas_function(path: str, name: str) -> Any:
    return _function(path, [f"{prefix}openblas_{name}{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")])


def _text(function: Any) -> str | None:
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    value = function()
    return value.decode("ascii", "replace") if value else None


def _openmp(libraries: Sequence[str]) -> list[dict[str, Any]]:
    answers = []
    for path in _matching(libraries, r"lib(gomp|iomp5|omp)\b"):
        threads = _function(path, ("omp_get_max_threads",))
        answers.append({"library": os.path.basename(path), "max_threads": int(threads()) if threads else None})
    return answers


def mapped_libraries() -> list[str]:
    """Return the paths of the shared objects in this process, in name order; none where there is no ``/proc``."""
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    paths = {line[line.index("/") :] for line in text.splitlines() if "/" in line}
    return sorted(path for path in paths if ".so" in path)


def _matching(libraries: Sequence[str], pattern: str) -> list[str]:
    return [path for path in libraries if re.match(pattern, os.path.basename(path))]


def _function(path: str, names: Sequence[str]) -> Any:
    """Return the first of ``names`` that a mapped library exports; a library that is not loaded stays so."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
    except OSError:
        return None
    for name in names:
        try:
            return getattr(library, name)
        except AttributeError:
            continue
    return None


def flushes_denormals() -> bool:
    """Whether this thread's floating-point unit takes subnormal numbers for zero, as ``-ffast-math`` libraries set.

    Plain float64 arithmetic on values read at run time, so it needs no library and no interpreter can fold it.
    """
    smallest_normal, half = sys.float_info.min, float("0.5")
    subnormal = float("5e-324")
    return smallest_normal * half == 0.0 or subnormal + subnormal == 0.0
