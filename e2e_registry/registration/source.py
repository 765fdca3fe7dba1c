"""Reads a registration from a test file's source, without executing it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_registry.config import Settings, did_you_mean
from e2e_registry.errors import RegistrationError
from e2e_registry.registration.declaration import Registration
from e2e_registry.registration.place import Place, blaming, locate
from e2e_registry.registration.syntax import Node, base_name, module_bindings, parse, position, source_of
from e2e_registry.registration.validation import validate
from e2e_registry.tolerance import Tolerance

_REGISTER = ("e2e_registry.register_e2e_ci", "e2e_registry.registration.register_e2e_ci")
_TOLERANCE = ("e2e_registry.Tolerance", "e2e_registry.tolerance.Tolerance")

_ALLOWED = (
    "the file is read, not run; allowed are strings, numbers, True, False, None, lists, tuples and dicts of them, "
    "their concatenation, module-level constants assigned once to such values, and Tolerance(...)"
)

# Methods that change a list or dict in place: a constant that one is called on is no constant.
_MUTATORS = frozenset(
    {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"}
)


def declares_test(source: bytes) -> bool:
    """Whether a file means to declare a test, rightly or not: it calls or imports ``register_e2e_ci``.

    One that names the function and cannot be parsed counts too: :func:`read_registration` says what is wrong with it.
    """
    name = "register_e2e_ci"
    if name.encode() not in source:  # true of nearly every file, which need not be parsed then
        return False
    try:
        nodes = ast.walk(parse("", source))
    except (RegistrationError, RecursionError):
        return True
    return any(
        (isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name)
        for node in nodes
    )


def read_registration(file: Path, settings: Settings) -> Registration:
    """Read the registration of a test file from its source; the file is never executed.

    Raises:
        RegistrationError: The file cannot be read or parsed, holds no call or several, or the call cannot be accepted.
    """
    location = locate(file, settings)
    try:
        source = location.file.read_bytes()
    except FileNotFoundError as error:
        raise RegistrationError("does not exist", where=location.test_id) from error
    except OSError as error:
        raise RegistrationError(f"cannot be read: {error.strerror or error}", where=location.test_id) from error
    try:
        module = _Module(location.test_id, parse(location.test_id, source))
        line, literals = module.registration()
    except RecursionError as error:
        raise RegistrationError("is nested too deeply to be read", where=location.test_id) from error
    keywords = {name: literal.plain() for name, literal in literals.items()}
    lines = dict(pair for name, literal in literals.items() for pair in literal.lines(name))
    return validate(keywords, location, line, lines, settings)


@dataclass(frozen=True)
class _Literal:
    """A value read from source, and the lines of its parts.

    ``value`` is a scalar, a ``Tolerance``, a list or tuple of literals, or a dict of scalars to literals.
    """

    value: Any
    line: int

    def plain(self) -> Any:
        if isinstance(self.value, list | tuple):
            return type(self.value)(item.plain() for item in self.value)
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value

    def lines(self, argument: str) -> Iterator[tuple[str, int]]:
        yield argument, self.line
        if isinstance(self.value, list | tuple | dict):
            items = self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
            for key, item in items:
                yield from item.lines(f"{argument}[{key!r}]")


class _Module:
    """One parsed test file."""

    def __init__(self, where: str, tree: ast.Module) -> None:
        self.where = where
        self.tree = tree
        self.bindings = module_bindings(tree)
        if "*" in self.bindings:
            raise RegistrationError(
                "`import *` hides which names it binds",
                where=f"{where}:{self.bindings['*'][0].node.lineno}",
                hint="import the names that the file uses",
            )

    def registration(self) -> tuple[int, dict[str, _Literal]]:
        """Return the line and the keywords of the one call."""
        call = self.find_call()
        if call.args:
            first = call.args[0]
            raise self.refusal(first, "arguments", f"`{source_of(first)}` has no keyword", "write keyword=value")
        literals: dict[str, _Literal] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise self.refusal(
                    keyword.value, "arguments", f"`**{source_of(keyword.value)}` cannot be read", _ALLOWED
                )
            literals[keyword.arg] = self.evaluate(keyword.value, keyword.arg, call)
        return call.lineno, literals

    def find_call(self) -> ast.Call:
        """Return the one ``register_e2e_ci(...)`` statement of the module."""
        calls = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.dotted(node.func) in _REGISTER
        ]
        calls.sort(key=position)
        if not calls:
            raise self.no_call()
        if len(calls) > 1:
            raise RegistrationError(
                f"calls register_e2e_ci twice, on lines {calls[0].lineno} and {calls[1].lineno}",
                where=f"{self.where}:{calls[1].lineno}",
                hint="one file declares one test: move one of them to a file of its own",
            )
        statements = (node.value for node in self.tree.body if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign))
        if not any(value is calls[0] for value in statements):
            raise RegistrationError(
                "register_e2e_ci must be a statement of its own at module level, not inside another",
                where=f"{self.where}:{calls[0].lineno}",
            )
        return calls[0]

    def no_call(self) -> RegistrationError:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and source_of(node.func).split(".")[-1] == "register_e2e_ci":
                return RegistrationError(
                    f"`{source_of(node.func)}` is called, but is not, or not only, imported from e2e_registry",
                    where=f"{self.where}:{node.lineno}",
                    hint="from e2e_registry import register_e2e_ci",
                )
        return RegistrationError(
            "declares no test: there is no register_e2e_ci(...) call",
            where=f"{self.where}:1",
            hint="add the call, or give the file a name that does not begin with test_"
            if Path(self.where).name.startswith("test_")
            else "name a test file: one that calls register_e2e_ci",
        )

    def dotted(self, node: ast.expr) -> str | None:
        """Return the full name of what ``node`` refers to, if only imports say what that is."""
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        targets = {binding.imported for binding in self.bindings.get(node.id, ())}
        return targets.pop() if len(targets) == 1 else None

    def refusal(self, node: ast.expr, argument: str, message: str, hint: str | None) -> RegistrationError:
        return RegistrationError(message, where=f"{self.where}:{node.lineno}:{argument}", hint=hint)

    def evaluate(self, node: ast.expr, argument: str, use: Node, start: int = 0) -> _Literal:
        """Return the value of an expression.

        Args:
            node: The expression.
            argument: The argument it belongs to, for errors.
            use: The statement or call that needs it: constants must be assigned before.
            start: The index of its first item, if it is the right side of a concatenation.
        """
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return _Literal(node.value, node.lineno)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)) if (
                not isinstance(number, bool)
            ):
                return _Literal(-number if isinstance(node.op, ast.USub) else number, node.lineno)
            case ast.List():
                return _Literal(self.items(node.elts, argument, use, start), node.lineno)
            case ast.Tuple():
                return _Literal(tuple(self.items(node.elts, argument, use, start)), node.lineno)
            case ast.Dict():
                return self.dict(node, argument, use)
            case ast.Name():
                return self.constant(node, argument, use)
            case ast.BinOp(op=ast.Add()):
                return self.concatenation(node, argument, use, start)
            case ast.Call() if self.dotted(node.func) in _TOLERANCE:
                return self.tolerance(node, argument, use)
            case _:
                raise self.refusal(node, argument, f"`{source_of(node)}` cannot be read from source", _ALLOWED)

    def items(self, nodes: Sequence[ast.expr], argument: str, use: Node, start: int) -> list[_Literal]:
        items: list[_Literal] = []
        for node in nodes:
            at = start + len(items)
            if not isinstance(node, ast.Starred):
                items.append(self.evaluate(node, f"{argument}[{at}]", use))
                continue
            inner = self.evaluate(node.value, argument, use, at)
            if not isinstance(inner.value, list | tuple):
                raise self.refusal(node, f"{argument}[{at}]", f"`{source_of(node)}` unpacks no list or tuple", _ALLOWED)
            items.extend(inner.value)
        return items

    def dict(self, node: ast.Dict, argument: str, use: Node) -> _Literal:
        items: dict[Any, _Literal] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            if key_node is None:
                raise self.refusal(
                    value_node, argument, f"`**{source_of(value_node)}` cannot be read from source", _ALLOWED
                )
            key = self.evaluate(key_node, argument, use).plain()
            inner = f"{argument}[{key!r}]"
            if not isinstance(key, str):
                raise self.refusal(key_node, inner, f"key `{source_of(key_node)}` must be a string", None)
            if key in items:
                # Python would silently keep the last one.
                raise self.refusal(
                    key_node, inner, f"{key!r} is listed twice", f"the first is on line {items[key].line}"
                )
            items[key] = self.evaluate(value_node, inner, use)
        return _Literal(items, node.lineno)

    def concatenation(self, node: ast.BinOp, argument: str, use: Node, start: int) -> _Literal:
        left = self.evaluate(node.left, argument, use, start)
        after = start + len(left.value) if isinstance(left.value, list | tuple) else start
        right = self.evaluate(node.right, argument, use, after)
        if type(left.value) is not type(right.value) or not isinstance(left.value, str | list | tuple):
            raise self.refusal(
                node, argument, f"`{source_of(node)}` concatenates no two strings, lists or tuples", _ALLOWED
            )
        return _Literal(left.value + right.value, node.lineno)

    def tolerance(self, node: ast.Call, argument: str, use: Node) -> _Literal:
        known = [item.name for item in dataclasses.fields(Tolerance)]
        if node.args:
            raise self.refusal(
                node.args[0], argument, f"`{source_of(node.args[0])}` has no keyword", f"known: {', '.join(known)}"
            )
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.refusal(keyword.value, argument, f"`**{source_of(keyword.value)}` cannot be read", _ALLOWED)
            inner = f"{argument}.{keyword.arg}"
            if keyword.arg not in known:
                raise self.refusal(
                    keyword.value, inner, "unknown keyword of Tolerance", did_you_mean(keyword.arg, known)
                )
            values[keyword.arg] = self.evaluate(keyword.value, inner, use).plain()
        with blaming(Place(self.where, node.lineno), argument):
            return _Literal(Tolerance(**values), node.lineno)

    def constant(self, node: ast.Name, argument: str, use: Node) -> _Literal:
        """Return the value of a module-level constant, if nothing in the file could make it another one."""
        name, found = node.id, self.bindings.get(node.id, [])
        lines = [binding.node.lineno for binding in found]
        if not found:
            raise self.refusal(node, argument, f"`{name}` is not a module-level constant", _ALLOWED)
        if len(found) > 1:
            listed = f"{', '.join(map(str, lines[:-1]))} and {lines[-1]}"
            raise self.refusal(
                node,
                argument,
                f"`{name}` is assigned more than once, on lines {listed}",
                "assign it once, to a literal",
            )
        (binding,) = found
        if binding.value is None:
            raise self.refusal(node, argument, f"`{name}` {binding.how} on line {lines[0]}: no constant", _ALLOWED)
        if position(binding.node) >= position(use):
            raise self.refusal(node, argument, f"`{name}` is assigned on line {lines[0]}, after its use", "move it up")
        literal = self.evaluate(binding.value, argument, binding.node)
        if isinstance(literal.value, list | dict):
            self.refuse_mutation(node, argument)
        return literal

    def refuse_mutation(self, node: ast.Name, argument: str) -> None:
        """Refuse a list or dict that some statement of the file changes in place."""
        for inner in ast.walk(self.tree):
            match inner:
                case ast.Subscript(ctx=ast.Store() | ast.Del()):
                    pass
                case ast.Attribute(attr=name) if name in _MUTATORS:
                    pass
                case _:
                    continue
            if base_name(inner) == node.id:
                message = f"`{node.id}` is changed on line {inner.lineno}, by `{source_of(inner)}`"
                raise self.refusal(node, argument, message, "write the whole value where it is assigned")
