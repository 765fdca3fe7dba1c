"""DET004: PYTHONHASHSEED set from inside."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.environment_writes import environment_writes
from e2e_registry.determinism.lint.module import Module
from e2e_registry.determinism.lint.rule import Rule, Violation

_EXEC_PREFIX = "os.exec"


class HashSeedInProcess(Rule):
    """``os.environ["PYTHONHASHSEED"] = ...`` in a process that goes on running."""

    code = "DET004"
    name = "hash-seed-in-process"
    summary = "PYTHONHASHSEED is set from inside the process"
    why = (
        "The interpreter reads it before it runs a line of Python. Setting it later leaves the hashes of this process "
        "random, so the order of sets of strings still changes from run to run; only child processes see the value."
    )
    fix = (
        "Start the process with it: `PYTHONHASHSEED=0 python train.py`, the job's environment, Ray's `runtime_env`. "
        "Better still, do not let the order of a set matter."
    )
    flagged = """
import os
import random


def set_seed(seed):
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
"""
    clean = """
import os
import subprocess
import sys

subprocess.run([sys.executable, "train.py"], env={**os.environ, "PYTHONHASHSEED": "0"}, check=True)
"""
    triggers = ("PYTHONHASHSEED",)

    def check(self, module: Module) -> Iterator[Violation]:
        """Report writes, unless the same function then replaces the process through ``os.exec*``."""
        for write in environment_writes(module):
            if write.variable == "PYTHONHASHSEED" and not _is_followed_by_exec(module, write.node):
                yield Violation(write.node, "`PYTHONHASHSEED` is set in-process: this interpreter has already read it")


def _is_followed_by_exec(module: Module, node: ast.AST) -> bool:
    function = module.enclosing_function(node)
    return any(
        (module.qualified(call.func) or "").startswith(_EXEC_PREFIX) and module.enclosing_function(call) is function
        for call in module.nodes(ast.Call)
    )
