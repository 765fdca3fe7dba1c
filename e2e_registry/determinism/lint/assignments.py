"""What a module assigns to what, in every form of assignment that Python has: shared by the rules about values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from e2e_registry.determinism.lint.module import Module

AssignmentNode = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


class Assigned(NamedTuple):
    """One target and the expression that it is given.

    Attributes:
        node: The statement, or the walrus expression.
        target: A name, an attribute or an item.
        value: Its own part of the right side: of ``a, b = 1, 2`` the 2 for ``b``.
        operator: Of ``a |= b`` the operator; None for a plain assignment.
    """

    node: AssignmentNode
    target: ast.expr
    value: ast.expr
    operator: ast.operator | None = None

    @property
    def replaces(self) -> bool:
        """Whether the target is the value afterwards, or (``a |= True``) as true as the value."""
        return self.operator is None or isinstance(self.operator, ast.BitOr)


def assignments(module: Module) -> Iterator[Assigned]:
    """Yield every assignment of a module: plain, chained, of tuples, annotated, augmented and walrus."""
    for kind in (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr):
        for node in module.nodes(kind):
            yield from assigned(node)


def assigned(node: ast.AST) -> Iterator[Assigned]:
    """Yield what one node assigns; nothing of a node that assigns nothing."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _unpacked(node, target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield Assigned(node, target, value)
        case ast.AugAssign(target=target, value=value, op=operator):
            yield Assigned(node, target, value, operator)


def _unpacked(node: ast.Assign, target: ast.expr, value: ast.expr) -> Iterator[Assigned]:
    """Pair the elements of two tuples; a starred one, or a value that is no tuple here, leaves them open."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield Assigned(node, target, value)
    elif isinstance(value, ast.Tuple | ast.List) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
        if not any(isinstance(element, ast.Starred) for pair in pairs for element in pair):
            for inner_target, inner_value in pairs:
                yield from _unpacked(node, inner_target, inner_value)


def reads_of(module: Module, store: ast.Name) -> Iterator[ast.Name]:
    """Yield the reads of a variable that see what was assigned at ``store``, whatever path the program takes.

    That is any read of a variable that is assigned once; else those that stand behind the assignment in the statements
    that follow it, up to the next assignment.
    """
    uses = module.names.same_variable(store)
    is_only_one = sum(not isinstance(use.ctx, ast.Load) for use in uses) == 1
    followers = set(_following_statements(module, module.statement(store)))
    current: ast.Name | None = None
    for use in uses:
        if not isinstance(use.ctx, ast.Load):
            current = use
        elif is_only_one or (current is store and any(outer in followers for outer in (use, *module.ancestors(use)))):
            yield use


def _following_statements(module: Module, statement: ast.AST) -> list[ast.AST]:
    """Return the statements behind one in its own block."""
    parent = module.parent(statement)
    for name in () if parent is None else parent._fields:
        block = getattr(parent, name)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []
