"""The rollout engine: a whole copy of the policy in its own precision, which follows the sharded trainer's weights.

Deterministic mode makes the engine repeat, but does not make it agree with the trainer: precision, batch shapes and
kernels may differ between the two. Flags pin them, and metrics measure what remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from e2e_registry.recipes.actor import ActorContext
from e2e_registry.recipes.dtype_policy import DtypeOverride, DtypePolicy, Precision
from e2e_registry.recipes.generators import drawing_from, stream_seed
from e2e_registry.recipes.mixed_precision import DTYPES, cast_parameters, compute_dtypes, convert_at_regions
from e2e_registry.recording.digests import digest_of

__all__ = ["DTYPES", "Precision", "RolloutEngine"]


class RolloutEngine:
    """A base for recipes' rollout engines.

    Args:
        context: What :class:`~e2e_registry.recipes.actor.ActorHost` gives.
        build_model: Builds the policy; its weights are replaced by the first :meth:`load_weights`. They are drawn from
            a seed of their own, so that the engine holds the trainer's weights by no chance: a sync that is missing
            shows even where the trainer has not learned anything yet.
        precision: Of the parameters and of the forward pass; buffers stay as they are built.
        overrides: Parts that compute in another dtype; give what the trainer is given.

    Attributes:
        synced_at: The last ``step`` of :meth:`log_weights`: which of the trainer's exports the engine has.

    Raises:
        UsageError: An override fits no part of the model.
    """

    def __init__(
        self,
        context: ActorContext,
        build_model: Callable[[], nn.Module],
        *,
        precision: Precision,
        overrides: tuple[DtypeOverride, ...] = (),
    ) -> None:
        self.context = context
        self.recorder = context.recorder
        self.device = context.device
        with drawing_from(stream_seed(context.spec.seed, "weights of an engine before its first sync")):
            self.model = build_model().requires_grad_(False).eval()
        context.adopt_attention(self.model)
        policy = DtypePolicy(forward=precision, overrides=overrides)
        convert_at_regions(self.model, policy)
        cast_parameters(self.model, compute_dtypes(self.model, policy))
        self.model.to(self.device)
        self.synced_at = -1
        context.seed_rank()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights by what the trainer exported, already in this engine's precision."""
        self.model.load_state_dict(weights, strict=True)

    def log_weights(self, expected: str, step: int) -> bool:
        """Log which weights the engine holds, and whether they are those that the trainer holds at the same step.

        Read back from the model rather than from what :meth:`load_weights` was given, so that a sync that was skipped,
        or that changed something, shows. It raises nothing: the verdict tells.

        Args:
            expected: The trainer's digest of its weights in this engine's precision.
            step: The rollout that is drawn with them.
        """
        self.synced_at = step
        held = digest_of(self.model.state_dict())
        self.recorder.log_digest("rollout/weights", self.model.state_dict(), step=step)
        self.recorder.log({"rollout/weights_match": int(held == expected)}, step=step)
        return held == expected
