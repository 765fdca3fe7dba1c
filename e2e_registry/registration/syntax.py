"""The syntax of a test file: parsing it, and which of its statements bind which module-level name."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from e2e_registry.errors import RegistrationError


def parse(where: str, source: bytes) -> ast.Module:
    """Return the syntax tree of a file; ``where`` names it in errors.

    Raises:
        RegistrationError: It is not Python; the message shows line and caret.
        RecursionError: It is nested too deeply.
    """
    if b"\0" in source:
        line = source.count(b"\n", 0, source.index(b"\0")) + 1
        raise RegistrationError("holds a NUL byte", where=f"{where}:{line}", hint="save it as UTF-8")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the file's escapes and comparisons: for whoever runs it
            # No real name, or Python would look for the text of an erroneous line in a file of that name.
            tree = ast.parse(source, "<test>")
            # Some errors, a repeated keyword among them, are found only when the tree is compiled.
            compile(tree, "<test>", "exec", dont_inherit=True)
            return tree
    except SyntaxError as error:
        line = error.lineno or 1
        shown = _marked_line(error.text or _line(source, line), error.offset) if error.offset else ""
        raise RegistrationError(f"is not valid Python: {error.msg}{shown}", where=f"{where}:{line}") from error
    except MemoryError as error:  # the parser's own stack; its memory is released by now
        raise RecursionError("parser stack overflow") from error


def _line(source: bytes, line: int) -> str:
    lines = re.split("\r\n|\r|\n", source.decode(errors="replace"))  # splitlines() would also split at form feeds
    return lines[line - 1] if line <= len(lines) else ""


def _marked_line(text: str, offset: int) -> str:
    """Return a line and, below it, a caret at the 1-based ``offset``; only a window of a long line."""
    start = max(0, offset - 1 - 60)
    before, after = text[start : offset - 1], text[offset - 1 :].rstrip()[:40]
    # Tabs stay tabs, so that the caret stands below its character however wide a terminal shows them.
    indent = "".join("\t" if char == "\t" else " " for char in before)
    return f"\n    {before}{after}\n    {indent}^"


#: The nodes that have a place in the file.
Node = ast.stmt | ast.expr | ast.excepthandler | ast.pattern


class Binding(NamedTuple):
    """One statement that binds a module-level name.

    Attributes:
        node: The binding statement or expression.
        how: What it does, as a predicate of the name.
        imported: The dotted name an import binds.
        value: The expression that a plain top-level assignment binds.
    """

    node: Node
    how: str
    imported: str | None = None
    value: ast.expr | None = None


def module_bindings(tree: ast.Module) -> dict[str, list[Binding]]:
    """Return every binding of each name in the scope of a module, in source order."""
    return _BindingVisitor(tree).found


class _BindingVisitor(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.found: dict[str, list[Binding]] = {}
        self.top_level = {id(statement) for statement in tree.body}
        self.visit(tree)

    def add(self, name: str, binding: Binding) -> None:
        self.found.setdefault(name, []).append(binding)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            # `import a.b` binds `a`; `import a.b as c` binds `c` to `a.b`.
            name, target = (alias.asname, alias.name) if alias.asname else [alias.name.partition(".")[0]] * 2
            self.add(name, Binding(node, "is imported", imported=target))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = "." * node.level + (node.module or "")
        for alias in node.names:
            self.add(alias.asname or alias.name, Binding(node, "is imported", imported=f"{source}.{alias.name}"))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assign(node, node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # `NAME: int` binds nothing
            self.assign(node, [node.target], node.value)

    def assign(self, node: ast.stmt, targets: Sequence[ast.expr], value: ast.expr) -> None:
        self.visit(value)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and id(node) in self.top_level:
            self.add(targets[0].id, Binding(node, "is assigned", value=value))
        else:
            for target in targets:
                self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.add(node.id, Binding(node, "is assigned other than by a statement `NAME = literal` of its own"))
        elif isinstance(node.ctx, ast.Del):
            self.add(node.id, Binding(node, "is deleted"))

    def visit_comprehension(self, node: ast.comprehension) -> None:
        # The targets live in the comprehension; a `:=` in it binds in the module.
        self.visit(node.iter)
        for condition in node.ifs:
            self.visit(condition)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Skip: nothing in a lambda binds a name of the module."""

    def visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.add(node.name, Binding(node, "is a class or function"))
        for child in ast.iter_child_nodes(node):
            if child not in node.body:  # decorators and defaults are evaluated in the module's scope
                self.visit(child)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):
                for name in inner.names:
                    self.add(name, Binding(inner, "is declared global, and may be assigned there,"))

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_scope  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.add(node.name, Binding(node, "is bound by `except`"))
        self.generic_visit(node)

    def visit_capture(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            self.add(name, Binding(node, "is bound by `match`"))
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = visit_capture  # noqa: N815


def base_name(node: ast.AST) -> str | None:
    """Return ``a`` of ``a.b[0].c``; None if the expression does not begin with a name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def position(node: Node) -> tuple[int, int]:
    """Return line and column, to order nodes of one file."""
    return node.lineno, node.col_offset


def source_of(node: ast.AST) -> str:
    """Return an expression as one line of at most 60 characters, for messages."""
    try:
        text = " ".join(ast.unparse(node).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return type(node).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
