"""Writes to this process's own environment variables: shared by the rules about variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from e2e_registry.determinism.lint.assignments import assignments
from e2e_registry.determinism.lint.module import Module, argument


@dataclass(frozen=True, slots=True)
class EnvironmentWrite:
    """One statement or call that sets one variable in ``os.environ``.

    Attributes:
        node: The statement or call.
        variable: The variable's name.
        value: The expression it is set to.
    """

    node: ast.expr | ast.stmt
    variable: str
    value: ast.expr | None


def environment_writes(module: Module) -> Iterator[EnvironmentWrite]:
    """Yield every write to ``os.environ`` whose variable the source spells out.

    A copy (``env = {**os.environ, ...}``, for a child process) is not this process's environment and not reported.
    """
    for node, target, value, operator in assignments(module):
        if isinstance(target, ast.Subscript) and _is_environ(module, target.value):
            yield from _named(module, node, target.slice, value)
        elif _is_environ(module, target) and isinstance(operator, ast.BitOr):
            yield from _mapping_writes(module, node, value)
    for call in module.nodes(ast.Call):
        yield from _call_writes(module, call)


def _call_writes(module: Module, call: ast.Call) -> Iterator[EnvironmentWrite]:
    if module.qualified(call.func) == "os.putenv":
        yield from _named(module, call, argument(call, "key", 0), argument(call, "value", 1))
    if not (isinstance(call.func, ast.Attribute) and _is_environ(module, call.func.value)):
        return
    if call.func.attr == "setdefault":
        yield from _named(module, call, argument(call, "key", 0), argument(call, "value", 1))
    if call.func.attr == "update":
        for mapping in call.args:
            yield from _mapping_writes(module, call, mapping)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield EnvironmentWrite(call, keyword.arg, keyword.value)


def _mapping_writes(module: Module, node: ast.expr | ast.stmt, mapping: ast.expr) -> Iterator[EnvironmentWrite]:
    mapping = module.names.single_value(mapping)
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            yield from _named(module, node, key, value)
    elif isinstance(mapping, ast.Call) and module.qualified(mapping.func) == "builtins.dict":
        for keyword in mapping.keywords:
            if keyword.arg is not None:
                yield EnvironmentWrite(node, keyword.arg, keyword.value)


def _named(
    module: Module, node: ast.expr | ast.stmt, key: ast.expr | None, value: ast.expr | None
) -> Iterator[EnvironmentWrite]:
    name = module.constant(key)
    if isinstance(name, str):
        yield EnvironmentWrite(node, name, value)


def _is_environ(module: Module, node: ast.expr) -> bool:
    return module.qualified(node) == "os.environ"
