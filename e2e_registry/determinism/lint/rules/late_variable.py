"""DET003: determinism variables written after torch is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.environment_writes import EnvironmentWrite, environment_writes
from e2e_registry.determinism.lint.module import Module
from e2e_registry.determinism.lint.rule import Rule, Violation

_AT_IMPORT = "it is read while torch and its libraries load, so this process does not see the write"
_BEFORE_CUDA = "it counts only if nothing has started CUDA yet, which an earlier import or call may have done"
_BEFORE_GROUP = "it is read when the first process group starts, which may be before this line"
_BEFORE_MODEL = "it is read when the library is imported or the model is built, which may be before this line"
_AT_START = "it is read when the process starts, so this write reaches child processes only"

#: Variable to when it is read.
_READ_WHEN = {
    "CUBLAS_WORKSPACE_CONFIG": _BEFORE_CUDA,
    "NVIDIA_TF32_OVERRIDE": _BEFORE_CUDA,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _BEFORE_CUDA,
    "NCCL_DETERMINISTIC": _BEFORE_GROUP,
    "NCCL_ALGO": _BEFORE_GROUP,
    "NCCL_PROTO": _BEFORE_GROUP,
    "NCCL_NVLS_ENABLE": _BEFORE_GROUP,
    "HCCL_DETERMINISTIC": _BEFORE_GROUP,
    "FLASH_ATTENTION_DETERMINISTIC": _BEFORE_MODEL,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": _BEFORE_MODEL,
    "MAMBA_DETERMINISTIC": _BEFORE_MODEL,
    "CAUSAL_CONV1D_DETERMINISTIC": _BEFORE_MODEL,
    "TORCHINDUCTOR_DETERMINISTIC": _BEFORE_MODEL,
    "OMP_NUM_THREADS": _AT_IMPORT,
    "OMP_DYNAMIC": _AT_IMPORT,
    "MKL_NUM_THREADS": _AT_IMPORT,
    "MKL_DYNAMIC": _AT_IMPORT,
    "MKL_CBWR": _AT_IMPORT,
    "ONEDNN_MAX_CPU_ISA": _AT_IMPORT,
    "DNNL_MAX_CPU_ISA": _AT_IMPORT,
    "ATEN_CPU_CAPABILITY": _AT_IMPORT,
    "OPENBLAS_NUM_THREADS": _AT_IMPORT,
    "OPENBLAS_CORETYPE": _AT_IMPORT,
    "NPY_DISABLE_CPU_FEATURES": _AT_IMPORT,
    "GLIBC_TUNABLES": _AT_START,
}
#: Packages whose import loads torch.
_LOADS_TORCH = frozenset(
    {
        "torch",
        "torchvision",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "accelerate",
        "deepspeed",
        "lightning",
        "peft",
        "pytorch_lightning",
        "timm",
    }
)


class LateVariable(Rule):
    """A variable that libraries read early, written where torch is already imported."""

    code = "DET003"
    name = "late-variable"
    summary = "a determinism variable is written after torch is imported"
    why = (
        "Libraries read these variables once: thread counts and CPU kernel choices while they load, cuBLAS when CUDA "
        "starts, NCCL when the first process group starts. A later write succeeds, shows up in `os.environ`, and "
        "changes nothing, or changes it in some entry points and not in others."
    )
    fix = (
        "Set it in the environment that the process is started with: the job's environment, the launcher, Ray's "
        "`runtime_env`. Where a script must set it for itself, do so before the first import of torch."
    )
    flagged = """
import os

import torch

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
"""
    clean = """
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
"""
    triggers = tuple(_READ_WHEN)

    def check(self, module: Module) -> Iterator[Violation]:
        """Report writes that run after an import that the same file makes."""
        imports = _torch_imports(module)
        if not imports:
            return
        for write in environment_writes(module):
            if write.variable in _READ_WHEN and _runs_after(module, write, imports):
                yield Violation(
                    write.node, f"`{write.variable}` is written after torch is imported: {_READ_WHEN[write.variable]}"
                )


def _torch_imports(module: Module) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in module.nodes(ast.Import):
        if any(alias.name.split(".")[0] in _LOADS_TORCH for alias in statement.names):
            found.append(statement)
    for from_statement in module.nodes(ast.ImportFrom):
        if from_statement.level == 0 and (from_statement.module or "").split(".")[0] in _LOADS_TORCH:
            found.append(from_statement)
    return [statement for statement in found if not _is_for_types_only(module, statement)]


def _is_for_types_only(module: Module, statement: ast.stmt) -> bool:
    return any(
        isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test)
        for outer in module.ancestors(statement)
    )


def _runs_after(module: Module, write: EnvironmentWrite, imports: list[ast.Import | ast.ImportFrom]) -> bool:
    function = module.enclosing_function(write.node)
    for statement in imports:
        importer = module.enclosing_function(statement)
        if importer is function and statement.lineno < write.node.lineno:
            return True
        # A function's body runs after the whole file was imported, wherever it stands.
        if importer is None and function is not None and not _is_called_before(module, function, statement):
            return True
    return False


def _is_called_before(module: Module, function: ast.AST, statement: ast.stmt) -> bool:
    """Whether the file calls ``function`` at import time, above ``statement``."""
    name = getattr(function, "name", "")
    return any(
        isinstance(module.parent(use), ast.Call) and use.lineno < statement.lineno
        for use in module.names.names(name)
        if module.enclosing_function(use) is None
    )
