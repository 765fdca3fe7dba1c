"""DET012: reductions that add with atomics on a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from e2e_registry.determinism.lint.module import Module, argument, last_name
from e2e_registry.determinism.lint.rule import Rule, Violation


@dataclass(frozen=True, slots=True)
class _Method:
    """A tensor method that combines several sources into one element.

    Attributes:
        source: The name and position (as a method) of what is added.
        reduce: The position of the argument that names the reduction, where there is one.
        switch: The name and position of the argument that must be True, where there is one.
        has_ordered_form: Whether torch orders it under ``use_deterministic_algorithms(True)``.
        where: Where the order is open.
    """

    source: tuple[str, int]
    reduce: int | None = None
    switch: tuple[str, int] | None = None
    has_ordered_form: bool = False
    where: str = "on CUDA"


_ADD = _Method(("src", 2), has_ordered_form=True)
_INDEX_ADD = _Method(("source", 2), has_ordered_form=True)
_SCATTER_REDUCE = _Method(("src", 2), reduce=3, has_ordered_form=True)
_SCATTER = _Method(("src", 2), reduce=3)
_INDEX_REDUCE = _Method(("source", 2), reduce=3)
# CUDA sorts the indices of an accumulating index_put in any mode; the CPU adds from several threads.
_INDEX_PUT = _Method(
    ("values", 1), switch=("accumulate", 2), has_ordered_form=True, where="on a CPU with several threads"
)
_PUT = _Method(("source", 1), switch=("accumulate", 2))
_METHODS = {
    "scatter_add": _ADD,
    "index_add": _INDEX_ADD,
    "scatter_reduce": _SCATTER_REDUCE,
    "scatter": _SCATTER,
    "index_reduce": _INDEX_REDUCE,
    "index_put": _INDEX_PUT,
    "put": _PUT,
    "bincount": _Method(("weights", 0)),
}
_SCATTER_PACKAGES = ("torch_scatter.", "torch_geometric.utils.")
_PACKAGE_SUMS = frozenset({"scatter", "scatter_add", "scatter_sum", "scatter_mean"})
#: Packages whose functions of these names add in order.
_SEQUENTIAL_PACKAGES = ("numpy.", "scipy.", "pandas.")
_ORDER_DEPENDENT = frozenset({"sum", "mean", "prod", "add", "multiply"})
#: Reductions that strict mode has no ordered form of, whatever the operation.
_NEVER_ORDERED = frozenset({"prod", "multiply"})
_INTEGER_DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "int", "long", "short", "bool"})
_INTEGER_CASTS = frozenset({"int", "long", "short", "bool"})
_SHAPING_METHODS = frozenset(
    {"expand", "expand_as", "flatten", "view", "reshape", "to", "contiguous", "unsqueeze", "repeat_interleave", "float"}
)
_CONSTANT_FILLS = frozenset({"ones", "ones_like", "new_ones", "full", "full_like", "new_full"})
#: Names of what holds zeros and ones by convention, whose sums are exact in any dtype.
_INDICATOR_NAME = re.compile(r"(^|_)(masks?|ones|counts?)(_|$)")


class ScatterReduction(Rule):
    """``scatter_add``, ``index_add``, weighted ``bincount`` and their kin."""

    code = "DET012"
    name = "scatter-reduction"
    summary = "a scatter-style sum adds in no fixed order on a GPU"
    why = (
        "On CUDA several threads add to one element with atomics, in the order they happen to arrive, and floating-"
        "point addition is not associative: the same inputs give different last bits from run to run. "
        "`torch.use_deterministic_algorithms(True)` takes a fixed-order form where there is one and raises where "
        "there is none (weighted `bincount`, `scatter_reduce` with `prod`); without it the difference is silent."
    )
    fix = (
        "Sort by index and sum each segment (`torch.segment_reduce`), multiply by a dense one-hot matrix, or run in "
        "strict mode. In code that only runs on one CPU thread, suppress it with that reason."
    )
    scope = (
        "A file that itself calls `torch.use_deterministic_algorithms(True)` is reported only for the operations that "
        "torch cannot order. Where the source shows it, sums that are exact in any order are left alone (integers, a "
        "mask, one constant), and so are loops over experts that add to each row once a turn. `bincount` without "
        "weights counts integers, and `histc` counts in floats that hold them exactly."
    )
    flagged = """
import torch


def pool(rows, index, count):
    return torch.zeros(count, rows.shape[1]).index_add_(0, index, rows)
"""
    clean = """
import torch


def pool(rows, index, count):
    order = torch.argsort(index, stable=True)
    lengths = torch.bincount(index, minlength=count)
    return torch.segment_reduce(rows[order], "sum", lengths=lengths)
