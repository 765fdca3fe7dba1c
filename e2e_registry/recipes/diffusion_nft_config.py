"""What trainer and engine of the DiffusionNFT recipe must agree on. The driver makes it, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from e2e_registry.errors import UsageError
from e2e_registry.recipes.digits_config import DigitsConfig


@dataclass(frozen=True, kw_only=True)
class DiffusionNftConfig(DigitsConfig):
    """What trainer and engine must agree on.

    Attributes:
        beta: How far the implicit positive and negative policies stand from the old one; above 0.
        advantage_clip: Standard deviations of reward at which the optimality probability is 0 or 1.
        decay_growth: By how much the decay of the old policy grows with each rollout.
        decay_limit: Where it stops.
    """

    beta: float
    advantage_clip: float
    decay_growth: float
    decay_limit: float

    def __post_init__(self) -> None:
        """Refuse what the objective divides by.

        Raises:
            UsageError: ``beta`` or ``advantage_clip`` is not above 0, or ``decay_limit`` not in [0, 1].
        """
        for flag, value in (("--beta", self.beta), ("--advantage-clip", self.advantage_clip)):
            if not value > 0.0:
                raise UsageError(f"{value} is not above 0", where=flag)
        if not 0.0 <= self.decay_limit <= 1.0:
            raise UsageError(f"{self.decay_limit} is no weight of a mean", where="--decay-limit", hint="give 0 to 1")

    def decay(self, rollout: int) -> float:
        """Return the weight that the old policy keeps of itself after it was trained against on ``rollout``.

        It starts at 0, where the old policy is simply replaced: early on, fresh samples are worth more than stable ones
        (arXiv:2509.16117).
        """
        return min(self.decay_growth * rollout, self.decay_limit)
