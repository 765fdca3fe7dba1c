"""One Python file as the rules see it: decoded text, tree, names and the comments' lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from e2e_registry.determinism.lint.scopes import NameTable, NodeT

_SIMPLE_STATEMENTS = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Expr,
    ast.Return,
    ast.Assert,
    ast.Raise,
    ast.Delete,
)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class _Unknown:
    """The value of an expression that the source does not spell out."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()


class UnreadableSourceError(Exception):
    """A file that Python itself could not run: the reason, and the place where known.

    Internal to the lint: the engine turns it into a finding.
    """

    def __init__(self, reason: str, line: int = 1, column: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column


def decode_source(data: bytes) -> str:
    """Decode a file as the interpreter would: byte order mark, coding comment, else UTF-8; newlines become line feeds.

    Raises:
        UnreadableSourceError: The bytes are not text in the encoding that the file declares.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except SyntaxError as error:
        raise UnreadableSourceError(str(error.msg)) from error
    except (UnicodeDecodeError, LookupError) as error:
        line = data[: error.start].count(b"\n") + 1 if isinstance(error, UnicodeDecodeError) else 1
        raise UnreadableSourceError(f"not text in the encoding it declares: {error}", line) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_source(text: str) -> ast.Module:
    """Parse a file without importing it.

    Raises:
        UnreadableSourceError: The text is not the Python that this interpreter reads.
    """
    try:
        with warnings.catch_warnings():
            # An invalid escape sequence in someone's source is not this tool's warning to give.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise UnreadableSourceError(f"syntax error: {error.msg}", error.lineno or 1, error.offset or 1) from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableSourceError("nested too deeply to parse") from error
    except ValueError as error:
        raise UnreadableSourceError(f"syntax error: {error}") from error


class Module:
    """A parsed file.

    Args:
        path: The file, as findings shall name it.
        text: Its decoded text, newlines as line feeds.
        in_package: Whether the file belongs to an importable package, so that its functions run on behalf of a
            script that is elsewhere.

    Raises:
        UnreadableSourceError: The text does not parse.
    """

    def __init__(self, path: Path, text: str, *, in_package: bool = False) -> None:
        self.path = path
        self.text = text
        self.in_package = in_package
        self.tree = parse_source(text)

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their newlines."""
        return self.text.split("\n")

    @cached_property
    def names(self) -> NameTable:
        """Scopes and names. Built on first use: most files of a code base trigger no rule."""
        return NameTable(self.tree)

    def nodes(self, kind: type[NodeT]) -> list[NodeT]:
        """Return all nodes of exactly this type, in source order."""
        return self.names.nodes(kind)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that holds ``node``."""
        return self.names.parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node``, innermost first."""
        parent = self.parent(node)
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def qualified(self, node: ast.AST) -> str | None:
        """Return the dotted name that an expression stands for; see :meth:`NameTable.qualified`."""
        return self.names.qualified(node)

    def constant(self, node: ast.expr | None) -> object:
        """Return the literal value of an expression, through names assigned once, or :data:`UNKNOWN`."""
        if node is None:
            return UNKNOWN
        value = self.names.single_value(node)
        if isinstance(value, ast.Constant):
            return value.value
        if (
            isinstance(value, ast.UnaryOp)
            and isinstance(value.op, ast.USub)
            and isinstance(value.operand, ast.Constant)
        ):
            number = value.operand.value
            return -number if isinstance(number, int | float) else UNKNOWN
        return UNKNOWN

    def enclosing_function(self, node: ast.AST) -> FunctionNode | None:
        """Return the innermost ``def`` around ``node``, or ``None`` for code that runs at import."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, FunctionNode)), None)

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the innermost statement that ``node`` belongs to; ``node`` itself if it is one."""
        if isinstance(node, ast.stmt):
            return node
        return next((outer for outer in self.ancestors(node) if isinstance(outer, ast.stmt)), node)

    def statement_lines(self, node: ast.AST) -> tuple[int, int]:
        """Return the first and last line of the simple statement around ``node``: comments about it stand there too."""
        statement = self.statement(node)
        chosen = statement if isinstance(statement, _SIMPLE_STATEMENTS) else node
        first = getattr(chosen, "lineno", 1)
        return first, getattr(chosen, "end_lineno", None) or first

    @cached_property
    def is_script(self) -> bool:
        """Whether the file guards code with ``if __name__ == "__main__"``."""
        return bool(re.search(r"""^if\s+__name__\s*==\s*["']__main__["']""", self.text, re.MULTILINE))


def dotted(node: ast.AST) -> str | None:
    """Return ``a.b.c`` as it is written, or ``None`` for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def last_name(node: ast.AST) -> str:
    """Return the last component of what is written: ``log`` for ``self.run.log``; empty if it has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument ``name`` of a call, also where it is given by position (from 0)."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        if not any(isinstance(value, ast.Starred) for value in before):
            return call.args[position]
    return None


def has_unpacking(call: ast.Call) -> bool:
    """Whether a call passes ``*args`` or ``**kwargs``, so that the source does not show all its arguments."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(value, ast.Starred) for value in call.args
    )