"""
    triggers = ("scatter", "index_add", "index_reduce", "bincount", "accumulate")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report calls; the file's own strict mode covers the operations that torch can order."""
        is_strict = _is_strict(module)
        for call in module.nodes(ast.Call):
            operation = _operation(module, call)
            if operation is not None and not (operation.is_ordered_when_strict and is_strict):
                yield Violation(call, f"`{operation.shown}` sums with atomics, in no fixed order {operation.where}")


@dataclass(frozen=True, slots=True)
class _Operation:
    shown: str
    is_ordered_when_strict: bool
    where: str


def _operation(module: Module, call: ast.Call) -> _Operation | None:
    """Return the order-dependent sum that a call is, or ``None``."""
    written = last_name(call.func)
    name = module.qualified(call.func)
    if name is not None and name.startswith(_SCATTER_PACKAGES):
        is_sum = written in _PACKAGE_SUMS and module.constant(argument(call, "reduce")) not in ("min", "max", "mul")
        return _Operation(name, True, "on CUDA") if is_sum else None
    method = _METHODS.get(written.removesuffix("_"))
    is_function = (name or "").startswith("torch.")
    is_method = isinstance(call.func, ast.Attribute) and not (name or "").startswith(_SEQUENTIAL_PACKAGES)
    if method is None or not (is_function or is_method):
        return None
    offset = 1 if is_function else 0
    receiver = call.args[0] if is_function and call.args else getattr(call.func, "value", None)
    source = argument(call, method.source[0], method.source[1] + offset)
    shown = _shown(module, call, method, offset, written)
    if shown is None or any(_is_exact(module, value) for value in (receiver, source)):
        return None
    if _takes_each_index_once(module, call, argument(call, "index", 1 + offset)):
        return None
    reduce = module.constant(argument(call, "reduce", None if method.reduce is None else method.reduce + offset))
    return _Operation(shown, method.has_ordered_form and reduce not in _NEVER_ORDERED, method.where)


def _shown(module: Module, call: ast.Call, method: _Method, offset: int, written: str) -> str | None:
    """Return the call as a message names it, or ``None`` if its arguments make the order irrelevant."""
    if method.reduce is not None:
        reduce = module.constant(argument(call, "reduce", method.reduce + offset))
        return f'{written}(reduce="{reduce}")' if reduce in _ORDER_DEPENDENT else None
    if method.switch is not None:
        switch, position = method.switch
        is_adding = module.constant(argument(call, switch, position + offset)) is True
        return f"{written}({switch}=True)" if is_adding else None
    if written == "bincount":
        weights = argument(call, "weights", offset)
        return None if weights is None or module.constant(weights) is None else "bincount(weights=...)"
    return written


def _is_exact(module: Module, node: ast.expr | None) -> bool:
    """Whether the source shows integers, zeros and ones, or one constant: the order cannot change such a sum."""
    value = None if node is None else module.names.single_value(node)
    if isinstance(value, ast.Name):
        assigned = [binding.value for binding in module.names.bindings(value)]
        is_always_exact = len(assigned) > 1 and all(isinstance(each, ast.Call) for each in assigned)
        return _INDICATOR_NAME.search(value.id) is not None or (
            is_always_exact and all(_is_exact(module, each) for each in assigned)
        )
    if not isinstance(value, ast.Call):
        return False
    method = last_name(value.func)
    dtype = argument(value, "dtype")
    dtypes = [dtype] if dtype is not None else (value.args if method in ("to", "type") else [])
    if any(last_name(dtype) in _INTEGER_DTYPES for dtype in dtypes):
        return True
    if not isinstance(value.func, ast.Attribute):
        return method in _CONSTANT_FILLS
    if method in _SHAPING_METHODS:
        return _is_exact(module, value.func.value)
    return method in _CONSTANT_FILLS or (method in _INTEGER_CASTS and not value.args)


def _takes_each_index_once(module: Module, call: ast.Call, index: ast.expr | None) -> bool:
    """Whether the index is where one turn of a loop finds its own entry in a mask.

    That is the usual loop over experts: ``_, rows = torch.where(expert_mask[expert])``. A row picks an expert once, so
    each turn adds one value to each row, and the turns come in order.
    """
    if not isinstance(index, ast.Name):
        return False
    loops = [outer for outer in module.ancestors(call) if isinstance(outer, ast.For)]
    turns = {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for binding in module.names.bindings(index):
        statement = module.statement(binding.node)
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and last_name(value.func) in ("where", "nonzero"):
            return any(isinstance(node, ast.Name) and node.id in turns for node in ast.walk(value))
    return False


def _is_strict(module: Module) -> bool:
    return any(
        module.qualified(call.func) == "torch.use_deterministic_algorithms"
        and module.constant(argument(call, "mode", 0)) is True
        and module.constant(argument(call, "warn_only")) is not True
        for call in module.nodes(ast.Call)
    )
