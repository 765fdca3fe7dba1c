"""DET009: value comparisons where bits are meant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import FunctionNode, Module, argument
from e2e_registry.determinism.lint.rule import Rule, Violation

_EXACT = frozenset({"torch.equal", "numpy.array_equal", "numpy.testing.assert_array_equal"})
_CLOSE = frozenset(
    {
        "torch.allclose",
        "torch.isclose",
        "numpy.allclose",
        "numpy.isclose",
        "math.isclose",
        "torch.testing.assert_close",
        "torch.testing.assert_allclose",
        "numpy.testing.assert_allclose",
    }
)
_TOLERANCES = ("rtol", "atol", "rel_tol", "abs_tol")
_BITWISE_INTENT = re.compile(
    r"bit.?wise|bit.?identical|bit.?exact|bit.for.bit|bit.?equal|byte.?(wise|identical|for.byte)"
    r"|determinis|reproduc|repeatab|same_seed|golden_?(file|metric|output|record|run|standard|value)|exact_(match|equal)|run_?(a|b|1|2)\b|(first|second)_run|two_runs"
    r"|compare_(runs|checkpoints|state_dicts?|weights)",
    re.IGNORECASE,
)
_INTEGER_NAMES = re.compile(
    r"(^|_|\b)(ids?|masks?|ind(ex|ices)|idx|labels?|tokens?|shapes?|sizes?|lengths?|perm|order|counts?|keys?|seqlens)\b",
    re.IGNORECASE,
)
_BOOLEAN_CALL = re.compile(r"\.(isnan|isinf|isfinite|signbit|arg(max|min|sort))\(")


class LooseEquality(Rule):
    """``torch.equal`` or ``allclose`` where the surroundings say that bits are meant."""

    code = "DET009"
    name = "loose-equality"
    summary = "`torch.equal` or `allclose` is used as a bitwise check"
    why = (
        "`torch.equal` compares values: NaN differs from itself, so a run that repeats a NaN fails; -0.0 equals 0.0, "
        "and float32 1.0 equals bfloat16 1.0, so runs that differ pass. `allclose` by default lets 1e-5 of the value "
        "pass, 84 float32 ULPs at 1.0, and with zero tolerances keeps the faults of `equal`."
    )
    fix = (
        "Compare names, shapes and dtypes first, then raw bytes: `tensor.contiguous().reshape(-1).view(torch.uint8)` "
        "of each, or a digest. Where equal values are what is meant, a suppression says so."
    )
    scope = (
        "`torch.equal` is reported where it is asserted; it and `allclose` where names, comments or the file's name "
        "speak of bits, repeats, determinism or golden values. Comparisons of integers and booleans (by names, "
        "literals or calls) and of bytes are left alone, and so are those with a tolerance of their own."
    )
    flagged = """
import torch


def assert_reproducible(first, second):
    for name in first:
        assert torch.equal(first[name], second[name])
"""
    clean = """
import torch


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_reproducible(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype and first[name].shape == second[name].shape
        assert torch.equal(bits(first[name]), bits(second[name]))
"""
    triggers = ("equal", "close")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report calls in code that speaks of bits or repeats, and assertions that tensors are equal."""
        for call in module.nodes(ast.Call):
            message = _message(module, call)
            if message is not None:
                yield Violation(call, message)


def _message(module: Module, call: ast.Call) -> str | None:
    name = module.qualified(call.func)
    if name in _CLOSE:
        if _has_zero_tolerance(module, call):
            return f"`{name}` with zero tolerance is not a bitwise check: -0.0 passes for 0.0, and NaN for nothing"
        if not _has_tolerance(call) and _BITWISE_INTENT.search(_surroundings(module, call)):
            return f"`{name}` in code that means bits: its default tolerance hides differences"
        return None
    if name not in _EXACT or _compares_bytes(module, call) or _compares_integers(call):
        return None
    is_asserted = name == "torch.equal" and _is_asserted(module, call)
    if is_asserted or _BITWISE_INTENT.search(_surroundings(module, call)):
        return f"`{name}` compares values, not bits: NaN, -0.0 and the dtype are lost"
    return None


def _has_tolerance(call: ast.Call) -> bool:
    return any(argument(call, name) is not None for name in _TOLERANCES) or len(call.args) > 2


def _has_zero_tolerance(module: Module, call: ast.Call) -> bool:
    given = [argument(call, name) for name in _TOLERANCES]
    values = [module.constant(value) for value in given if value is not None]
    return len(values) == 2 and all(value == 0 for value in values)


def _compares_bytes(module: Module, call: ast.Call) -> bool:
    """Whether the arguments are raw bits already: a view as integers, bytes, or a helper that says so."""
    written = " ".join(ast.unparse(module.names.single_value(value)) for value in call.args)
    return re.search(r"\.view\((torch|np|numpy)\.u?int|bytes|\bbits|_bits|digest", written) is not None


def _compares_integers(call: ast.Call) -> bool:
    """Whether names, literals or calls show integers or booleans, of which ``equal`` is an exact check."""
    for value in call.args[:2]:
        if isinstance(value, ast.Call) and re.search(
            r"(torch|np|numpy)\.(tensor|array)\(\[[\d\s,\[\]-]*\]", ast.unparse(value)
        ):
            return True
        if _INTEGER_NAMES.search(ast.unparse(value)) or _BOOLEAN_CALL.search(ast.unparse(value)):
            return True
    return False


def _is_asserted(module: Module, call: ast.Call) -> bool:
    for outer in module.ancestors(call):
        if isinstance(outer, ast.Assert):
            return True
        if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute) and outer.func.attr == "assertTrue":
            return True
        if isinstance(outer, ast.stmt):
            return False
    return False


def _surroundings(module: Module, call: ast.Call) -> str:
    """Return the words around a call: its lines with their comments, and the names of what encloses it."""
    words = [module.path.stem]
    words += module.lines[call.lineno - 1 : module.statement_lines(call)[1]]
    for outer in module.ancestors(call):
        if isinstance(outer, FunctionNode | ast.ClassDef):
            words.append(outer.name)
        elif isinstance(outer, ast.stmt):
            words.append(module.lines[outer.lineno - 1])
    return "\n".join(words)
