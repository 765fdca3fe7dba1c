"""DET008: iteration over sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import Module, last_name
from e2e_registry.determinism.lint.ordering import leak, loop_leak, starred_leak
from e2e_registry.determinism.lint.rule import Rule, Violation
from e2e_registry.determinism.lint.scopes import BindingKind

_SET_TYPES = frozenset({"builtins.set", "builtins.frozenset"})
_SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
_SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
_ITERATING_CALLS = frozenset(
    {
        "builtins.list",
        "builtins.tuple",
        "builtins.iter",
        "builtins.enumerate",
        "builtins.map",
        "builtins.filter",
        "builtins.zip",
        "itertools.chain",
        "tqdm.tqdm",
        "numpy.fromiter",
    }
)
_INTEGER_CALLS = frozenset({"builtins.int", "builtins.len", "builtins.ord", "builtins.range", "builtins.hash"})
#: What holds integers in any training code; ids are left out, since they may be strings.
_INTEGER_NAME = re.compile(
    r"(^|_)(idxs?|index|indices|indexes|ranks?|steps?|epochs?|dims?|axis|axes|seeds?)$", re.IGNORECASE
)
_MAX_HOPS = 4


class SetOrder(Rule):
    """A set that is listed, joined, popped from or looped over, with the order reaching data."""

    code = "DET008"
    name = "set-order"
    summary = "the order of a set reaches data"
    why = (
        "A set's order follows its elements' hashes. Those of strings are salted anew in each process, and those of "
        "most objects are their addresses, so `list(set(names))` differs from run to run on one machine."
    )
    fix = "`sorted(...)`, or `list(dict.fromkeys(names))` to drop duplicates in order of appearance."
    scope = (
        "Sets that are compared, counted, sorted or tested for membership are left alone, and so are sets of integers "
        "(by their literals, annotations or names), single picks (`next(iter(...))`, `pop()` outside of a loop that "
        "empties the set), and picks by position where the function compares the length with 1. Attributes and "
        "parameters are not known to be sets unless an annotation says so."
    )
    flagged = """
def vocabulary(words):
    return {word: index for index, word in enumerate(set(words))}
"""
    clean = """
def vocabulary(words):
    return {word: index for index, word in enumerate(sorted(set(words)))}
"""
    triggers = ("set", "Set", "{", ".keys()")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report places that turn a set into a sequence, if that sequence's order goes on."""
        for node, iterated in _iterations(module):
            if not _is_set(module, iterated, _MAX_HOPS) or _holds_integers(module, iterated):
                continue
            reason = _reason(module, node, iterated)
            if reason is not None:
                yield Violation(iterated, f"the order of a set (`{_shown(iterated)}`) {reason}")


def _iterations(module: Module) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield each node that runs through something, and what it runs through."""
    for call in module.nodes(ast.Call):
        name = module.qualified(call.func)
        if name in _ITERATING_CALLS:
            yield from ((call, value) for value in call.args)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "join" and len(call.args) == 1:
            yield call, call.args[0]
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "pop" and not call.args:
            yield call, call.func.value
    for loop in module.nodes(ast.For):
        yield loop, loop.iter
    for generator in module.nodes(ast.comprehension):
        owner = module.parent(generator)
        if isinstance(owner, ast.ListComp | ast.GeneratorExp):
            yield owner, generator.iter
    for starred in module.nodes(ast.Starred):
        if not isinstance(module.parent(starred), ast.Set):
            yield starred, starred.value


def _reason(module: Module, node: ast.AST, iterated: ast.expr) -> str | None:
    """Say how the order leaves the place that runs through the set; ``None`` if it does not."""
    if isinstance(node, ast.For):
        return loop_leak(module, node)
    if isinstance(node, ast.Starred):
        return starred_leak(module, node)
    if isinstance(node, ast.Call) and last_name(node.func) == "pop":
        return "decides what is taken next" if _is_worklist(module, node, iterated) else None
    if isinstance(node, ast.Call) and last_name(node.func) == "iter":
        return None  # ``next(iter(s))`` asks for any element, mostly of a set known to hold one.
    if isinstance(node, ast.Call) and last_name(node.func) == "join" and _is_alternation(module, node):
        return None
    if isinstance(node, ast.Call) and module.qualified(node.func) == "builtins.enumerate":
        return "numbers its elements"
    return leak(module, node) if isinstance(node, ast.expr) else None


def _is_worklist(module: Module, pop: ast.Call, taken: ast.expr) -> bool:
    """Whether a loop runs until the set is empty; a single ``pop`` mostly takes the only element."""
    written = ast.dump(taken)
    return any(
        isinstance(outer, ast.While) and any(ast.dump(part) == written for part in ast.walk(outer.test))
        for outer in module.ancestors(pop)
    )


def _is_alternation(module: Module, call: ast.Call) -> bool:
    """Whether a join builds a pattern's alternatives, which match the same whatever their order."""
    return isinstance(call.func, ast.Attribute) and module.constant(call.func.value) == "|"


