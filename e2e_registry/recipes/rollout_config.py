"""What trainer and engine of a recipe must agree on. The driver makes it, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e_registry.recipes.generators import stream_generator

if TYPE_CHECKING:
    import torch

    from e2e_registry.recipes.dtype_policy import Precision


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What trainer and engine must agree on.

    Attributes:
        seed: Of the run.
        prompts: Prompts of a rollout.
        group_size: Samples of a prompt.
        micro_batch_size: Samples that one forward pass takes, in the engine and in the trainer: with equal shapes the
            two run the same kernels on the same numbers, and agree to the bit.
        precision: Of the engine.
    """

    seed: int
    prompts: int
    group_size: int
    micro_batch_size: int
    precision: Precision

    @property
    def samples(self) -> int:
        """Samples of a rollout."""
        return self.prompts * self.group_size

    def generator(self, stream: str) -> torch.Generator:
        """Return a CPU generator of its own for one use."""
        return stream_generator(self.seed, stream)
