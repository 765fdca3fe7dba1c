"""Declarations of tests: ``register_e2e_ci(...)``, executed as Python or read from source.

A suite is planned, listed and audited on machines that have no torch, and a listing must not run other people's
code: so the tool never executes a test file, it reads the one call from the syntax tree. The same file can still be
executed by hand. Both ways end in :func:`~e2e_registry.registration.validation.validate`, so that what executes and
what is read cannot differ.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.registration.coverage import (
        check_digest_policies,
        check_ulp_policies,
        coverage_faults,
        coverage_warnings,
        never_emitted_text,
    )
    from e2e_registry.registration.declaration import Quarantine, Registration
    from e2e_registry.registration.discovery import discover, find_test, is_discovered, test_locations
    from e2e_registry.registration.entry import main, register_e2e_ci
    from e2e_registry.registration.source import declares_test, read_registration

__all__ = [
    "Quarantine",
    "Registration",
    "check_digest_policies",
    "check_ulp_policies",
    "coverage_faults",
    "coverage_warnings",
    "declares_test",
    "discover",
    "find_test",
    "is_discovered",
    "main",
    "never_emitted_text",
    "read_registration",
    "register_e2e_ci",
    "test_locations",
]

_HOMES = {
    "Quarantine": "declaration",
    "Registration": "declaration",
    "check_digest_policies": "coverage",
    "check_ulp_policies": "coverage",
    "coverage_faults": "coverage",
    "coverage_warnings": "coverage",
    "declares_test": "source",
    "discover": "discovery",
    "find_test": "discovery",
    "is_discovered": "discovery",
    "main": "entry",
    "never_emitted_text": "coverage",
    "read_registration": "source",
    "register_e2e_ci": "entry",
    "test_locations": "discovery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
