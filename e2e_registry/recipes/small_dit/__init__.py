"""A native model package: a small diffusion transformer with an attention kernel of its own, and its latent encoder.

Teams keep such packages beside diffusers: the model is written out, and calls a kernel that torch's strict mode does
not reach. What a recipe needs to know of it is :data:`ATTENTION_KERNELS`. Importing this imports no torch.
"""

from __future__ import annotations

from e2e_registry.determinism.attention import NativeKernel

#: Where :mod:`e2e_registry.recipes.small_dit.model` looks its kernel up; for ``register_native_kernel``.
ATTENTION_KERNELS = (NativeKernel(f"{__name__}.attention", "tiled_attention"),)
