"""Nondeterminism that can be seen in source: rules over Python files, without importing them.

Needs nothing but the standard library, so it can run before any training dependency is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.determinism.lint.catalogue import CATALOGUE, Selection, find, select
    from e2e_registry.determinism.lint.engine import lint_paths, lint_source
    from e2e_registry.determinism.lint.finding import Finding, LintReport
    from e2e_registry.determinism.lint.render import (
        render_github,
        render_rule,
        render_rule_list,
        render_text,
        report_json,
        rule_json,
    )

_HOME = {
    "CATALOGUE": "catalogue",
    "Finding": "finding",
    "LintReport": "finding",
    "Selection": "catalogue",
    "find": "catalogue",
    "lint_paths": "engine",
    "lint_source": "engine",
    "render_github": "render",
    "render_rule": "render",
    "render_rule_list": "render",
    "render_text": "render",
    "report_json": "render",
    "rule_json": "render",
    "select": "catalogue",
}
__all__ = [
    "CATALOGUE",
    "Finding",
    "LintReport",
    "Selection",
    "find",
    "lint_paths",
    "lint_source",
    "render_github",
    "render_rule",
    "render_rule_list",
    "render_text",
    "report_json",
    "rule_json",
    "select",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
