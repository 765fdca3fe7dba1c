"""Makes training code repeat bit for bit, and says whether it did: usable alone, in any training code.

::

    from e2e_registry.determinism import make_deterministic, seed_worker

The names below are imported on first use (PEP 562): importing this package imports neither torch nor NumPy.
Add a name to ``_HOMES`` and, for type checkers, to the block above it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.determinism.doctor import Finding, Severity, judge, problems
    from e2e_registry.determinism.profiles import PROFILES, Profile, Variable, get_profile
    from e2e_registry.determinism.relaunch import LateVariable, bootstrap, late_variables
    from e2e_registry.determinism.seeding import (
        derive_seed,
        make_deterministic,
        sample_id_digest,
        sample_rng,
        seed_everything,
        seed_worker,
        worker_rng,
    )
    from e2e_registry.determinism.state import initial_environment, read_state
    from e2e_registry.determinism.switches import DeterminismError, Switches, apply, deterministic_mode
    from e2e_registry.determinism.variables import (
        CAPTURED_VARIABLES,
        ChildEnvironment,
        Origin,
        PinDifference,
        child_environment,
        pin_differences,
        runtime_env_variables,
    )

_HOMES = {
    "LateVariable": "relaunch",
    "bootstrap": "relaunch",
    "late_variables": "relaunch",
    "Finding": "doctor",
    "Severity": "doctor",
    "judge": "doctor",
    "problems": "doctor",
    "PROFILES": "profiles",
    "Profile": "profiles",
    "Variable": "profiles",
    "get_profile": "profiles",
    "derive_seed": "seeding",
    "make_deterministic": "seeding",
    "sample_id_digest": "seeding",
    "sample_rng": "seeding",
    "seed_everything": "seeding",
    "seed_worker": "seeding",
    "worker_rng": "seeding",
    "initial_environment": "state",
    "read_state": "state",
    "DeterminismError": "switches",
    "Switches": "switches",
    "apply": "switches",
    "deterministic_mode": "switches",
    "CAPTURED_VARIABLES": "variables",
    "ChildEnvironment": "variables",
    "Origin": "variables",
    "PinDifference": "variables",
    "child_environment": "variables",
    "pin_differences": "variables",
    "runtime_env_variables": "variables",
}

__all__ = [
    "CAPTURED_VARIABLES",
    "PROFILES",
    "ChildEnvironment",
    "DeterminismError",
    "Finding",
    "LateVariable",
    "Origin",
    "PinDifference",
    "Profile",
    "Severity",
    "Switches",
    "Variable",
    "apply",
    "bootstrap",
    "child_environment",
    "derive_seed",
    "deterministic_mode",
    "get_profile",
    "initial_environment",
    "judge",
    "late_variables",
    "make_deterministic",
    "pin_differences",
    "problems",
    "read_state",
    "runtime_env_variables",
    "sample_id_digest",
    "sample_rng",
    "seed_everything",
    "seed_worker",
    "worker_rng",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
