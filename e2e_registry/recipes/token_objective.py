"""Objectives over the tokens of responses: divergence, entropy, and means over tokens. Pure functions.

Sources: GRPO (Shao et al. 2024, arXiv:2402.03300) for the divergence in the loss, with the estimator "k3" of Schulman
(2020, "Approximating KL divergence"); DAPO (Yu et al. 2025, arXiv:2503.14476) for normalizing over tokens, so that each
token of a rollout counts the same, however long its response is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k3_divergence(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` with ``r = reference / policy``, at each sampled token.

    Its mean over tokens that the policy drew estimates KL(policy || reference). It is never negative, but for the
    rounding of ``exp`` where the two are all but equal.

    Args:
        log_prob: Of the token under the policy.
        reference_log_prob: Of the same token under the reference, same shape.
    """
    difference = reference_log_prob - log_prob
    return torch.exp(difference) - 1.0 - difference


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy of each distribution, in nats; the last dimension holds normalized log-probabilities."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the values whose token counts, a scalar.

    Args:
        values: One a token, shape ``(n, r)``.
        mask: Which tokens count, bool of the same shape. What stands elsewhere has no effect, not even where it is NaN.
    """
    return torch.where(mask, values, 0.0).sum()