def _is_set(module: Module, node: ast.expr, hops: int) -> bool:
    """Whether the source shows that an expression is a set."""
    if hops == 0:
        return False
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Attribute(attr=method, value=receiver)) if method in _SET_METHODS:
            return _is_set(module, receiver, hops - 1)
        case ast.Call():
            return module.qualified(node.func) in _SET_TYPES
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _SET_OPERATORS):
            return _is_set(module, left, hops - 1) or (
                _is_keys_view(left) and (_is_keys_view(right) or _is_set(module, right, hops - 1))
            )
        case ast.Name():
            return _is_set_variable(module, node, hops)
        case _:
            return False


def _is_keys_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys"


def _is_set_variable(module: Module, node: ast.Name, hops: int) -> bool:
    """Whether all that the file assigns to a variable are sets: one list among them and nobody knows."""
    bindings = [binding for binding in module.names.bindings(node) if binding.kind is not BindingKind.AUGMENTED]
    if not bindings:
        return False
    for binding in bindings:
        if binding.annotation is not None and _is_set_annotation(binding.annotation):
            continue
        if binding.value is None or not _is_set(module, binding.value, hops - 1):
            return False
    return True


def _is_set_annotation(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return last_name(base) in ("set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet")


def _holds_integers(module: Module, node: ast.expr) -> bool:
    """Whether a set's elements are integers by all that the source says: their hashes are not salted."""
    if isinstance(node, ast.Name) and any(
        _is_integer_annotation(binding.annotation) for binding in module.names.bindings(node)
    ):
        return True
    if _INTEGER_NAME.search(last_name(node)):
        return True
    value = module.names.single_value(node)
    match value:
        case ast.Set(elts=elements):
            return all(_is_integer(module, element) for element in elements)
        case ast.Call(args=[]) if value is node and module.qualified(value.func) in _SET_TYPES:
            return True  # ``iter(set())``: nothing in it to have an order
        case ast.SetComp(elt=element):
            return _is_integer(module, element)
        case ast.Call(args=[argument]) if module.qualified(value.func) in _SET_TYPES:
            if isinstance(argument, ast.GeneratorExp | ast.ListComp):
                return _is_integer(module, argument.elt)
            if isinstance(argument, ast.List | ast.Tuple):
                return all(_is_integer(module, element) for element in argument.elts)
            return _is_integer(module, argument)
        case ast.BinOp(left=left, right=right):
            return _holds_integers(module, left) or _holds_integers(module, right)
        case _:
            return False


def _is_integer(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(_is_integer(module, element) for element in node.elts)
    if isinstance(node, ast.Call):
        return module.qualified(node.func) in _INTEGER_CALLS
    if _INTEGER_NAME.search(last_name(node)):
        return True
    return isinstance(module.constant(node), int)


def _is_integer_annotation(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Subscript) and last_name(annotation.slice) == "int"


def _shown(node: ast.expr, limit: int = 60) -> str:
    text = ast.unparse(node)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
