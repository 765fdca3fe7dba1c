"""DiffusionNFT's objective: reinforcement learning on the forward process. Pure functions.

Source: Zheng et al. 2025, "DiffusionNFT: Online Diffusion Reinforcement with Forward Process" (arXiv:2509.16117). No
log-probs and no sampler enter: images are noised as in flow matching, and one network's prediction is mixed with the
old policy's into a positive and a negative policy, each regressed on the image by how good the image was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from e2e_registry.recipes.algorithms import grouped


def optimality_probability(rewards: Tensor, group_size: int, clip: float, *, epsilon: float = 1e-4) -> Tensor:
    """Return ``1/2 + clip((reward - group mean) / (clip * (std + epsilon)), -1, 1) / 2`` of each sample.

    The mean is that of the sample's group, the standard deviation that of all samples: a group in which all samples are
    much alike says less about what is good.

    Args:
        rewards: Shape ``(groups * group_size,)``; the samples of a group are neighbours.
        group_size: Samples of one prompt.
        clip: Standard deviations at which the probability reaches 0 and 1.
        epsilon: Keeps samples whose rewards are all equal at 1/2.

    Returns:
        Shape and dtype of ``rewards``.

    Raises:
        UsageError: The rewards are no whole number of groups.
    """
    groups = grouped(rewards, group_size)
    centred = (groups - groups.mean(dim=1, keepdim=True)).view(-1)
    std = rewards.std() if rewards.numel() > 1 else torch.zeros_like(rewards).sum()
    return 0.5 + 0.5 * (centred / (clip * (std + epsilon))).clamp(-1.0, 1.0)


@dataclass(frozen=True, slots=True)
class NftLoss:
    """The objective of a batch, and its parts.

    Attributes:
        loss: To be minimized; shape ``()``, with gradient.
        positive: The positive policy's normalised error of each sample, shape ``(n,)``, without gradient.
        negative: The negative policy's.
    """

    loss: Tensor
    positive: Tensor
    negative: Tensor


def nft_loss(
    velocity: Tensor, old_velocity: Tensor, noisy: Tensor, data: Tensor, sigma: Tensor, optimality: Tensor, beta: float
) -> NftLoss:
    """Return the mean of ``r * |x0_positive - x0|^2 + (1 - r) * |x0_negative - x0|^2``, each part normalised.

    The positive policy is ``(1 - beta) * old + beta * new``, the negative ``(1 + beta) * old - beta * new``; both
    predict the image as ``noisy - sigma * velocity``. The squares of each sample are divided by the sample's mean
    absolute error, without gradient, so that noise levels weigh alike.

    Args:
        velocity: Of the policy that is trained, shape ``(n, channels, height, width)``, with gradient.
        old_velocity: Of the old policy, of the same shape.
        noisy: What both were asked about, of the same shape.
        data: The images ``x0``, of the same shape.
        sigma: Noise levels from 0 to 1, shape ``(n,)``.
        optimality: ``r``, shape ``(n,)``, from 0 to 1.
        beta: Above 0.
    """
    old = old_velocity.detach()
    scale = sigma.view(-1, 1, 1, 1)
    positive = _normalised_error(noisy - scale * ((1.0 - beta) * old + beta * velocity), data)
    negative = _normalised_error(noisy - scale * ((1.0 + beta) * old - beta * velocity), data)
    loss = (optimality * positive + (1.0 - optimality) * negative).mean()
    return NftLoss(loss, positive.detach(), negative.detach())


def _normalised_error(predicted: Tensor, data: Tensor, *, floor: float = 1e-5) -> Tensor:
    """Return each sample's mean squared error over its mean absolute error, shape ``(n,)``."""
    error = predicted - data
    weight = error.detach().abs().flatten(1).mean(dim=1).clamp_min(floor)
    return error.square().flatten(1).mean(dim=1) / weight
