"""Whether the order of an unordered collection reaches anything: shared by the listing and the set rules.

A directory listing that is counted, sorted, put in a set or tested for membership has no order left. One that
is indexed, returned, stored, joined, or looped over by a body that appends or yields hands the order on. Loops whose
bodies only delete or copy files are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import FunctionNode, Module, dotted, last_name
from e2e_registry.determinism.lint.scopes import BindingKind

_ORDER_FREE_CALLS = frozenset(
    {
        "builtins.sorted",
        "builtins.len",
        "builtins.set",
        "builtins.frozenset",
        "builtins.any",
        "builtins.all",
        "builtins.max",
        "builtins.min",
        "builtins.bool",
        "builtins.print",
        "builtins.isinstance",
        "builtins.str",
        "builtins.repr",
        "builtins.dict.fromkeys",
        "collections.Counter",
        "natsort.natsorted",
        "heapq.nsmallest",
        "heapq.nlargest",
        "math.fsum",
        "shutil.rmtree",
    }
)
_ORDER_KEEPING_CALLS = frozenset(
    {
        "builtins.list",
        "builtins.tuple",
        "builtins.iter",
        "builtins.reversed",
        "builtins.enumerate",
        "builtins.map",
        "builtins.filter",
        "builtins.zip",
        "builtins.next",
        "itertools.chain",
        "itertools.islice",
        "tqdm.tqdm",
        "tqdm.auto.tqdm",
        "numpy.array",
        "numpy.asarray",
    }
)
#: ``a.update(listing)`` and the like: the receiver is a set or a dict, or the method compares.
_ORDER_FREE_METHODS = frozenset(
    {
        "add",
        "update",
        "union",
        "intersection",
        "difference",
        "symmetric_difference",
        "difference_update",
        "intersection_update",
        "symmetric_difference_update",
        "issubset",
        "issuperset",
        "isdisjoint",
        "count",
        "assertEqual",
        "assertCountEqual",
        "assertIn",
        "assertNotIn",
        "assertTrue",
        "assertFalse",
        "assertSetEqual",
        "startswith",
        "endswith",
    }
)
_LOGGER_METHODS = frozenset({"debug", "info", "warning", "warning_once", "warn", "error", "exception", "critical"})
_COLLECTING_METHODS = frozenset({"append", "appendleft", "extend", "insert", "put", "writerow", "writelines"})
_TRAINING_METHODS = frozenset({"backward", "step", "log"})
_INTEGER_SUMMAND = re.compile(r"getsize|st_size|nbytes|numel|len\(")
_PREDICATE = re.compile(r"is[a-z_]+$|startswith$|endswith$|exists$|bool$")
_MAX_HOPS = 4


def leak(module: Module, node: ast.expr) -> str | None:
    """Say how the order of the iterable ``node`` reaches data, as the end of a sentence; ``None`` if it does not."""
    return _leak(module, node, _MAX_HOPS)


def loop_leak(module: Module, loop: ast.For | ast.AsyncFor) -> str | None:
    """Say how the body of a loop hands on the order in which it runs; ``None`` if it does not."""
    return _loop_leak(module, loop, _MAX_HOPS)


def is_display_call(module: Module, call: ast.Call) -> bool:
    """Whether a call shows text to people: ``print``, a logger's methods, ``warnings.warn``."""
    name = module.qualified(call.func)
    if name in ("builtins.print", "warnings.warn"):
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOGGER_METHODS


def has_one_element(module: Module, node: ast.expr) -> bool:
    """Whether the function around a pick compares the collection's ``len`` with 1, which leaves no order to matter."""
    while isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    written = dotted(node)
    if written is None:
        return False
    function = module.enclosing_function(node)
    return any(
        isinstance(compared, ast.Call)
        and last_name(compared.func) == "len"
        and dotted(compared.args[0] if compared.args else compared) == written
        and any(module.constant(other) == 1 for other in (test.left, *test.comparators))
        for test in module.nodes(ast.Compare)
        if module.enclosing_function(test) is function
        for compared in (test.left, *test.comparators)
    )


