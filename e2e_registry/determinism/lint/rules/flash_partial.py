"""DET011: ``deterministic=True`` bound with ``functools.partial``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import Module, argument
from e2e_registry.determinism.lint.rule import Rule, Violation

_ATTENTION = re.compile(r"flash|attn|attention", re.IGNORECASE)


class FlashPartial(Rule):
    """``functools.partial(flash_attn_func, deterministic=True)``."""

    code = "DET011"
    name = "flash-partial"
    summary = "an attention function is made deterministic with `functools.partial`"
    why = (
        "A partial's keyword is a default: a caller that passes `deterministic=False` itself wins, and attention "
        "dispatchers do pass it. The patch is then in place, inspectable, and without effect."
    )
    fix = (
        "Wrap the function in one that overwrites the argument, keeps the signature, and refuses a function without "
        "a `deterministic` parameter."
    )
    flagged = """
import functools

import flash_attn

flash_attn.flash_attn_func = functools.partial(flash_attn.flash_attn_func, deterministic=True)
"""
    clean = """
import functools

import flash_attn


def force_deterministic(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **{**kwargs, "deterministic": True})

    return call


flash_attn.flash_attn_func = force_deterministic(flash_attn.flash_attn_func)
"""
    triggers = ("partial",)

    def check(self, module: Module) -> Iterator[Violation]:
        """Report partials of what is called attention, or of anything inside code that is."""
        for call in module.nodes(ast.Call):
            is_partial = module.qualified(call.func) in ("functools.partial", "functools.partialmethod")
            if not is_partial or not call.args or module.constant(argument(call, "deterministic")) is not True:
                continue
            if _ATTENTION.search(_context(module, call)):
                shown = ast.unparse(call.args[0])
                yield Violation(
                    call, f"`partial({shown}, deterministic=True)` gives way to a caller's own `deterministic=False`"
                )


def _context(module: Module, call: ast.Call) -> str:
    function = module.enclosing_function(call)
    surrounding: ast.AST = module.statement(call) if function is None else function
    return f"{ast.unparse(call)} {module.qualified(call.args[0])} {ast.unparse(surrounding)}"
