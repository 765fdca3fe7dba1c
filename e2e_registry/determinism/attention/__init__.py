"""Which attention backends repeat bit for bit, the check before launch, and the patch inside the actor.

``torch.use_deterministic_algorithms`` governs torch's own operators. Attention kernels that are called from
outside of torch never see it, so every backend is classified by name, and those whose kernel takes a
``deterministic`` argument get it forced. The order in a recipe:

1. driver, before anything launches: :func:`validate_attention_args`, which fails in seconds;
2. actor, before the model is built: :func:`patch_flash_kernels`;
3. actor, after the model is built and its backend set: :func:`validate_attention_args` once more, with the model,
   and :func:`require_patched`.

Importing this package imports neither torch nor diffusers nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e_registry.determinism.attention.classification import (
        DIFFUSERS_BACKENDS,
        TRANSFORMERS_IMPLEMENTATIONS,
        AttentionClass,
        AttentionError,
        BackendClass,
        Library,
        canonical_name,
        classify,
    )
    from e2e_registry.determinism.attention.kernels import exposes_deterministic, force_deterministic, is_forced
    from e2e_registry.determinism.attention.patching import (
        NativeKernel,
        PatchReport,
        patch_flash_kernels,
        patched_kernels,
        register_native_kernel,
        require_patched,
    )
    from e2e_registry.determinism.attention.validation import (
        AttentionChoice,
        AttentionPlan,
        Source,
        canonicalise_environment,
        effective_backends,
        validate_attention_args,
    )

_HOMES = {
    "DIFFUSERS_BACKENDS": "classification",
    "TRANSFORMERS_IMPLEMENTATIONS": "classification",
    "AttentionClass": "classification",
    "AttentionError": "classification",
    "BackendClass": "classification",
    "Library": "classification",
    "canonical_name": "classification",
    "classify": "classification",
    "exposes_deterministic": "kernels",
    "force_deterministic": "kernels",
    "is_forced": "kernels",
    "NativeKernel": "patching",
    "PatchReport": "patching",
    "patch_flash_kernels": "patching",
    "patched_kernels": "patching",
    "register_native_kernel": "patching",
    "require_patched": "patching",
    "AttentionChoice": "validation",
    "AttentionPlan": "validation",
    "Source": "validation",
    "canonicalise_environment": "validation",
    "effective_backends": "validation",
    "validate_attention_args": "validation",
}

__all__ = [
    "DIFFUSERS_BACKENDS",
    "TRANSFORMERS_IMPLEMENTATIONS",
    "AttentionChoice",
    "AttentionClass",
    "AttentionError",
    "AttentionPlan",
    "BackendClass",
    "Library",
    "NativeKernel",
    "PatchReport",
    "Source",
    "canonical_name",
    "canonicalise_environment",
    "classify",
    "effective_backends",
    "exposes_deterministic",
    "force_deterministic",
    "is_forced",
    "patch_flash_kernels",
    "patched_kernels",
    "register_native_kernel",
    "require_patched",
    "validate_attention_args",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
