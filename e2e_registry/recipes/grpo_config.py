"""What trainer and engine of the arithmetic recipe must agree on. The driver makes it, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from e2e_registry.recipes.rollout_config import RolloutConfig

#: Whose log-probs stand for the policy that drew a rollout: the engine's full forward pass over what it drew, or those
#: that its decoding loop computed while drawing.
OldLogProbs = Literal["rescored", "decoded"]


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(RolloutConfig):
    """What trainer and engine must agree on.

    Attributes:
        largest: Of the numbers that are added.
        clip_low: How far below 1 a ratio still counts.
        clip_high: How far above 1.
        kl_coefficient: Weight of the divergence from the reference in the loss.
        entropy_coefficient: Weight of the entropy, which the loss rewards.
        old_log_probs: The denominator of the ratio.
    """

    largest: int
    clip_low: float
    clip_high: float
    kl_coefficient: float
    entropy_coefficient: float
    old_log_probs: OldLogProbs
