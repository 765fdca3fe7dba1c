"""DET013: TF32 switched on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.assignments import assignments
from e2e_registry.determinism.lint.environment_writes import environment_writes
from e2e_registry.determinism.lint.module import Module, argument
from e2e_registry.determinism.lint.rule import Rule, Violation

_ALLOW_SWITCHES = ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32")
_PRECISION_SWITCH = re.compile(r"torch\.backends\.(\w+\.)*fp32_precision")
_CONTEXTS = ("torch.backends.cudnn.flags", "torch.backends.mkldnn.flags")
_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_REDUCED = ("tf32", "bf16")


class Tf32(Rule):
    """Float32 products in TF32, or another reduced precision."""

    code = "DET013"
    name = "tf32"
    summary = "float32 products are allowed to run in TF32"
    why = (
        "TF32 keeps 10 bits of mantissa, on hardware that has it, for the shapes a library chooses to use it for. It "
        "repeats on one machine, but bits then depend on the device and on library heuristics, and rounding at 1e-3 "
        "hides small regressions that a float32 comparison would show."
    )
    fix = (
        'Pin it off where runs are compared: `torch.set_float32_matmul_precision("highest")`, '
        "`torch.backends.cudnn.allow_tf32 = False`. If TF32 is what the recipe trains in, pin it on for both sides and "
        "say so in a suppression."
    )
    flagged = """
import torch

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
"""
    clean = """
import torch

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("highest")
"""
    triggers = ("tf32", "TF32", "fp32_precision", "set_float32_matmul_precision")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report assignments, calls, variables and the ``tf32=True`` of training arguments."""
        for assigned in assignments(module):
            name = module.qualified(assigned.target) or ""
            value = module.constant(assigned.value)
            if name in _ALLOW_SWITCHES and value in (True, 1) and assigned.replaces:
                yield Violation(assigned.node, f"`{name}` is switched on")
            elif _PRECISION_SWITCH.fullmatch(name) and value in _REDUCED:
                yield Violation(assigned.node, f"`{name}` is set to {value!r}")
        for call in module.nodes(ast.Call):
            message = self._call_message(module, call)
            if message is not None:
                yield Violation(call, message)
        for write in environment_writes(module):
            if write.variable in _VARIABLES and module.constant(write.value) == "1":
                yield Violation(write.node, f"`{write.variable}=1` switches TF32 on")

    def _call_message(self, module: Module, call: ast.Call) -> str | None:
        name = module.qualified(call.func) or ""
        if name == "torch.set_float32_matmul_precision":
            precision = module.constant(argument(call, "precision", 0))
            is_reduced = precision in ("high", "medium")
            return f"`set_float32_matmul_precision({precision!r})` reduces float32 products" if is_reduced else None
        if name == "builtins.setattr" and len(call.args) == 3:
            target = f"{module.qualified(call.args[0])}.{module.constant(call.args[1])}"
            is_on = target in _ALLOW_SWITCHES and module.constant(call.args[2]) in (True, 1)
            return f"`{target}` is switched on through setattr" if is_on else None
        if name in _CONTEXTS and module.constant(argument(call, "allow_tf32")) is True:
            return f"`{name}(allow_tf32=True)` switches TF32 on"
        is_arguments = name.endswith("TrainingArguments")
        if is_arguments and module.constant(argument(call, "tf32")) is True:
            return "`TrainingArguments(tf32=True)` switches TF32 on"
        return None
