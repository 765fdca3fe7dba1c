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
        micro_batch_size: Samples that one forward pass takes at most; see :attr:`forward_passes`.
        train_ranks: Ranks that share a rollout evenly.
        precision: Of the engine.
    """

    seed: int
    prompts: int
    group_size: int
    micro_batch_size: int
    train_ranks: int
    precision: Precision

    @property
    def samples(self) -> int:
        """Samples of a rollout."""
        return self.prompts * self.group_size

    @property
    def micro_batches(self) -> list[slice]:
        """The forward passes over a train rank's share; the last is smaller where the size does not divide it."""
        share, size = self.samples // self.train_ranks, self.micro_batch_size
        return [slice(start, min(start + size, share)) for start in range(0, share, size)]

    @property
    def sample_shares(self) -> list[float]:
        """How much of a train rank's share each micro-batch is: weighed by it, every sample counts alike."""
        share = self.samples // self.train_ranks
        return [(rows.stop - rows.start) / share for rows in self.micro_batches]

    @property
    def forward_passes(self) -> list[slice]:
        """Those over a whole rollout, as the engine takes them: the micro-batches of one rank after the other.

        With equal shapes engine and trainer run the same kernels on the same numbers, and agree to the bit.
        """
        share = self.samples // self.train_ranks
        return [
            slice(rank * share + rows.start, rank * share + rows.stop)
            for rank in range(self.train_ranks)
            for rows in self.micro_batches
        ]

    def generator(self, stream: str) -> torch.Generator:
        """Return a CPU generator of its own for one use."""
        return stream_generator(self.seed, stream)
