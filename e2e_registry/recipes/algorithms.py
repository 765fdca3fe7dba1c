"""Group-relative policy optimization: advantages, importance ratios, the clipped objective. Pure functions.

Source: GRPO (Shao et al. 2024, arXiv:2402.03300) for the advantages, PPO (Schulman et al. 2017, arXiv:1707.06347) for
the objective, in the form that Flow-GRPO (Liu et al. 2025, arXiv:2505.05470) applies to the transitions of a sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from e2e_registry.errors import UsageError


def grouped(rewards: Tensor, group_size: int) -> Tensor:
    """Return rewards of shape ``(groups * group_size,)``, the samples of a group neighbours, a row a group.

    Raises:
        UsageError: The rewards are no whole number of groups.
    """
    if group_size < 1 or rewards.ndim != 1 or rewards.numel() % group_size:
        raise UsageError(f"rewards of shape {tuple(rewards.shape)} are not whole groups of {group_size}")
    return rewards.view(-1, group_size)


def group_advantages(rewards: Tensor, group_size: int, *, epsilon: float = 1e-4) -> Tensor:
    """Return each sample's reward relative to its group: ``(r - mean) / (std + epsilon)``.

    Args:
        rewards: Shape ``(groups * group_size,)``; the samples of a group are neighbours.
        group_size: Samples of one prompt. The standard deviation is the unbiased one, and 0 in a group of one.
        epsilon: Keeps groups whose rewards are all equal at zero.

    Returns:
        Shape and dtype of ``rewards``.

    Raises:
        UsageError: The rewards are no whole number of groups.
    """
    groups = grouped(rewards, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(groups)
    return (centred / (std + epsilon)).view(-1)


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The clipped objective of each action (a transition, a token), and how far the policy has moved on it.

    Attributes:
        losses: To be minimized; with gradient.
        ratio: ``pi_new / pi_old``, same shape, without gradient.
        is_clipped: Where the clipped term is the one that counts, same shape.
    """

    losses: Tensor
    ratio: Tensor
    is_clipped: Tensor


def clipped_policy_terms(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """Return ``max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))`` of each action.

    Args:
        log_prob: Under the policy that is trained, with gradient.
        old_log_prob: Under the policy that drew the actions, same shape.
        advantage: Broadcast to that shape.
        clip_low: How far below 1 the ratio still has a gradient.
        clip_high: How far above 1.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    unclipped = -advantage * ratio
    clipped = -advantage * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return PolicyTerms(torch.maximum(unclipped, clipped), ratio.detach(), (clipped > unclipped).detach())


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped objective of a batch of transitions, and how far the policy has moved on it.

    Attributes:
        loss: To be minimized; shape ``()``, with gradient.
        ratio: ``pi_new / pi_old`` of each transition, shape ``(n,)``, without gradient.
        is_clipped: Where the clipped term is the one that counts, shape ``(n,)``.
    """

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor


def clipped_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float) -> PolicyLoss:
    """Return the mean of ``max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range))``.

    Args:
        log_prob: Under the policy that is trained; shape ``(n,)``, with gradient.
        old_log_prob: Under the policy that drew the transitions; shape ``(n,)``.
        advantage: Shape ``(n,)``.
        clip_range: How far from 1 the ratio still has a gradient.
    """
    terms = clipped_policy_terms(log_prob, old_log_prob, advantage, clip_range, clip_range)
    return PolicyLoss(terms.losses.mean(), terms.ratio, terms.is_clipped)
