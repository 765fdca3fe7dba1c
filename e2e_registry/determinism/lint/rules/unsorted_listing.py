"""DET007: directory listings in the order the file system gives them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from e2e_registry.determinism.lint.module import Module, last_name
from e2e_registry.determinism.lint.ordering import leak
from e2e_registry.determinism.lint.rule import Rule, Violation

_LISTING_FUNCTIONS = frozenset({"os.listdir", "os.scandir", "glob.glob", "glob.iglob"})
_PATH_METHODS = frozenset({"iterdir", "rglob"})
#: A ``.glob`` of one of these is not pathlib's: a method of the file's own class, or fsspec's, which sorts.
_OTHER_GLOBS = ("fs", "filesystem", "file_system", "api", "self", "cls")


class UnsortedListing(Rule):
    """``os.listdir``, ``glob`` and ``iterdir`` whose order reaches data."""

    code = "DET007"
    name = "unsorted-listing"
    summary = "the order of a directory listing reaches data"
    why = (
        "`os.listdir`, `os.scandir`, `glob` and `Path.iterdir` return entries in the order of the file system's own "
        "structures. It differs between machines, between file systems and after files are copied, so a dataset "
        "built from it has other sample ids in other places, and the same shuffle seed picks other samples."
    )
    fix = "Wrap it in `sorted(...)`."
    scope = (
        "Listings that are counted, tested for membership, sorted later, put in a set or a dict, shown in a message, "
        "or looped over only to delete or copy are left alone."
    )
    flagged = """
import os


def samples(folder):
    return [os.path.join(folder, name) for name in os.listdir(folder)]
"""
    clean = """
import os


def samples(folder):
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
"""
    triggers = ("listdir", "scandir", "glob", "iterdir")

    def check(self, module: Module) -> Iterator[Violation]:
        """Report listings whose order leaves the expression, the variable or the loop that takes them."""
        for call in module.nodes(ast.Call):
            shown = _listing(module, call)
            reason = None if shown is None else leak(module, call)
            if reason is not None:
                yield Violation(call, f"the unsorted order of `{shown}` {reason}")


def _listing(module: Module, call: ast.Call) -> str | None:
    name = module.qualified(call.func)
    if name in _LISTING_FUNCTIONS:
        return name
    if not isinstance(call.func, ast.Attribute) or (name or "").startswith("fsspec"):
        return None
    method = call.func.attr
    if method in _PATH_METHODS:
        return f".{method}()"
    if method == "glob" and name is None and call.args:
        receiver = last_name(call.func.value).lower().strip("_")
        return None if receiver.endswith(_OTHER_GLOBS) else ".glob()"
    return None
