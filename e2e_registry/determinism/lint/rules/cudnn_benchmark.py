"""DET001: cuDNN benchmark mode."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.assignments import assignments
from e2e_registry.determinism.lint.module import Module, argument
from e2e_registry.determinism.lint.rule import Rule, Violation

_SWITCH = "torch.backends.cudnn.benchmark"
_CONTEXT = "torch.backends.cudnn.flags"
_SETTER = "torch.backends.cudnn.set_flags"
_LIGHTNING_TRAINERS = ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer")


class CudnnBenchmark(Rule):
    """``torch.backends.cudnn.benchmark = True`` and the other ways to say it."""

    code = "DET001"
    name = "cudnn-benchmark"
    summary = "cuDNN benchmark mode is switched on"
    why = (
        "cuDNN then times several algorithms for each convolution shape and keeps the fastest. Which one wins depends "
        "on the machine's load at that moment, and the candidates sum in different orders, so two runs of one commit "
        "take different algorithms and differ in their last bits."
    )
    fix = (
        "Leave it False wherever runs are compared, together with `torch.backends.cudnn.deterministic = True`. A "
        "recipe that needs the speed elsewhere can read the switch from its settings."
    )
    flagged = """
import torch

torch.backends.cudnn.benchmark = True
"""
    clean = """
import torch

torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
"""
    triggers = ("benchmark",)

    def check(self, module: Module) -> Iterator[Violation]:
        """Report assignments, ``setattr``, cuDNN's flag functions and Lightning's ``Trainer(benchmark=True)``."""
        for assigned in assignments(module):
            is_switch = assigned.replaces and module.qualified(assigned.target) == _SWITCH
            if is_switch and module.constant(assigned.value) in (True, 1):
                yield Violation(assigned.node, f"`{_SWITCH}` is switched on")
        for call in module.nodes(ast.Call):
            message = self._call_message(module, call)
            if message is not None:
                yield Violation(call, message)

    def _call_message(self, module: Module, call: ast.Call) -> str | None:
        name = module.qualified(call.func)
        if name == "builtins.setattr" and len(call.args) == 3:
            owner, attribute, value = call.args
            is_switch = f"{module.qualified(owner)}.{module.constant(attribute)}" == _SWITCH
            is_on = is_switch and module.constant(value) in (True, 1)
            return f"`{_SWITCH}` is switched on through setattr" if is_on else None
        if name == _CONTEXT and module.constant(argument(call, "benchmark", 1)) is True:
            return "`torch.backends.cudnn.flags(benchmark=True)` switches benchmark mode on"
        if name == _SETTER and module.constant(argument(call, "_benchmark", 1)) is True:
            return "`torch.backends.cudnn.set_flags(_benchmark=True)` switches benchmark mode on"
        if name in _LIGHTNING_TRAINERS and module.constant(argument(call, "benchmark")) is True:
            return "`Trainer(benchmark=True)` switches cuDNN benchmark mode on"
        return None
