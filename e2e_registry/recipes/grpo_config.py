"""What trainer and engine of the arithmetic recipe must agree on. The driver makes it, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from e2e_registry.recipes.generators import stream_generator

if TYPE_CHECKING:
    import torch

    from e2e_registry.recipes.rollout_engine import Precision

#: Whose log-probs stand for the policy that drew a rollout: the engine's full forward pass over what it drew, or those
#: that its decoding loop computed while drawing.
OldLogProbs = Literal["rescored", "decoded"]


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """What trainer and engine must agree on.

    Attributes:
        seed: Of the run.
        largest: Of the numbers that are added.
        prompts: Prompts of a rollout.
        group_size: Responses to a prompt.
        micro_batch_size: Responses that one forward pass takes, in the engine and in the trainer: with equal shapes the
            two run the same kernels on the same numbers, and agree to the bit.
        precision: Of the engine.
        clip_low: How far below 1 a ratio still counts.
        clip_high: How far above 1.
        kl_coefficient: Weight of the divergence from the reference in the loss.
        entropy_coefficient: Weight of the entropy, which the loss rewards.
        old_log_probs: The denominator of the ratio.
    """

    seed: int
    largest: int
    prompts: int
    group_size: int
    micro_batch_size: int
    precision: Precision
    clip_low: float
    clip_high: float
    kl_coefficient: float
    entropy_coefficient: float
    old_log_probs: OldLogProbs

    @property
    def samples(self) -> int:
        """Responses of a rollout."""
        return self.prompts * self.group_size

    def generator(self, stream: str) -> torch.Generator:
        """Return a CPU generator of its own for one use."""
        return stream_generator(self.seed, stream)