def starred_leak(module: Module, starred: ast.Starred) -> str | None:
    """Say how the order of a collection that is unpacked with ``*`` reaches data; ``None`` if it does not.

    A call that takes any number of arguments, such as ``max`` or a registration, seldom minds their order.
    """
    display = module.parent(starred)
    return _leak(module, display, _MAX_HOPS) if isinstance(display, ast.List | ast.Tuple) else None


def _leak(module: Module, node: ast.expr, hops: int) -> str | None:
    if hops == 0:
        return None
    parent = module.parent(node)
    match parent:
        case ast.Call():
            return _call_leak(module, parent, node, hops)
        case ast.keyword():
            call = module.parent(parent)
            return _call_leak(module, call, node, hops) if isinstance(call, ast.Call) else None
        case ast.comprehension() if parent.iter is node:
            owner = module.parent(parent)
            is_ordered = isinstance(owner, ast.ListComp | ast.GeneratorExp)
            return _leak(module, owner, hops) if is_ordered and isinstance(owner, ast.expr) else None
        case ast.For() | ast.AsyncFor() if parent.iter is node:
            return _loop_leak(module, parent, hops)
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            return _assignment_leak(module, parent, hops)
        case ast.AugAssign(target=target):
            return None if _is_sorted_somewhere(module, target) else "is added to a sequence"
        case ast.Return():
            return "is returned"
        case ast.Yield() | ast.YieldFrom():
            return "is yielded"
        case ast.Subscript(ctx=ast.Load()) if parent.value is node:
            return None if has_one_element(module, node) else "is picked from by position"
        case ast.Attribute(attr="sort"):
            return None
        case ast.Starred():
            return starred_leak(module, parent)
        case ast.IfExp() if parent.test is not node:
            return _leak(module, parent, hops)
        case ast.BoolOp() | ast.BinOp():
            return _leak(module, parent, hops)
        case _:
            # Tests, comparisons, messages and bare expressions.
            return None


def _call_leak(module: Module, call: ast.Call, node: ast.expr, hops: int) -> str | None:
    name = module.qualified(call.func)
    written = last_name(call.func)
    if (
        name in _ORDER_FREE_CALLS
        or is_display_call(module, call)
        or written in _ORDER_FREE_METHODS
        or "sort" in written
    ):
        return None
    if call.func is node:
        return None
    if name == "builtins.next":
        # ``next(folder.iterdir(), None) is None`` asks whether there is anything.
        is_test = isinstance(module.parent(call), ast.Compare)
        return None if is_test or has_one_element(module, node) else "is picked from by position"
    if name in _ORDER_KEEPING_CALLS or (isinstance(call.func, ast.Attribute) and call.func.attr == "join"):
        return _leak(module, call, hops)
    if name == "builtins.sum":
        return None if _adds_integers(node) else _leak(module, call, hops)
    if any(isinstance(outer, ast.Raise) for outer in module.ancestors(call)):
        return None
    shown = dotted(call.func) or last_name(call.func) or "a call"
    return f"is passed to {shown}()"


def _adds_integers(node: ast.expr) -> bool:
    """Whether a sum runs over sizes or over conditions: integers, whose sum has no order."""
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        element = node.elt
        is_condition = isinstance(element, ast.Compare) or (
            isinstance(element, ast.Call) and _PREDICATE.match(last_name(element.func)) is not None
        )
        if is_condition or isinstance(element, ast.Constant):
            return True
    return _INTEGER_SUMMAND.search(ast.unparse(node)) is not None


def _assignment_leak(module: Module, statement: ast.Assign | ast.AnnAssign | ast.NamedExpr, hops: int) -> str | None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List) and len(target.elts) == 1:
            continue  # ``(only,) = names`` raises unless there is exactly one.
        if isinstance(target, ast.Name):
            found = _variable_leak(module, target, hops)
        else:
            found = None if _is_sorted_somewhere(module, target) else f"is stored in {ast.unparse(target)}"
        if found is not None:
            return found
    return _leak(module, statement, hops) if isinstance(statement, ast.NamedExpr) else None


