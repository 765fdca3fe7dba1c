"""Tells maintainers of training code, bit for bit, whether a change moved the numbers.

The names below are imported on first use (PEP 562), so that ``import e2e_registry`` costs a recipe nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.assertion import assert_matches_standard
    from e2e_registry.errors import RegistryError
    from e2e_registry.recording import MetricRecorder
    from e2e_registry.registration import main, register_e2e_ci
    from e2e_registry.tolerance import Tolerance

__version__ = "0.1.0"
__all__ = ["MetricRecorder", "RegistryError", "Tolerance", "assert_matches_standard", "main", "register_e2e_ci"]

_HOMES = {
    "MetricRecorder": "recording",
    "RegistryError": "errors",
    "Tolerance": "tolerance",
    "assert_matches_standard": "assertion",
    "main": "registration",
    "register_e2e_ci": "registration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
