"""Random generators of a recipe: one for each use, so that what one of them draws depends on no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e_registry.determinism.seeding import derive_seed

if TYPE_CHECKING:
    import torch


def stream_generator(seed: int, stream: str) -> torch.Generator:
    """Return a CPU generator for one use of randomness in a run.

    Args:
        seed: The run's.
        stream: Names the use; equal names draw equal numbers.
    """
    import torch

    # torch's CPU generator looks at 32 bits of its seed.
    return torch.Generator().manual_seed(derive_seed(seed, stream=stream) & 0xFFFFFFFF)
