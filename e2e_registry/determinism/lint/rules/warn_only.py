"""DET002: deterministic algorithms that only warn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import Module, argument, last_name
from e2e_registry.determinism.lint.rule import Rule, Violation

_DEBUG_MODE = "torch.set_deterministic_debug_mode"
_LIGHTNING_TRAINERS = ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer")


class WarnOnly(Rule):
    """``warn_only=True`` on anything that switches determinism on, and the debug mode that means the same."""

    code = "DET002"
    name = "warn-only"
    summary = "deterministic algorithms are asked for with `warn_only=True`"
    why = (
        "Operations without a deterministic form then run in their nondeterministic form and print a warning. Scaled "
        "dot-product attention is worse off: the deterministic backward of its flash and memory-efficient kernels "
        "is taken only in strict mode, so there the setting does nothing, and says nothing."
    )
    fix = (
        "`torch.use_deterministic_algorithms(True, warn_only=False)`, and replace the operations that then raise. One "
        "that cannot be replaced can be wrapped alone, with the reason beside it."
    )
    flagged = """
import torch

torch.use_deterministic_algorithms(True, warn_only=True)
"""
    clean = """
import torch

torch.use_deterministic_algorithms(True, warn_only=False)
"""
    triggers = ("warn_only", "set_deterministic_debug_mode", "deterministic=")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report calls only: a function that merely takes a ``warn_only`` parameter decides nothing."""
        for call in module.nodes(ast.Call):
            message = self._message(module, call)
            if message is not None:
                yield Violation(call, message)

    def _message(self, module: Module, call: ast.Call) -> str | None:
        name = module.qualified(call.func)
        written = last_name(call.func)
        # Other libraries have a warn_only of their own: the callee must speak of determinism.
        if "determinis" in written.lower() and module.constant(argument(call, "warn_only")) is True:
            return f"`{written}(..., warn_only=True)` lets nondeterministic operations run"
        if name == _DEBUG_MODE and module.constant(argument(call, "debug_mode", 0)) in ("warn", 1):
            return "debug mode `warn` is `warn_only=True`: nondeterministic operations run"
        if name in _LIGHTNING_TRAINERS and module.constant(argument(call, "deterministic")) == "warn":
            return '`Trainer(deterministic="warn")` is `warn_only=True`: nondeterministic operations run'
        return None
