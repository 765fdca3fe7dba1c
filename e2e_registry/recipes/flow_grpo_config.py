"""What trainer and engine of the Flow-GRPO recipe must agree on. The driver makes it, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from e2e_registry.recipes.digits_config import DigitsConfig
from e2e_registry.recipes.flow_matching import SdeStep, noise_schedule


@dataclass(frozen=True, kw_only=True)
class FlowGrpoConfig(DigitsConfig):
    """What trainer and engine must agree on.

    Attributes:
        noise_level: Of the SDE; see :class:`~e2e_registry.recipes.flow_matching.SdeStep`.
    """

    noise_level: float

    def steps(self) -> list[tuple[float, SdeStep]]:
        """Return the sigma that the model is asked at, and the transition, of each step."""
        sigmas = noise_schedule(self.denoise_steps)
        return [(sigmas[i], SdeStep.at(i, sigmas, self.noise_level)) for i in range(self.denoise_steps)]
