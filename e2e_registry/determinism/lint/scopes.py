"""Which object a name stands for: scopes, imports, aliases and single assignments of one module.

The resolution is lexical and never imports anything. It answers only where the source leaves one reading: a name
that is also a parameter, a loop target or assigned twice has no qualified name, so that a rule keeps silent
rather than guess.
"""

from __future__ import annotations

import ast
import builtins
import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

NodeT = TypeVar("NodeT", bound=ast.AST)

_ComprehensionNode = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_LEAVES = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
_SCOPING_NODES = frozenset(
    {
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.Lambda,
        ast.ClassDef,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
        ast.GeneratorExp,
        ast.comprehension,
    }
)
_BINDING_NODES = frozenset(
    {
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
        ast.AugAssign,
        ast.NamedExpr,
        ast.Global,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.arg,
        ast.ExceptHandler,
        ast.MatchAs,
        ast.MatchStar,
        ast.MatchMapping,
        ast.Name,
    }
)
_MAX_ALIAS_HOPS = 8

#: Public names of objects that are also reachable under the module that defines them.
_CANONICAL_NAMES = {
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader": (
        "torchdata.stateful_dataloader.StatefulDataLoader"
    ),
    "torch.random.manual_seed": "torch.manual_seed",
    "torch.random.seed": "torch.seed",
    "torch.cuda.random.manual_seed": "torch.cuda.manual_seed",
    "torch.cuda.random.manual_seed_all": "torch.cuda.manual_seed_all",
    "numpy.random.mtrand.RandomState": "numpy.random.RandomState",
    "os.path.os.environ": "os.environ",
}


