"""Rectified flow: the training pair, and sampling as a stochastic differential equation with transition densities.

Time runs from ``sigma = 1`` (noise) to ``0`` (data): ``x_sigma = (1 - sigma) * data + sigma * noise``, and the model
predicts the velocity ``noise - data``. The SDE has the marginals of the ODE at every ``sigma`` (Flow-GRPO,
arXiv:2505.05470, eq. 9): its noise makes each step a Gaussian, whose density a policy gradient can use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e_registry.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def noise_schedule(steps: int) -> tuple[float, ...]:
    """Return the ``steps + 1`` sigmas of a sampler, evenly spaced from 1 to 0.

    Raises:
        UsageError: Fewer than two steps: the diffusion coefficient is infinite at ``sigma = 1`` and is taken at the
            second sigma instead, which must not be 0.
    """
    if steps < 2:
        raise UsageError(f"a sampler of {steps} steps has no step between noise and data", hint="give at least 2")
    return tuple((steps - index) / steps for index in range(steps + 1))


def training_pair(data: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the noisy sample and the velocity that the model should predict for it.

    Args:
        data: Shape ``(batch, channels, height, width)``.
        noise: Standard normal, of the same shape.
        sigma: From 0 to 1, shape ``(batch,)``.
    """
    sigma = sigma.view(-1, 1, 1, 1)
    return (1.0 - sigma) * data + sigma * noise, noise - data


@dataclass(frozen=True, slots=True)
class SdeStep:
    """One transition of the sampler: ``x_next ~ Normal(sample_scale * x + velocity_scale * v, std)``."""

    sample_scale: float
    velocity_scale: float
    std: float

    @staticmethod
    def at(index: int, sigmas: tuple[float, ...], noise_level: float) -> SdeStep:
        """Return the Euler-Maruyama step from ``sigmas[index]`` to ``sigmas[index + 1]``.

        Coefficients are Python floats, whose square roots and logarithms the profile ``cpu-portable`` makes equal on
        all CPUs; torch's ``sqrt`` on the CPU is not.

        Args:
            index: The step, from 0.
            sigmas: What :func:`noise_schedule` returned.
            noise_level: Scale of the diffusion coefficient ``noise_level * sqrt(sigma / (1 - sigma))``; above 0.
        """
        sigma, dt = sigmas[index], sigmas[index + 1] - sigmas[index]
        finite = sigmas[1] if sigma == 1.0 else sigma
        diffusion = noise_level * math.sqrt(finite / (1.0 - finite))
        drift = diffusion * diffusion / (2.0 * sigma)
        return SdeStep(1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt, diffusion * math.sqrt(-dt))

    def mean(self, sample: Tensor, velocity: Tensor) -> Tensor:
        """Return the mean of the next sample, of the shape of ``sample``."""
        return sample * self.sample_scale + velocity * self.velocity_scale

    def log_prob(self, following: Tensor, mean: Tensor) -> Tensor:
        """Return the log-density of ``following``, averaged over the elements of each sample; shape ``(batch,)``.

        The average, as in Flow-GRPO, rather than the sum: ratios then do not depend on the image's size.
        """
        constant = math.log(self.std) + 0.5 * math.log(2.0 * math.pi)
        squared = (following - mean).square() / (2.0 * self.std * self.std)
        return (-squared - constant).flatten(1).mean(dim=1)
