"""What trainer and engine of a recipe that draws digits must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from e2e_registry.recipes.rollout_config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(RolloutConfig):
    """What trainer and engine must agree on.

    Attributes:
        denoise_steps: Steps of the sampler.
    """

    denoise_steps: int