class BindingKind(enum.Enum):
    """How a name came to stand for something in a scope."""

    IMPORT = "import"
    VALUE = "value"
    PARAMETER = "parameter"
    DEFINITION = "definition"
    AUGMENTED = "augmented"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Binding:
    """One statement that binds a name.

    Attributes:
        kind: What kind of statement it is.
        node: The statement or expression that binds.
        qualified: For imports, the dotted name that is imported.
        value: For assignments, the expression on the right.
        annotation: For annotated assignments and parameters, the annotation.
    """

    kind: BindingKind
    node: ast.AST
    qualified: str | None = None
    value: ast.expr | None = None
    annotation: ast.expr | None = None


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class, function or comprehension, and the names bound in it."""

    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    globals: set[str] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        """Whether the names bound here are invisible to the functions inside."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_comprehension(self) -> bool:
        """Whether a walrus inside binds outside of this scope."""
        return isinstance(self.node, _ComprehensionNode)

    @property
    def module(self) -> Scope:
        """The outermost scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def bind(self, name: str, binding: Binding) -> None:
        """Record that ``name`` is bound here, or where a ``global`` statement sends it."""
        scope = self
        if isinstance(binding.node, ast.NamedExpr):
            while scope.is_comprehension and scope.parent is not None:
                scope = scope.parent
        if name in scope.globals:
            scope = scope.module
        scope.bindings[name].append(binding)

    def lookup(self, name: str) -> tuple[Scope, Sequence[Binding]] | None:
        """Return the scope whose binding of ``name`` is visible here, and all its bindings there."""
        scope: Scope | None = self.module if name in self.globals else self
        is_first = True
        while scope is not None:
            if name in scope.bindings and (is_first or not scope.is_class):
                return scope, scope.bindings[name]
            # A comprehension in a class body still sees the class: only functions hide it.
            is_first = is_first and scope.is_comprehension
            scope = scope.parent
        return None


class NameTable:
    """The tree of one module with parents, scopes and an index by node type.

    Args:
        tree: The parsed module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.module_scope = Scope(tree, None)
        self.by_type: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self._names: dict[str, list[ast.Name]] | None = None
        self._qualified: dict[ast.AST, str | None] = {}
        self._build()

    def _build(self) -> None:
        # An explicit stack: a generated file may nest expressions deeper than Python may recurse.
        stack: list[tuple[ast.AST, ast.AST | None, Scope]] = [(self.tree, None, self.module_scope)]
        while stack:
            node, parent, scope = stack.pop()
            kind = type(node)
            self.by_type[kind].append(node)
            self.scopes[node] = scope
            if parent is not None:
                self.parents[node] = parent
            if kind in _BINDING_NODES:
                _bind(node, parent, scope)
            if kind in _SCOPING_NODES:
                stack.extend(reversed([(child, node, inner) for child, inner in _scoped_children(node, scope)]))
            elif kind is not ast.Name and kind is not ast.Constant:
                stack.extend(reversed([(child, node, scope) for child in _plain_children(node)]))

    def nodes(self, kind: type[NodeT]) -> list[NodeT]:
        """Return all nodes of exactly this type, in source order."""
        return cast("list[NodeT]", self.by_type.get(kind, []))

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the scope in which ``node`` is evaluated."""
        return self.scopes.get(node, self.module_scope)

    def names(self, name: str) -> Sequence[ast.Name]:
        """Return every use of ``name`` in the file, in source order, whatever it stands for."""
        if self._names is None:
            self._names = defaultdict(list)
            for node in self.nodes(ast.Name):
                self._names[node.id].append(node)
        return self._names.get(name, [])

    def same_variable(self, node: ast.Name) -> list[ast.Name]:
        """Return every use of the variable that ``node`` names, in source order, ``node`` included."""
        found = self.scope_of(node).lookup(node.id)
        if found is None:
            return [node]
        owner = found[0]
        return [use for use in self.names(node.id) if self._owner(use) is owner]

    def _owner(self, node: ast.Name) -> Scope | None:
        found = self.scope_of(node).lookup(node.id)
        return None if found is None else found[0]

    def bindings(self, node: ast.Name) -> Sequence[Binding]:
        """Return what may have bound the variable that ``node`` names; empty for builtins and unknown names."""
        found = self.scope_of(node).lookup(node.id)
        return () if found is None else found[1]

    def single_value(self, node: ast.expr) -> ast.expr:
        """Follow names that are assigned exactly once to the expression they were assigned; else return ``node``."""
        for _ in range(_MAX_ALIAS_HOPS):
            if isinstance(node, ast.NamedExpr):
                node = node.value
            if not isinstance(node, ast.Name):
                break
            bindings = self.bindings(node)
            if len(bindings) != 1 or bindings[0].kind is not BindingKind.VALUE or bindings[0].value is None:
                break
            node = bindings[0].value
        return node

    def qualified(self, node: ast.AST) -> str | None:
        """Return the dotted name of the object that an expression stands for, through imports and aliases.

        ``np.random.seed`` gives ``numpy.random.seed`` after ``import numpy as np``; ``round`` gives
        ``builtins.round`` unless something in the file shadows it. ``None`` where the source leaves it open.
        """
        return self._qualify(node, _MAX_ALIAS_HOPS)

    def _qualify(self, node: ast.AST, hops: int) -> str | None:
        if node in self._qualified:
            return self._qualified[node]
        if hops == 0:
            return None
        name: str | None = None
        if isinstance(node, ast.Attribute):
            base = self._qualify(node.value, hops)
            name = None if base is None else _canonical(f"{base}.{node.attr}")
        elif isinstance(node, ast.Name):
            name = self._qualify_name(node, hops)
        self._qualified[node] = name
        return name

    def _qualify_name(self, node: ast.Name, hops: int) -> str | None:
        bindings = self.bindings(node)
        if not bindings:
            return f"builtins.{node.id}" if hasattr(builtins, node.id) else None
        imports = [binding for binding in bindings if binding.kind is BindingKind.IMPORT]
        if imports:
            is_open = any(not _is_import_fallback(binding) for binding in bindings)
            return None if is_open else _canonical(imports[0].qualified or "")
        if len(bindings) == 1 and bindings[0].kind is BindingKind.VALUE:
            value = bindings[0].value
            if isinstance(value, ast.Name | ast.Attribute):
                return self._qualify(value, hops - 1)
        return None


def _is_import_fallback(binding: Binding) -> bool:
    """Whether a binding beside an import is the usual stand-in for a package that is not installed."""
    if binding.kind in (BindingKind.IMPORT, BindingKind.DEFINITION):
        return True
    is_constant = isinstance(binding.value, ast.Constant)
    return binding.kind is BindingKind.VALUE and is_constant


def _canonical(name: str) -> str:
    return _CANONICAL_NAMES.get(name, name)


def _bind(node: ast.AST, parent: ast.AST | None, scope: Scope) -> None:
    """Record the names that ``node`` itself binds."""
    match node:
        case ast.Import():
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound, target = (alias.asname, alias.name) if alias.asname else (first, first)
                scope.bind(bound, Binding(BindingKind.IMPORT, node, qualified=target))
        case ast.ImportFrom():
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                qualified = f"{module}.{alias.name}" if node.module else f"{module}{alias.name}"
                scope.bind(alias.asname or alias.name, Binding(BindingKind.IMPORT, node, qualified=qualified))
        case ast.Assign():
            for assigned in node.targets:
                if isinstance(assigned, ast.Name):
                    scope.bind(assigned.id, Binding(BindingKind.VALUE, node, value=node.value))
        case ast.AnnAssign(target=ast.Name(id=name), value=value, annotation=annotation) if value is not None:
            scope.bind(name, Binding(BindingKind.VALUE, node, value=value, annotation=annotation))
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            scope.bind(name, Binding(BindingKind.AUGMENTED, node, value=value))
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            scope.bind(name, Binding(BindingKind.VALUE, node, value=value))
        case ast.Global():
            scope.globals.update(node.names)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            scope.bind(name, Binding(BindingKind.DEFINITION, node))
        case ast.arg(arg=name, annotation=annotation):
            scope.bind(name, Binding(BindingKind.PARAMETER, node, annotation=annotation))
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            scope.bind(name, Binding(BindingKind.OTHER, node))
        case ast.MatchMapping(rest=str(name)):
            scope.bind(name, Binding(BindingKind.OTHER, node))
        case ast.Name(id=name, ctx=ast.Store()) if not isinstance(
            parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
        ):
            scope.bind(name, Binding(BindingKind.OTHER, node))


def _plain_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children that can hold names: not operators and contexts, which make up a third of a tree."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            yield from (item for item in value if isinstance(item, ast.AST))
        elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
            yield value


def _scoped_children(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """Yield the children of a node that opens a scope or belongs to one, each with the scope it is evaluated in."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            inner = Scope(node, scope)
            for outer_child in (*node.decorator_list, *_defaults(node.args), *([node.returns] if node.returns else ())):
                yield outer_child, scope
            for inner_child in (*_parameters(node.args), *node.body):
                yield inner_child, inner
        case ast.Lambda():
            inner = Scope(node, scope)
            for default in _defaults(node.args):
                yield default, scope
            for inner_child in (*_parameters(node.args), node.body):
                yield inner_child, inner
        case ast.ClassDef():
            inner = Scope(node, scope)
            for outer_child in (*node.decorator_list, *node.bases, *node.keywords):
                yield outer_child, scope
            for statement in node.body:
                yield statement, inner
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            inner = Scope(node, scope)
            yield from ((generator, inner) for generator in node.generators)
            elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            yield from ((element, inner) for element in elements)
        case ast.comprehension():
            # Only the first iterable is evaluated outside; a name in a later one may be an earlier target.
            owner = scope.node
            is_first = isinstance(owner, _ComprehensionNode) and owner.generators[0] is node
            yield node.iter, scope.parent if is_first and scope.parent is not None else scope
            yield node.target, scope
            yield from ((condition, scope) for condition in node.ifs)


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]
