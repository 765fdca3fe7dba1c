"""Random generators of a recipe: one for each use, so that what one of them draws depends on no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from e2e_registry.determinism.seeding import derive_seed, torch_seed

if TYPE_CHECKING:
    import torch


def stream_generator(seed: int, stream: str) -> torch.Generator:
    """Return a CPU generator for one use of randomness in a run.

    Args:
        seed: The run's.
        stream: Names the use; equal names draw equal numbers.
    """
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, stream))


def stream_seed(seed: int, stream: str) -> int:
    """Return the seed of :func:`stream_generator`: of 32 bits, since torch's CPU generator looks at no more."""
    return derive_seed(seed, stream=stream) & 0xFFFFFFFF


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let what draws from torch's own CPU generator, as modules do for their weights, draw from a seed of its own.

    Afterwards it goes on as if nothing had been drawn. Generators of devices are left alone.
    """
    import torch

    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(torch_seed(seed))
        yield