def _variable_leak(module: Module, target: ast.Name, hops: int) -> str | None:
    if _is_sorted_somewhere(module, target):
        return None
    for use in module.names.same_variable(target):
        if isinstance(use.ctx, ast.Load) and use.lineno >= target.lineno:
            found = _leak(module, use, hops - 1)
            if found is not None:
                return found
    return None


def _is_sorted_somewhere(module: Module, target: ast.expr) -> bool:
    """Whether the file sorts what ``target`` names: ``x.sort()`` or ``sorted(x)``, before or after."""
    written = dotted(target)
    if written is None:
        return False
    if isinstance(target, ast.Name):
        return any(_is_sorting_use(module, use) for use in module.names.same_variable(target))
    return f"{written}.sort(" in module.text or f"sorted({written}" in module.text


def _is_sorting_use(module: Module, use: ast.Name) -> bool:
    parent = module.parent(use)
    if isinstance(parent, ast.Attribute) and parent.attr == "sort":
        return True
    return isinstance(parent, ast.Call) and parent.func is not use and last_name(parent.func) in ("sorted", "natsorted")


def _loop_leak(module: Module, loop: ast.For | ast.AsyncFor, hops: int) -> str | None:
    for node in _walk_body(loop):
        found = _step_leak(module, loop, node, hops)
        if found is not None:
            return found
    return None


def _walk_body(loop: ast.For | ast.AsyncFor) -> Iterator[ast.AST]:
    """Yield the nodes that run once a turn: not the ``else`` branch, nor the bodies of nested functions."""
    stack: list[ast.AST] = list(reversed(loop.body))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, FunctionNode | ast.Lambda | ast.ClassDef):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _step_leak(module: Module, loop: ast.For | ast.AsyncFor, node: ast.AST, hops: int) -> str | None:
    match node:
        case ast.Yield() | ast.YieldFrom():
            return "drives a loop that yields"
        case ast.Return(value=value) if value is not None and _mentions_target(loop, value):
            return None if _is_guarded_by_equality(module, loop, node) else "decides which match is returned first"
        case ast.Call(func=ast.Attribute(attr=method, value=receiver)) if method in _COLLECTING_METHODS:
            if isinstance(receiver, ast.Name) and not _belongs_to_others(module, receiver):
                found = None if hops <= 1 else _variable_leak(module, _first_use(module, receiver), hops)
                return None if found is None else f"drives a loop that collects into {receiver.id}, which {found}"
            if _is_sorted_somewhere(module, receiver):
                return None
            return f"drives a loop that calls {ast.unparse(receiver)}.{method}()"
        case ast.Call(func=ast.Attribute(attr=method)) if method in _TRAINING_METHODS:
            return None if is_display_call(module, node) else f"drives a loop that calls .{method}()"
        case _:
            return None


def _belongs_to_others(module: Module, receiver: ast.Name) -> bool:
    """Whether a list comes from a caller or another module, so that its further uses are out of sight."""
    bindings = module.names.bindings(receiver)
    return not bindings or any(binding.kind is BindingKind.PARAMETER for binding in bindings)


def _first_use(module: Module, receiver: ast.Name) -> ast.Name:
    return module.names.same_variable(receiver)[0]


def _mentions_target(loop: ast.For | ast.AsyncFor, value: ast.expr) -> bool:
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return any(isinstance(node, ast.Name) and node.id in targets for node in ast.walk(value))


def _is_guarded_by_equality(module: Module, loop: ast.For | ast.AsyncFor, node: ast.AST) -> bool:
    """Whether a test for equality stands between the loop and ``node``: then at most one element matches."""
    for outer in module.ancestors(node):
        if outer is loop:
            return False
        if isinstance(outer, ast.If) and any(isinstance(test, ast.Eq) for test in ast.walk(outer.test)):
            return True
    return False
